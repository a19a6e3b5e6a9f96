"""The worker group of a tenant's model: its actor, and calls that a lost rank gets again."""

from __future__ import annotations

from typing import Any

from rlhfless_ray.learn.rank_actors import LearnerActor, timed
from rlhfless_ray.learn.trainer import OptimizerStep
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.service.work import AdamStep, PassesDone, TokenPasses
from rlhfless_ray.types import Span
from rlhfless_ray.weights.remote_folder import StoredFiles


class ModelActor(LearnerActor):
    def kind(self) -> Any:
        from rlhfless_ray.service.model_rank import ModelRank

        return ModelRank

    def update(self, item: TokenPasses | AdamStep, threads: int) -> tuple[Any, list[Span]]:  # type: ignore[override]
        what = "optimizer step" if isinstance(item, AdamStep) else "forward and backward" if item.learns else "forward"
        return timed(lambda: self.rank.work(item), "work", what, threads)


class ModelGroup(WorkerGroup):
    """A snapshot follows each optimizer step. If a rank is lost, all get the newest one, and what they did since once more."""

    def ask(self, what: str, item: Any, *more: object) -> list[Any]:
        return [instance.actor.update.remote(item, self.threads_of(instance)) for instance in self.by_rank]

    def _count(self, stats: object) -> None:
        """Do nothing: the driver divides no batch."""

    def work(self, item: TokenPasses | AdamStep) -> PassesDone | OptimizerStep:
        """Let every rank do this. Needs leases."""
        self.weights.wait_until_read()
        replies = self.call(lambda: self.ask("update", item), f"the {self.name}'s work")
        self.record_spans(spans for _, spans in replies)
        if isinstance(item, AdamStep):
            self.recovery.record(item)
            self.start_snapshot()
        elif item.learns:
            self.recovery.record(item)
        return replies[0][0]

    def replace_state(self, state: StoredFiles) -> None:
        """Continue from a saved state. Needs leases."""
        self.weights.wait_until_read()
        self.recovery.settle(self.deadline_s)
        self.recovery.complete, self.recovery.since = state, []
        self.load_model(state)
