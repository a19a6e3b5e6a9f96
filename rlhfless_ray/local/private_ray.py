"""What a private Ray needs around it: a folder, a token, the loopback address, and sessions of its own."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from ray._private.node import Node

CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0: this Ray is on loopback only


def temporary_folder() -> Path:
    """Create a folder that stays locked while this process lives, and remove those of processes that no longer do."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > 30:  # socket paths are limited to 107 characters, of which Ray uses 70
        base = Path("/tmp")
    for other in base.glob("rlhfless-ray-*"):
        try:
            if time.time() - other.stat().st_mtime > 60 and lock(other) is not None:  # a younger one may not be locked yet
                shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue  # owned by another user, or already removed
    folder = Path(tempfile.mkdtemp(prefix="rlhfless-ray-", dir=base))
    lock(folder)
    return folder


def lock(folder: Path) -> int | None:
    """Lock the folder until this process ends. Returns the file descriptor, or None if another process holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside the block. With TMPDIR in a folder of ours, the files of killed processes are
    removed with the folder."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def detached_sessions(tell: Callable[[int], None]) -> AbstractContextManager[object]:
    """Start Ray's processes inside the block in sessions of their own, and pass each session id to `tell`.

    Signals to the driver's process group, such as Ctrl-C, then reach the driver alone. It needs Ray to save the run.
    """
    import ray._private.services as services

    ray_starts = services.ConsolePopen

    class Detached(ray_starts):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **{**settings, "start_new_session": True})
            tell(self.pid)

    return patch.object(services, "ConsolePopen", Detached)


def add_node(
    gcs_address: str, store_mb: int, num_cpus: int, labels: dict[str, str], *, num_gpus: int = 0, temp_dir: str = "", address: str = ""
) -> Node:
    """Start a further node of a Ray on this machine, and wait until it has registered. Its processes end with `kill_all_processes`.

    `temp_dir`, `address`: Ray's folder, and the address that the node listens at; by default Ray's own.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    about = RayParams(
        gcs_address=gcs_address,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        labels=labels,
        object_store_memory=store_mb * 2**20,
        temp_dir=temp_dir or None,
        node_ip_address=address or None,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
    )
    about.dashboard_agent_listen_port = None  # its default is the first node's
    return Node(about, head=False, shutdown_at_exit=False, spawn_reaper=False)


def set_auth_token() -> None:
    """Set a random authentication token for a private Ray, kept in memory only, unless the environment has one.

    Ray caches the token of an earlier cluster of this process (a notebook's `ray.init()`), so the cache is reset.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        AuthenticationTokenLoader.instance().reset_cache()


def bind_to_loopback(on: bool) -> None:
    """Make a private Ray bind to 127.0.0.1 only.

    Ray replaces a loopback address by the machine's own unless clusters are disabled. Its one switch for that is read at
    import (here) and by its child processes.
    """
    import ray._private.ray_constants as constants

    constants.ENABLE_RAY_CLUSTER = not on
    if on:
        os.environ[CLUSTERS] = "0"
    else:
        os.environ.pop(CLUSTERS, None)
