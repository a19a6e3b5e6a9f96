"""Start a private Ray or join a cluster, and clean up afterwards."""

from __future__ import annotations

import gc
import getpass
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, Stopped, UserError, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.ray_environment import AUTH_MODE, PACKAGES
from rlhfless_ray.local.laptop.forked_workers import ForkServer, worker_prefix
from rlhfless_ray.local.laptop.local_ray import WORKER_PREFIX, local_ray
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.local.private_ray import (
    CLUSTERS,
    add_node,
    bind_to_loopback,
    detached_sessions,
    environment,
    set_auth_token,
    temporary_folder,
)
from rlhfless_ray.local.slot_check import check_slots
from rlhfless_ray.local.watcher import Watcher
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.run_sections import LocalNode
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

if TYPE_CHECKING:
    from ray._private.node import Node

MIN_STORE_MB, STORE_SHARE = 512, 0.3  # share of the machine's memory: Ray's own default
GREETING_S, HTTP2_SETTINGS = 30.0, 4  # longest wait for a server's first frame, which is of this type
WEIGHT_BYTES, STATE_BYTES = 4, 12  # per parameter in the store: float32; float32 with Adam's two moments
VERSIONS, STATES = 3, 2  # held at once: a version, its copy and the next; the learner's last state and the next


class RayCluster:
    """A private Ray on loopback with token authentication, or an existing cluster."""

    shared_is_private = False  # whether the Ray of this process is a private one that `shared` has started
    watcher: ClassVar[Watcher | None] = None  # of this process's Ray

    @classmethod
    @contextmanager
    def shared(
        cls, recipe: Recipe | SupervisedRecipe, parameters: int = 0, store_mb: int | None = None, engines: bool = True
    ) -> Iterator[None]:
        """Keep one Ray for runs that follow one another inside the block. Arguments as those of the constructor."""
        cluster = cls(recipe, parameters, store_mb, architectures=(), engines=engines)
        with cluster.running():
            try:
                cls.shared_is_private = cluster.private
                yield
            finally:
                cls.shared_is_private = False

    def __init__(
        self,
        recipe: Recipe | SupervisedRecipe,
        parameters: int = 0,
        store_mb: int | None = None,
        architectures: Sequence[str] | None = None,
        engines: bool = True,
    ) -> None:
        """`parameters`: number of the policy's parameters. A private object store is sized to hold several versions of them, unless
        `store_mb` says its size. `architectures`: of the models, where they are known. None: workers are not forked. `engines`: see
        `ForkServer`."""
        self.recipe, self.parameters, self.store_mb = recipe, parameters, store_mb
        self.architectures, self.engines = architectures, engines
        self.private = False
        self.joined = False
        self.names: dict[str, str] = {}
        self.temporary: Path | None = None  # session folder and TMPDIR of a private Ray
        self.owns_watcher = False
        self.fork_server: ForkServer | None = None
        self.other_nodes: list[Node] = []  # of a private Ray, besides the driver's

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep Ray running inside the block, where signals to stop are heard."""
        with STOP.listening():
            try:
                self.start()
                STOP.listen()
                STOP.check()
                yield
            finally:
                self.stop()

    def start(self) -> None:
        """Join a cluster or start a private Ray. Raises Stopped after SIGTERM, which Ray's own handler turns into SystemExit meanwhile."""
        try:
            self._start()
        except SystemExit:
            raise Stopped(signal.SIGTERM) from None

    def _start(self) -> None:
        import ray

        if ray.is_initialized():  # a notebook or a test that is already connected
            self.joined, self.private = True, self.shared_is_private
            self._watch().watch_ray(private=self.private)
            return
        section = self.recipe.cluster
        address = section.address or os.environ.get("RAY_ADDRESS", "")
        _shorten_ray_errors()
        if address:
            connect(address)
            self._watch().watch_ray(private=False)
            return
        self.private = True
        set_auth_token()
        bind_to_loopback(True)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # OpenMP threads that spin while they wait slow two threads on two busy cores down dozens of times. A short spin
        # keeps the speed of an idle machine (measured: 16 ms a step instead of up to 650 ms).
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets other programs starve the run
        # keep the cache of compiled kernels outside of the temporary folder
        kernels = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels))
        self.temporary = temporary_folder()
        watcher = self._watch()
        with detached_sessions(watcher.add_session), environment({"TMPDIR": str(self.temporary), **self._forks()}), local_ray():
            folder, (first, *others) = (
                self.temporary / "ray",
                section.local_nodes or [LocalNode(cpus=section.cpus or len(os.sched_getaffinity(0)))],
            )
            try:
                ray.init(
                    address="local",
                    num_cpus=first.cpus,
                    labels=first.labels,
                    object_store_memory=self._store_mb() * 2**20,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                )
                gcs_address = ray.get_runtime_context().gcs_address
                for node in others:
                    started = add_node(gcs_address, self._store_mb(), node.cpus, node.labels, temp_dir=str(folder), address="127.0.0.1")
                    self.other_nodes.append(started)
            except Exception as error:  # Ray raises plain exceptions if its processes do not start in time
                raise RunError(f"a private Ray did not start on this machine: {one_line(error, 200)}") from error
        watcher.watch_ray(private=True)

    def _watch(self) -> Watcher:
        """Return the watcher of this process's Ray. Starts it if there is none, as where a notebook has started Ray itself."""
        if RayCluster.watcher is None:
            RayCluster.watcher, self.owns_watcher = Watcher(self.temporary), True
        return RayCluster.watcher

    def writes_last_words(self, folder: Path, leave_status: Callable[[], None]) -> AbstractContextManager[None]:
        """Have the last words of a run written if it does not leave the block, see `Watcher`."""
        return self._watch().writes_last_words(folder, leave_status)

    def _forks(self) -> dict[str, str]:
        """Start the server that forks workers, on cores. Returns the variables with which workers find it."""
        has_gpus = self.recipe.functions.slot != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
        if self.architectures is None or has_gpus or WORKER_PREFIX in os.environ:
            return {}
        assert self.temporary is not None and self.watcher is not None
        self.fork_server = ForkServer(self.temporary, self.architectures, self.engines)
        self.watcher.add_session(self.fork_server.process.pid)
        return {WORKER_PREFIX: worker_prefix(self.fork_server.address)}

    @staticmethod
    def largest_store_mb(recipe: Recipe | SupervisedRecipe) -> int:
        """Return the size of an object store for runs whose needs are not known yet: memory is taken as it fills."""
        return recipe.cluster.object_store_mb or int(STORE_SHARE * (psutil.virtual_memory().total // 2**20))

    def _store_mb(self) -> int:
        if (size := self.store_mb or self.recipe.cluster.object_store_mb) is not None:
            return size
        assert isinstance(self.recipe, Recipe)
        return store_mb(
            self.parameters, psutil.virtual_memory().total // 2**20, keeps_state=snapshot_every_steps(self.recipe, self.parameters) > 0
        )

    def stop(self) -> None:
        """Leave the cluster, and shut a private one down."""
        import ray

        watcher = self.watcher if self.owns_watcher else None
        if watcher is not None:
            watcher.leave_ray()
        while self.other_nodes:
            self.other_nodes.pop().kill_all_processes(check_alive=False)
        if not self.joined and (ray.is_initialized() or self.private):  # private: its start may have been interrupted
            ray.shutdown()
        if self.joined:
            # Handled errors keep their frames in a reference cycle, and with them object references. Until they are collected,
            # Ray's autoscaler takes the nodes for busy.
            gc.collect()
        if self.private and not self.joined:
            bind_to_loopback(False)
        if self.fork_server is not None:
            self.fork_server.close()
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        if watcher is not None:
            watcher.close()
            RayCluster.watcher, self.owns_watcher = None, False

    def node_name(self, node_id: str) -> str:
        """Return a node's host name, with a number if several nodes share it. Ray's node ids would not survive a resume."""
        if node_id not in self.names:
            import ray

            host = next((n["NodeManagerHostname"] for n in ray.nodes() if n["NodeID"] == node_id), node_id)
            shared = sum(name.partition("#")[0] == host for name in self.names.values())
            self.names[node_id] = f"{host}#{shared + 1}" if shared else host
        return self.names[node_id]

    def resource(self) -> str:
        """Return the kind of a slot, "cpu" or "gpu". Raises UserError if the cluster has no GPU and the recipe asks for one."""
        import ray

        wanted = self.recipe.functions.slot
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        if wanted == "gpu" and not has_gpus:
            raise UserError("functions.slot: gpu, but the cluster has no GPU; set it to cpu or auto")
        return "gpu" if wanted == "gpu" or (wanted == "auto" and has_gpus) else "cpu"

    def device(self, resource: str) -> str | None:
        """Return Ray's name of the cluster's GPUs, "" if unknown or mixed, and None if slots are CPU cores."""
        import ray

        if resource == "cpu":
            return None
        kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
        return kinds[0] if len(kinds) == 1 else ""

    def check_size(self, resource: str) -> int:
        """Return the cluster's number of slots. Raises UserError if all nodes, or the labelled ones, have fewer than the recipe needs."""
        import ray
        from ray._private.state import state

        from rlhfless_ray.functions.cluster_nodes import node_slots
        from rlhfless_ray.local.node_check import check_nodes, check_room

        nodes, recipe = ray.nodes(), self.recipe
        by_node = node_slots(resource, nodes=nodes)
        assert isinstance(recipe, Recipe)
        slots = sum(by_node.values())
        check_width(recipe, max(by_node.values(), default=0), resource)
        check_slots(recipe, slots, resource)
        known = state.get_cluster_config()
        check_nodes(recipe, nodes, by_node, resource, grows=known is not None and len(known.node_group_configs) > 0)
        check_room(recipe, by_node)
        return slots


def check_width(recipe: Recipe, largest: int, resource: str) -> None:
    """Raise UserError if an engine or a reward model has more slots than the largest node, which has `largest`."""
    unit = "GPUs" if resource == "gpu" else "CPU cores"
    widths = {"rollout": ("an engine", recipe.rollout.least_width), "reward": ("a reward model", recipe.reward.tensor_parallel)}
    for section, (what, width) in widths.items():
        if width > max(1, largest):
            raise UserError(
                f"{section}.tensor_parallel: the {width} slots of {what} must be on one node, but the largest node has {largest} "
                f"({unit}); lower it"
            )


def _runtime_env() -> JsonObject | None:
    """Return a runtime environment with this project's packages. None inside a Ray job, which ships its own, and below a sweep with a
    private Ray, whose processes find them on this machine."""
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or os.environ.get(CLUSTERS) == "0":
        return None
    return {"py_modules": [str(Path(sys.modules[name].__file__ or "").parent) for name in PACKAGES if name in sys.modules]}


def store_mb(parameters: int, memory_mb: float, keeps_state: bool) -> int:
    """Return the object store's size in MB for a policy with `parameters` parameters on a machine with `memory_mb`.

    `keeps_state`: the store also holds snapshots of the learner's state.
    """
    each = VERSIONS * WEIGHT_BYTES + (STATES * STATE_BYTES if keeps_state else 0)
    return max(MIN_STORE_MB, int(min(MIN_STORE_MB + parameters * each / 2**20, STORE_SHARE * memory_mb)))


def connect(address: str, key: str = "cluster.address") -> None:
    """Connect to a running Ray cluster. Raises UserError, with the name of the `key`, if none answers."""
    import ray
    from ray.exceptions import AuthenticationError

    _check_address(address, key)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_runtime_env())
    except AuthenticationError as error:  # without a token, or with another one
        raise UserError(
            f"{key} {address}: {AUTH_MODE} is token, and Ray says: {one_line(error.message, 200)}; put the cluster's token into "
            f"~/.ray/auth_token or RAY_AUTH_TOKEN, or unset {AUTH_MODE} if it asks for none"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        has_token = os.environ.get(AUTH_MODE) == "token"
        hint = "it may ask for another token" if has_token else f"if it asks for a token, set {AUTH_MODE}=token"
        raise UserError(f"{key} {address}: no Ray cluster answers there: {one_line(error, 200)}; {hint}") from None


def has_dashboard() -> bool:
    """Return whether the cluster that this process is connected to has a dashboard."""
    from ray._private import worker

    node = worker._global_node
    return node is None or bool(node.webui_url)


def _check_address(address: str, key: str) -> None:
    """Raise UserError if nothing listens at the address, or something else than Ray. Ray itself would retry for minutes, with warnings."""
    found = _resolve_auto() if address == "auto" else address
    host, colon, port = found.rpartition(":")
    if not colon or not port.isdigit():  # no cluster is found, or a name that Ray resolves
        return
    try:
        with socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), timeout=10) as connection:
            if "RAY_USE_TLS" not in os.environ:
                _check_grpc(connection)
    except (OSError, OverflowError) as error:
        where = address if found == address else f"{address}, which is {found}"
        private = "" if found == address else "; a private Ray cannot be joined, so name a cluster's address"
        raise UserError(f"{key} {where}: no Ray cluster answers there: {one_line(error, 200)}{private}") from None


def _check_grpc(connection: socket.socket) -> None:
    """Raise OSError unless a gRPC server, such as Ray's, is at the other end. It answers an HTTP/2 preface with its settings."""
    connection.settimeout(GREETING_S)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0)))
    if connection.recv(4)[3:] != bytes([HTTP2_SETTINGS]):
        raise OSError("another program listens at this port")


def _resolve_auto() -> str:
    """Return the address that Ray takes `auto` for, or `auto` if it finds none. It may be that of a private Ray, found by its process."""
    import ray._private.services as services

    try:
        return services.canonicalize_bootstrap_address("auto") or "auto"
    except (ConnectionError, ValueError):
        return "auto"


def _shorten_ray_errors() -> None:
    """Print only the first sentence of Ray's messages about killed workers: the run reports what it does about them."""
    import ray._private.worker as worker

    print_lines = worker.print_to_stdstream
    if getattr(print_lines, "brief", False):
        return

    def brief(data: JsonObject, ignore_prefix: bool) -> None:
        if data.get("pid") != "raylet":
            print_lines(data, ignore_prefix)
            return
        for line in data["lines"]:
            print(f"Ray: {line.partition(chr(10))[0].partition('. ')[0]}", flush=True)

    setattr(brief, "brief", True)  # noqa: B010
    setattr(worker, "print_to_stdstream", brief)  # noqa: B010
