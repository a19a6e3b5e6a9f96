"""What brings a lost learner back: its newest whole state outside of its processes, and what it was given since.

The state is taken while the processes are idle and held on the driver's node. A gang whose rank died starts anew from it and is
given the same batches again, in the same parts, so it makes the same updates: none is applied twice and none is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.replicate import copy_to_driver_node
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.weights.tensor_file import Files


class LearnerLost(RunError):
    """A rank's process is gone, and with it the state that the ranks hold together. `cause`: where it is known already."""

    def __init__(self, what: str, cause: FailureCause | None = None) -> None:
        super().__init__(what)
        self.cause = cause


class Recovery:
    def __init__(self, every_steps: int, say: Callable[[str], None] = lambda _: None) -> None:
        """`every_steps`: updates between two states kept in memory; 0: the checkpoints on disk have to do. `say`: shows a message
        to the user."""
        self.every_steps, self.say = every_steps, say
        self.whole: Any = None  # reference to the newest whole state; None: as the policy's files are
        self.load: Callable[[], Any] | None = None  # reads it, where it is on disk
        self.since: list[tuple[str, Batch]] = []  # "accumulate" and "update" calls after it
        self.coming: tuple[int, list[Any], Any] | None = None  # calls before it, what tells that it is whole, the state
        self.restarts = self.redone = 0
        self.seconds = 0.0  # in which lost learners came back to where they had been
        self.told: tuple[float, ...] = 0, 0, 0.0  # of these three, in metrics so far
        self.snapshot_s, self.snapshot_bytes = 0.0, 0  # the first rank's processor time for the newest state, and its size

    @property
    def updates(self) -> int:
        """Updates since the newest state that there is or will be."""
        return sum(what == "update" for what, _ in self.since[self.coming[0] if self.coming else 0 :])

    def did(self, what: str, batch: Batch) -> None:
        """The ranks were given a batch to "accumulate", or have made an "update" with it."""
        self.since.append((what, batch))

    @property
    def is_due(self) -> bool:
        return 0 < self.every_steps <= self.updates

    @property
    def has_now(self) -> bool:
        """Whether the state of now is kept, or on its way."""
        return not self.updates and (self.coming is not None or self.whole is not None)

    def take(self, replies: list[list[Any]], node: str) -> None:
        """The ranks were asked for their state: (state, what it took) of each, the state from the first one, on `node`."""
        self.settle(5.0)
        state, there = copy_to_driver_node(replies[0][0], node)
        self.coming = len(self.since), [told for _, told in replies] + there, state

    def settle(self, seconds: float = 0.0) -> None:
        """The state that was asked for becomes the newest one as soon as it is whole; waits so long for it at most."""
        if self.coming is None:
            return
        calls, refs, state = self.coming
        if len(ray.wait(refs, num_returns=len(refs), timeout=seconds, fetch_local=False)[0]) < len(refs):
            return
        self.coming = None
        try:
            self.snapshot_s, self.snapshot_bytes = ray.get(refs)[0]
        except RayError:
            return  # a rank died before it was whole: the one before stands
        self.whole = state
        del self.since[:calls]

    def saved(self, load: Callable[[], Files]) -> None:
        """There is a checkpoint on disk of the state as it is; `load` reads it."""
        if not self.every_steps:
            self.whole, self.load, self.since = None, lambda: ray.put(load()), []

    def newest(self) -> Any:
        """Reference to the newest whole state, None where that is the policy's files."""
        self.settle(10.0)
        return self.load() if self.load is not None else self.whole

    def current(self, seconds: float) -> Any:
        """The same, if nothing was learned since; else None. Waits so long for one that is on its way."""
        self.settle(seconds)
        return None if self.coming or self.updates else self.whole

    def take_metrics(self) -> dict[str, Any]:
        """Of what came since the last call, for a step's row, and what the newest state took."""
        now = self.restarts, self.redone, self.seconds
        restarts, redone, seconds = (new - old for new, old in zip(now, self.told, strict=True))
        self.told = now
        return {
            "faults/learner_restarts": restarts,
            "faults/updates_redone": redone,
            "faults/learner_recovery_s": seconds,
            "checkpoint/memory_s": self.snapshot_s,
            "checkpoint/memory_mb": self.snapshot_bytes / 2**20,
        }
