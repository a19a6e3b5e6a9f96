"""An instance of a function: a warm process on one node, which works only under a lease."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.lease import Lease, Slot


class State(Enum):
    """STARTING → STALE → READY ⇄ PARKED → GONE.

    STARTING leads to READY only through STALE: an instance never serves before it has the current weights. One that needs no
    weights passes STALE at once.
    """

    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    PARKED = "parked"
    GONE = "gone"


class ProcessLost(RunError):
    """The process or node of a starting instance was lost. Another instance may take its place."""


_numbers = itertools.count(1)
# Raised by calls whose process or node is lost. Processes that Ray ends for lack of memory raise no RayActorError.
GONE = (RayActorError, ActorUnschedulableError, NodeDiedError, ObjectLostError, OutOfMemoryError)
KNOWN_S = 5.0  # time until Ray knows that a process or node is lost
ANSWER_S = 1.0  # replies of earlier calls may arrive after the error of a failed one
MAX_REASON_CHARS = 500  # limit of another program's message in our messages


@dataclass(eq=False)
class Instance:
    """An actor with its leases and its state."""

    kind: str
    slot: Slot
    actor: Any
    id: str = field(default="")
    state: State = State.STARTING
    leases: list[Lease] = field(default_factory=list)
    opened: Any = None  # resolves when the start has ended
    version: int | None = None
    width: int = 1  # number of slots that it works on
    loading: Any = None  # resolves when the engine has loaded `version`
    parked_since_s: float = 0.0
    memory_mb: float = 0.0  # while working; 0 before the engine is built
    kept_mb: float | None = None  # while parked, after it released memory; None before
    giving_back: Any = None  # resolves when it has released memory
    leaving: tuple[Any, list[Lease]] | None = None  # a reference that resolves when it has left its device, and the leases that it had
    keeps_no_pages: str = ""  # why the engine cannot store KV pages; "" if it can
    drafter_failure: str = ""  # why the engine could not load its drafter; "" if it could

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.kind}-{next(_numbers)}"

    @property
    def parked_memory(self) -> tuple[float, float]:
        """Memory while parked: in MB, and as a share of the memory while working, for each of its slots together."""
        kept_mb = self.memory_mb if self.kept_mb is None else self.kept_mb
        return kept_mb, self.width * (min(1.0, kept_mb / self.memory_mb) if self.memory_mb else 1.0)

    @property
    def started(self) -> bool:
        """Whether its start has succeeded or failed."""
        return self.opened is not None and bool(ray.wait([self.opened], timeout=0)[0])

    def start_result(self, seconds: float) -> JsonObject:
        """Return the result of the start, see `WorkerPool`.

        Raises RunError with the cause if the start fails or takes longer than `seconds`, and ProcessLost if the process was
        lost and its own code did not fail.
        """
        try:
            return get(self.opened, seconds, f"{self.id} to start")
        except RayTaskError as error:
            raise RunError(f"{self.failure()}") from error
        except GONE as error:
            raise (RunError if raised_at_start(error) else ProcessLost)(f"{self.failure()}") from error

    def failure(self) -> str | None:
        """Return why its start or its last weight load failed, or None if neither has.

        Later errors of such an instance (no engine, no weights) only follow from this.
        """
        for what, ref in (("start", self.opened), ("load its weights", self.loading)):
            if ref is None or not ray.wait([ref], timeout=ANSWER_S)[0]:
                continue
            try:
                ray.get(ref)
            except (RayTaskError, *GONE) as error:
                return f"{self.id} could not {what}: {reason_of(error)}"
        return None


def is_loss(error: BaseException) -> bool:
    """Return whether a call failed because its process, its node or an argument was lost. Otherwise its own code raised."""
    return isinstance(_origin(error), GONE)


def _origin(error: BaseException) -> BaseException | None:
    """Return what a call's own code raised, or the error itself if it comes from Ray."""
    return error.cause if isinstance(error, RayTaskError) else error


def lost_on_the_way(ref: Any) -> bool:
    """Return whether a call failed because one of its arguments was lost with its node."""
    if ref is None or not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except (RayTaskError, *GONE) as error:
        return isinstance(_origin(error), (ObjectLostError, WorkerCrashedError, TaskUnschedulableError))  # the last two: of a copy
    return False


def raised_at_start(error: BaseException) -> bool:
    """Return whether the actor's constructor raised, instead of its process dying."""
    return bool(getattr(error, "actor_init_failed", False))


def reason_of(error: BaseException) -> str:
    """Return a Ray error's cause in one line, without tracebacks of other processes."""
    if isinstance(error, RayActorError | OutOfMemoryError):
        lines = [line for line in str(error).splitlines() if line.strip()]
        # a constructor's error contains its traceback, whose last line is the message
        message = (lines or [type(error).__name__])[-1 if raised_at_start(error) else 0]
    else:
        cause = getattr(error, "cause", None) or error
        message = str(cause) or type(cause).__name__
    words = " ".join(message.split())
    return words if len(words) <= MAX_REASON_CHARS else words[: MAX_REASON_CHARS - 1] + "…"


def actor_state(actor: Any) -> tuple[bool, bool]:
    """Return whether Ray considers the actor alive, and whether Ray ended it for lack of memory.

    For a process killed by the kernel, memory is only one of the causes that Ray suggests.
    """
    import ray._private.state as state

    info = state.actors(actor_id=actor._actor_id.hex())
    death = info.get("DeathCause")
    return info.get("State") != "DEAD", death is not None and death.WhichOneof("context") == "oom_context"


def _was_not_placed(instance: Instance) -> bool:
    if not instance.started:
        return False
    try:
        ray.get(instance.opened)
    except (RayTaskError, *GONE) as error:
        return isinstance(_origin(error), ActorUnschedulableError)
    return False


def cause_of_loss(instances: Collection[Instance], nodes: ClusterNodes) -> FailureCause:
    """Determine why one of these does not respond.

    A connection may break before Ray knows why. A process that seems alive after KNOWN_S hangs. One that Ray could not place on its node
    came too late: Ray places nothing on a node that is drained.
    """
    end = time.monotonic() + KNOWN_S
    while True:
        if any(nodes.confirm_lost(node) for node in {instance.slot.node for instance in instances}):
            return FailureCause.NODE_LOST
        if any(map(_was_not_placed, instances)):
            return FailureCause.NODE_DRAINED
        ended = [for_memory for alive, for_memory in (actor_state(one.actor) for one in instances) if not alive]
        if ended:
            return FailureCause.MEMORY if any(ended) else FailureCause.DIED
        if time.monotonic() > end:
            return FailureCause.HUNG
        time.sleep(0.05)


def device_environment(slot: Slot, resource: str) -> dict[str, str]:
    """Return the environment that shows a process only the slot's device.

    Up to 2.55 Ray hid all devices from processes without GPUs of its own (ray-project/ray#62492), and a cluster can still ask
    for that. The second variable prevents it.
    """
    if resource != "gpu":
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(slot.device), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@cache  # Ray exports a class again after each `ray.remote(cls)`, and every process loads all that were exported
def _actor_class(cls: type) -> Any:
    groups = getattr(cls, "concurrency_groups", None)
    remote: Any = ray.remote  # its annotations lack concurrency groups
    return remote(concurrency_groups=groups)(cls) if groups else remote(cls)


def start_actor(cls: type, slot: Slot, resource: str, environment: dict[str, str], *args: object) -> Any:
    """Start an actor without Ray resources on the slot's node. It sees only the slot's device.

    With `num_gpus=0` Ray leaves CUDA_VISIBLE_DEVICES alone, so `device_environment` sets it. Restarts are off: an actor that
    Ray may restart hangs forever once its placement group is removed, so the pool replaces it instead. A class with
    concurrent calls names their groups in `concurrency_groups` ({name: threads}).
    """
    environment = {**environment, **device_environment(slot, resource)}
    made = _actor_class(cls)
    return made.options(
        num_cpus=0,
        num_gpus=0,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
        runtime_env={"env_vars": environment} if environment else None,
    ).remote(*args)
