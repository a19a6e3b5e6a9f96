"""Starting or joining Ray, and proof that nothing of ours is left on it."""

from __future__ import annotations

import fcntl
import gc
import getpass
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhfless_ray.errors import RunError, UserError, one_line
from rlhfless_ray.functions.lean_ray import lean_ray
from rlhfless_ray.functions.sweeper import Sweeper
from rlhfless_ray.recipe import Recipe

PACKAGES = ("rlhfless_ray", "placement")
LEAST_STORE_MB, STORE_SHARE = 512, 0.3  # the latter of the machine's memory, as Ray's own default
WEIGHT_BYTES, STATE_BYTES = 4, 12  # per parameter on its way: float32; with Adam's two moments
VERSIONS, STATES = 3, 2  # held at once: a version, its copy and the next; the learner's last state, and the next


class RayCluster:
    """A private Ray on loopback with token authentication, or somebody else's that we are a guest on."""

    def __init__(self, recipe: Recipe, parameters: int = 0) -> None:
        """`parameters`: of the policy, which a private cluster's object store is to hold in several versions."""
        self.recipe, self.parameters = recipe, parameters
        self.private = False
        self.joined = False
        self.names: dict[str, str] = {}
        self.temporary: Path | None = None  # of a private Ray: its session, and what its processes leave in TMPDIR
        self.sweeper: Sweeper | None = None

    def start(self) -> None:
        import ray

        if ray.is_initialized():  # a notebook or a test that already is on a cluster
            self.joined = True
            return
        section = self.recipe.cluster
        address = section.address or os.environ.get("RAY_ADDRESS", "")
        _brief_errors()
        if address:
            _answers(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_shipped())
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(f"cluster.address {address}: no Ray cluster answers there: {one_line(error, 200)}") from None
            return
        self.private = True
        _own_token()
        _loopback_only(True)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_METRICS_COLLECTION", "0")
        # OpenMP threads that wait for one another by spinning make two threads on two cores dozens of times slower as soon
        # as anything else runs; a short spin keeps the speed of a quiet machine (measured: 16 ms a step, else up to 650).
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets any other program on the machine starve the run
        # compiled kernels are worth keeping: they stay where they were
        kernels = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels))
        self.temporary = _temporary_folder()
        self.sweeper = Sweeper(self.temporary)
        with _own_sessions(self.sweeper.watch), _temporary_files_in(self.temporary), lean_ray():
            try:
                ray.init(
                    address="local",
                    num_cpus=section.cpus or len(os.sched_getaffinity(0)),
                    object_store_memory=self._store_mb() * 2**20,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self.temporary / "ray"),
                )
            except Exception as error:  # Ray raises plain ones where its processes do not come up in time
                raise RunError(f"a private Ray did not start on this machine: {one_line(error, 200)}") from error

    def _store_mb(self) -> int:
        if self.recipe.cluster.object_store_mb is not None:
            return self.recipe.cluster.object_store_mb
        memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        return store_mb(self.parameters, memory_mb, keeps_state=self.recipe.checkpoint.memory_every_steps > 0)

    def stop(self) -> None:
        """Leave the cluster; a private one ends with it."""
        import ray

        if not self.joined and (ray.is_initialized() or self.private):  # private: also where its start was cut short
            ray.shutdown()
        if self.joined:
            # An error that was handled keeps its frames in a cycle, and what they refer to (weights, answers) in the object stores:
            # until Python happens to collect it, the nodes are busy in the eyes of Ray's autoscaler.
            gc.collect()
        if self.private:
            _loopback_only(False)
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        if self.sweeper is not None:
            self.sweeper.close()

    def node_name(self, node_id: str) -> str:
        """A node's host name, with a number where several nodes share it. Ray's ids are of one Ray only: after a resume the
        same machine would look like another one."""
        if node_id not in self.names:
            import ray

            host = next((n["NodeManagerHostname"] for n in ray.nodes() if n["NodeID"] == node_id), node_id)
            shared = sum(name.partition("#")[0] == host for name in self.names.values())
            self.names[node_id] = f"{host}#{shared + 1}" if shared else host
        return self.names[node_id]

    def resource(self) -> str:
        """What a slot is here: "cpu" or "gpu". Raises UserError when the recipe asks for what the cluster lacks."""
        import ray

        wanted = self.recipe.functions.slot
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        if wanted == "gpu" and not has_gpus:
            raise UserError("functions.slot: gpu, but the cluster has no GPU; set it to cpu or auto")
        return "gpu" if wanted == "gpu" or (wanted == "auto" and has_gpus) else "cpu"

    def device(self, resource: str) -> str | None:
        """What Ray calls the cluster's GPUs ("" where it does not say, or there are several kinds); None where slots are cores."""
        import ray

        if resource == "cpu":
            return None
        kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
        return kinds[0] if len(kinds) == 1 else ""

    def check_size(self, resource: str) -> int:
        """Slots of the cluster. Raises UserError when the recipe needs more at once than there are, or on nodes that are not."""
        from rlhfless_ray.functions.lease import cluster_slots, node_slots

        slots, recipe = cluster_slots(resource), self.recipe
        labels, gangs = recipe.rollout.nodes, {"critic": recipe.algorithm.has_critic, "reference": recipe.has_reference, "learner": True}
        wanted = {f"{name}.ranks": getattr(recipe, name).ranks for name, there in gangs.items() if there}
        for name, needed in {**wanted, "rollout.min_actors": recipe.rollout.min_actors}.items():
            if needed > slots:
                unit = "GPUs" if resource == "gpu" else "CPU cores"
                raise UserError(f"{name}: {needed} slots at once, but the cluster has {slots} ({unit}); lower it or add nodes")
        usable = sum(node_slots(resource, labels).values())
        if self.recipe.rollout.min_actors > usable:
            raise UserError(
                f"rollout.nodes: engines need {self.recipe.rollout.min_actors} slots on nodes labelled {labels}, but these have "
                f"{usable}; start such nodes, or name other labels"
            )
        return slots


def _shipped() -> dict[str, Any] | None:
    """Our packages for the cluster's nodes, where a surrounding Ray job has not shipped them with its working folder."""
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return None
    return {"py_modules": [str(Path(sys.modules[name].__file__ or "").parent) for name in PACKAGES if name in sys.modules]}


def store_mb(parameters: int, memory_mb: float, keeps_state: bool) -> int:
    """The object store for a policy of so many parameters, MB, on a machine of so much memory; `keeps_state`: the learner's state is
    kept in it too."""
    each = VERSIONS * WEIGHT_BYTES + (STATES * STATE_BYTES if keeps_state else 0)
    return max(LEAST_STORE_MB, int(min(LEAST_STORE_MB + parameters * each / 2**20, STORE_SHARE * memory_mb)))


def _answers(address: str) -> None:
    """Raises UserError when nothing listens there; Ray itself would try for minutes before it says so."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():  # `auto` and the like: Ray knows where
        return
    try:
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"cluster.address {address}: no Ray cluster answers there: {one_line(error, 200)}") from None


def _temporary_folder() -> Path:
    """A folder that is locked while this process lives. Those of killed processes, which nobody locks, go now."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > 30:  # a socket's path may have 107 characters, and Ray needs 70 of them
        base = Path("/tmp")
    for other in base.glob("rlhfless-ray-*"):
        try:
            if time.time() - other.stat().st_mtime > 60 and _locked(other) is not None:  # a younger one may be about to be locked
                shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue  # somebody else's, or gone already
    folder = Path(tempfile.mkdtemp(prefix="rlhfless-ray-", dir=base))
    _locked(folder)
    return folder


def _locked(folder: Path) -> int | None:
    """A lock on the folder until this process ends, or None where another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Processes started inside put their temporary files there: a killed one cannot remove them itself."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@contextmanager
def _own_sessions(tell: Callable[[int], None]) -> Iterator[None]:
    """Ray's processes started inside get sessions of their own, which `tell` is told. A signal to the driver's process group (a
    terminal's Ctrl-C, a batch system's SIGTERM) then reaches the driver alone, which needs Ray alive to save and to end it in order."""
    import ray._private.services as services

    ray_starts = services.ConsolePopen

    class Detached(ray_starts):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "start_new_session": True})
            tell(self.pid)

    setattr(services, "ConsolePopen", Detached)  # noqa: B010
    try:
        yield
    finally:
        setattr(services, "ConsolePopen", ray_starts)  # noqa: B010


def _brief_errors() -> None:
    """Of what Ray says about a killed worker, the first sentence: the run tells itself what it does about it."""
    import ray._private.worker as worker

    print_lines = worker.print_to_stdstream
    if getattr(print_lines, "brief", False):
        return

    def brief(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data.get("pid") != "raylet":
            print_lines(data, ignore_prefix)
            return
        for line in data["lines"]:
            print(f"Ray: {line.partition(chr(10))[0].partition('. ')[0]}", flush=True)

    setattr(brief, "brief", True)  # noqa: B010
    setattr(worker, "print_to_stdstream", brief)  # noqa: B010


def _own_token() -> None:
    """A local Ray asks for a token unless RAY_AUTH_MODE says otherwise: one of this run's own, never on disk. Ray keeps the one that
    an earlier Ray of this process had (a notebook's `ray.init()`), and would not be let in with that."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        AuthenticationTokenLoader.instance().reset_cache()


def _loopback_only(on: bool) -> None:
    """Make a local Ray bind to 127.0.0.1 alone. Ray replaces a loopback address by the machine's own unless it was told
    that this is no cluster, for which it has one switch, read when it is imported (here) and by its child processes."""
    import ray._private.ray_constants as constants

    constants.ENABLE_RAY_CLUSTER = not on
    if on:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    else:
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
