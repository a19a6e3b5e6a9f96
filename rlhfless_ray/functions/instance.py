"""One warm process (or more) of a function, pinned to its node, working only under a lease."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.waits import get


class State(Enum):
    """COLD → STARTING → STALE → READY ⇄ PARKED → GONE.

    There is no way from STARTING to READY but through STALE: an instance never serves before it has the current
    weights. One that needs none goes through STALE in no time.
    """

    COLD = "cold"
    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    PARKED = "parked"
    GONE = "gone"


class ProcessLost(RunError):
    """An instance's process, or its node, went as it started: another one may take its place."""


_numbers = itertools.count(1)
# What calls raise when the process or its node is lost. Of one that Ray ended for its node's memory it raises no RayActorError.
GONE = (RayActorError, ActorUnschedulableError, NodeDiedError, ObjectLostError, OutOfMemoryError)
LONGEST_REASON = 500  # characters of another program's words that go into a message


@dataclass(eq=False)
class Instance:
    """A handle on the actor, what it holds and what it is."""

    kind: str
    slot: Slot
    actor: Any
    id: str = field(default="")
    state: State = State.STARTING
    leases: list[Lease] = field(default_factory=list)
    opened: Any = None  # reference that resolves when the start is done
    version: int | None = None
    loading: Any = None  # reference that resolves when `version` is in the engine
    fetched: str = ""  # the reference to the weights that it loads, in words: it is not to keep them
    parked_since_s: float = 0.0
    memory_mb: float = 0.0  # while it works; 0: its engine has not been built yet
    kept_mb: float | None = None  # since it was parked last and gave memory back
    giving_back: Any = None  # reference that resolves when it has
    keeps_no_pages: str = ""  # why an engine that should keep KV pages does not

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.kind}-{next(_numbers)}"

    @property
    def parked_memory(self) -> tuple[float, float]:
        """What it holds when it is parked: MB, and as a share of what it works with."""
        kept_mb = self.memory_mb if self.kept_mb is None else self.kept_mb
        return kept_mb, min(1.0, kept_mb / self.memory_mb) if self.memory_mb else 1.0

    @property
    def started(self) -> bool:
        """Whether its start has ended, one way or the other."""
        return self.opened is not None and bool(ray.wait([self.opened], timeout=0)[0])

    def told(self, seconds: float) -> dict[str, Any]:
        """What its start told, see `Pool`. Raises RunError with the cause when the start failed or takes longer: ProcessLost where
        it was the process that was lost, and no error of what it does."""
        try:
            return get(self.opened, seconds, f"{self.id} to start")
        except RayTaskError as error:
            raise RunError(f"{self.failure()}") from error
        except GONE as error:
            raise (RunError if raised_at_start(error) else ProcessLost)(f"{self.failure()}") from error

    def failure(self) -> str | None:
        """Why its start, or else its last loading of weights, failed. None when neither has: what a caller sees of such an
        instance (it has no engine, no weights) follows from this and says nothing."""
        for what, ref in (("start", self.opened), ("load its weights", self.loading)):
            if ref is None or not ray.wait([ref], timeout=0)[0]:
                continue
            try:
                ray.get(ref)
            except (RayTaskError, *GONE) as error:
                return f"{self.id} could not {what}: {reason_of(error)}"
        return None


def lost_on_the_way(ref: Any) -> bool:
    """Whether a call came to nothing because what it was given was lost."""
    if ref is None or not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except (ObjectLostError, RayTaskError) as error:
        return isinstance(error, ObjectLostError) or isinstance(error.cause, ObjectLostError)
    except GONE:
        return False
    return False


def raised_at_start(error: BaseException) -> bool:
    """Whether it is the word of a constructor rather than of a process that died."""
    return bool(getattr(error, "actor_init_failed", False))


def reason_of(error: BaseException) -> str:
    """What an error of Ray says of its cause, in one line and without the traceback of another process."""
    if isinstance(error, RayActorError | OutOfMemoryError):
        lines = [line for line in str(error).splitlines() if line.strip()]
        # a constructor that raised is told with its traceback, whose last line is the point
        said = (lines or [type(error).__name__])[-1 if raised_at_start(error) else 0]
    else:
        cause = getattr(error, "cause", None) or error
        said = str(cause) or type(cause).__name__
    words = " ".join(said.split())
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 1] + "…"


def actor_state(actor: Any) -> tuple[bool, bool]:
    """Whether Ray takes the actor's process to be alive, and whether it ended it for the node's memory. Of a process that the
    kernel killed, memory is only one of the reasons that Ray supposes."""
    import ray._private.state as state

    told = state.actors(actor_id=actor._actor_id.hex())
    death = told.get("DeathCause")
    return told.get("State") != "DEAD", death is not None and death.WhichOneof("context") == "oom_context"


def seeing_only(slot: Slot, resource: str) -> dict[str, str]:
    """The environment of a process that is to see the slot's device and no other. Ray hid all devices from processes that hold none of
    its GPUs, whatever their environment said, into 2.55 (ray-project/ray#62492), and does where a cluster asks for it: not from these."""
    if resource != "gpu":
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(slot.device), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def start_actor(cls: type, slot: Slot, resource: str, environment: dict[str, str], *args: Any) -> Any:
    """An actor without Ray resources of its own, on the slot's node, seeing only the slot's device.

    `num_gpus=0` leaves CUDA_VISIBLE_DEVICES alone, so an actor would see every device: `seeing_only` sets it. Restarts are
    off: an actor that Ray may restart hangs for ever once its group is removed; the pool replaces it instead. A class whose
    calls must be heard while another one works names groups of them in `concurrency_groups` ({name: threads}).
    """
    environment = {**environment, **seeing_only(slot, resource)}
    groups = getattr(cls, "concurrency_groups", None)
    remote: Any = ray.remote  # its annotations know nothing of groups
    made = remote(concurrency_groups=groups)(cls) if groups else remote(cls)
    return made.options(
        num_cpus=0,
        num_gpus=0,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
        runtime_env={"env_vars": environment} if environment else None,
    ).remote(*args)
