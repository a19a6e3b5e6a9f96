"""Start a private Ray without parts it does not need: dashboard server and agent, log monitor, cluster autoscaler.

Ray has no switch for them. Together they take six CPU seconds at every start, and more while they run. The agent of runtime environments,
half a CPU second and 80 MB, starts when it is asked for the first time. The wait for a node to register is longer than Ray's own. All this
patches private names of Ray, so versions that were not tested start unpatched.

Ray ends a node without agents, so a small program (`agent_stand_in.py`) runs in their place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

TESTED_VERSION = "2.60."
AGENT, ENVIRONMENT_AGENT, WORKER = "--dashboard_agent_command=", "--runtime_env_agent_command=", "--python_worker_command="
WORKER_PREFIX = "RLHFLESS_WORKER_PREFIX"  # environment variable: a command, such as a profiler, that starts Ray's workers
FORK_CLIENT = os.path.join(os.path.dirname(__file__), "fork_client.py")  # the program in such a command that forks workers
STAND_IN = os.path.join(os.path.dirname(__file__), "agent_stand_in.py")
REGISTRATION_S = 150.0  # time for a new node to register; Ray's own 30 s are too short on a busy machine


@contextmanager
def local_ray() -> Iterator[None]:
    """Start clusters and nodes inside the block without the parts named above."""
    import ray

    if not ray.__version__.startswith(TESTED_VERSION):
        yield
        return
    from ray._private import services
    from ray._private.node import Node

    start, find = services.start_ray_process, services.get_node

    def get_node_patiently(*about: object) -> object:
        end = time.monotonic() + REGISTRATION_S
        while True:
            try:
                return find(*about)
            except RuntimeError:  # the node has not registered yet
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)

    def no_server(node: Any, **settings: object) -> None:
        node._webui_url = None

    def start_with_stand_in(command: list[str], *more: Any, **settings: Any) -> object:
        return start([_replaced(word) for word in command], *more, **settings)

    with (
        patch.object(Node, "start_api_server", no_server),
        patch.object(Node, "start_log_monitor", lambda node: None),
        patch.object(Node, "start_monitor", lambda node: None),
        patch.object(services, "start_ray_process", start_with_stand_in),
        patch.object(services, "get_node", get_node_patiently),
    ):
        yield


def forked(command: list[str]) -> list[str]:
    """Return a Python command that is forked from the fork server of this process's private Ray, if it has one."""
    prefix = shlex.split(os.environ.get(WORKER_PREFIX, ""))
    return [*prefix, *command] if FORK_CLIENT in prefix else command


def _replaced(option: str) -> str:
    """Return a node's option with a stand-in for the agents' commands, and workers behind `WORKER_PREFIX`."""
    if option.startswith(WORKER):
        return WORKER + f"{os.environ.get(WORKER_PREFIX, '')} {option.removeprefix(WORKER)}".strip()
    name = next((name for name in (AGENT, ENVIRONMENT_AGENT) if option.startswith(name)), None)
    if name is None:
        return option
    command = shlex.split(option.removeprefix(name))
    told = dict(word.split("=", 1) for word in command if word.startswith(("--session-dir=", "--node-id=", "--node-ip-address=")))
    stand_in = [sys.executable, "-I", "-S", STAND_IN, told["--session-dir"], told["--node-id"]]
    if name == ENVIRONMENT_AGENT:
        stand_in += [told["--node-ip-address"], *command]
    return name + subprocess.list2cmdline(stand_in)
