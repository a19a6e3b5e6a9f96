"""Count a run's process failures by cause, and end the run when they outnumber its progress."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject


class FailureCause(Enum):
    """Cause of a failure. DIED, MEMORY and HUNG are faults of programs; NODE_LOST and NODE_DRAINED are preemptions."""

    DIED = "died"
    MEMORY = "ran out of memory"
    HUNG = "hung"
    NODE_LOST = "was lost with its node"
    NODE_DRAINED = "had to leave a node that is drained"

    @property
    def is_preemption(self) -> bool:
        return self in (FailureCause.NODE_LOST, FailureCause.NODE_DRAINED)


class FailureBudget:
    """A budget of `limit` faults of programs. Every step without one adds one to it, up to `limit`.

    Preemptions are counted too but use up nothing: no program is at fault. If they prevent progress, the deadlines of rollout
    and leases end the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = self.remaining = limit
        self.counts: Counter[FailureCause] = Counter()
        self.recent_failures: list[str] = []  # faults of programs since the budget was last full
        self.failures_in_step = 0
        self.reported: Counter[FailureCause] = Counter()  # counts in earlier metrics

    def count(self, who: str, cause: FailureCause, why: str = "") -> None:
        """Count a failure. Raises RunError, with the reason, when the budget is used up."""
        self.counts[cause] += 1
        if cause.is_preemption:
            return
        self.failures_in_step += 1
        self.recent_failures.append(f"{who} {cause.value}")
        if self.remaining <= 0:
            earlier = ", ".join(self.recent_failures[-6:-1])
            raise RunError(
                f"{who} {cause.value}, and functions.max_replacements = {self.limit} is used up: {why or 'the reason is unknown'}"
                + (f"; each step without a failure adds one to the budget. Earlier failures: {earlier}" if earlier else "")
            )
        self.remaining -= 1

    @property
    def used(self) -> int:
        """Number of failures that the budget is charged with."""
        return self.limit - self.remaining

    def step_done(self) -> None:
        if not self.failures_in_step:
            self.remaining = min(self.limit, self.remaining + 1)
            if self.remaining == self.limit:
                self.recent_failures = []
        self.failures_in_step = 0

    def take_metrics(self) -> JsonObject:
        """Return metrics of the failures since the last call."""
        new = self.counts - self.reported
        self.reported = Counter(self.counts)
        preempted = sum(n for cause, n in new.items() if cause.is_preemption)
        return {
            "faults/bugs": sum(new.values()) - preempted,
            "faults/preempted": preempted,
            "faults/hung": new[FailureCause.HUNG],
            "faults/out_of_memory": new[FailureCause.MEMORY],
            "faults/budget_left": self.remaining,
        }
