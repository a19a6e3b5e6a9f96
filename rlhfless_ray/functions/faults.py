"""What went wrong in a run: counted by whose it is, and held against the progress made."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

from rlhfless_ray.errors import RunError


class Cause(Enum):
    """DIED, MEMORY and HUNG are faults of programs. NODE_LOST and NODE_DRAINED are the cluster's: it took the machine away."""

    DIED = "died"
    MEMORY = "ran out of memory"
    HUNG = "hung"
    NODE_LOST = "was lost with its node"
    NODE_DRAINED = "had to leave a node that is drained"

    @property
    def is_preemption(self) -> bool:
        return self in (Cause.NODE_LOST, Cause.NODE_DRAINED)


class Faults:
    """A budget for faults of programs: `most` of them, and one more for every step done without any, up to `most` again.

    What the cluster takes away is counted too, but uses nothing up: no program is to blame, and the deadlines of rollout and
    leases end a run that gets nowhere for it.
    """

    def __init__(self, most: int) -> None:
        self.most = self.left = most
        self.counts: Counter[Cause] = Counter()
        self.since_step: list[str] = []  # bugs since the last step that had none
        self.in_step = 0
        self.told: Counter[Cause] = Counter()  # in metrics so far

    def count(self, who: str, cause: Cause, why: str = "") -> None:
        """Raises RunError, with the reason, when the budget is used up."""
        self.counts[cause] += 1
        if cause.is_preemption:
            return
        self.in_step += 1
        self.since_step.append(f"{who} {cause.value}")
        if self.left <= 0:
            raise RunError(
                f"{who} {cause.value} and functions.max_replacements = {self.most} are used up: {why or 'no reason is known'}"
                f"{self._before()}"
            )
        self.left -= 1

    @property
    def used(self) -> int:
        """Of the budget."""
        return self.most - self.left

    def _before(self) -> str:
        before = self.since_step[:-1]
        if not before:
            return ""
        shown = ", ".join(before[-5:])
        return f"; faults outran progress, a step without any gives one back: before it {shown}"

    def step_done(self) -> None:
        if not self.in_step:
            self.left = min(self.most, self.left + 1)
            if self.left == self.most:
                self.since_step = []
        self.in_step = 0

    def take(self) -> dict[str, Any]:
        """Of what came since the last call, for a step's row."""
        new = self.counts - self.told
        self.told = Counter(self.counts)
        preempted = sum(n for cause, n in new.items() if cause.is_preemption)
        return {
            "faults/bugs": sum(new.values()) - preempted, "faults/preempted": preempted, "faults/hung": new[Cause.HUNG],
            "faults/out_of_memory": new[Cause.MEMORY], "faults/budget_left": self.left,
        }
