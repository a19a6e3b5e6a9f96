"""The objects that the stages of a run share: recipe, recorder, planner, and the broker of free leases with its ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.functions.demand import NoDemand
from rlhfless_ray.functions.instance import ProcessLost
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Span

if TYPE_CHECKING:
    from rlhfless_ray.autoscaler.autoscaler import Autoscaler
    from rlhfless_ray.functions.broker import SlotBroker
    from rlhfless_ray.functions.instance import Instance
    from rlhfless_ray.functions.lease import LeaseManager
    from rlhfless_ray.functions.ledger import Ledger
    from rlhfless_ray.functions.limits import Limits
    from rlhfless_ray.functions.worker_pool import WorkerPool
    from rlhfless_ray.run.recorder import RunRecorder


@dataclass
class RunContext:
    recipe: Recipe  # as it is now: the user may set another objective, and filtered groups may lower the number of steps
    broker: SlotBroker
    phases: StepTimer
    record: RunRecorder
    autoscaler: Autoscaler
    limits: Callable[[], Limits]  # returns how many engines recipe and cluster allow now
    demand: NoDemand = field(default_factory=NoDemand)  # what the cluster's autoscaler is told

    def most_engines(self, width: int) -> int:
        """Return the maximum number of engines of `width` slots now, at least the fewest for which a rollout waits."""
        limits = self.limits()
        return max(limits.fewest(width), limits.engines(width))

    @property
    def leases(self) -> LeaseManager:
        """All leases of the run, free or not."""
        return self.broker.leases

    @property
    def ledger(self) -> Ledger:
        return self.leases.ledger

    def say(self, message: str) -> None:
        """Tell the user something about the run."""
        self.record.progress.message(message)

    def record_start(self, instance: Instance) -> list[Span]:
        """Record a finished start in the ledger exactly once. Returns the recorded spans, or an empty list."""
        if instance.opened is None or instance.memory_mb:
            return []
        result = instance.start_result(self.recipe.functions.lease_deadline_s)
        instance.memory_mb, instance.keeps_no_pages = result["memory_mb"], result.get("keeps_no_pages", "")
        instance.drafter_failure = result.get("drafter_failure", "")
        self.ledger.spans([lease.id for lease in instance.leases], result["spans"])
        if note := result.get("note"):
            self.record.progress.message(note, once=True)
        return result["spans"]

    def record_start_or_replace(self, pool: WorkerPool, instance: Instance, record: Callable[[Instance], object]) -> bool:
        """Record an instance's start with `record`. If its process was lost before it had work, remove it and count a failure."""
        try:
            record(instance)
        except ProcessLost as error:
            pool.end_lost(instance, str(error))
            return False
        return True
