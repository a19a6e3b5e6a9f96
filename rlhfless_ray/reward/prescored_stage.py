"""The score stage of samples that come with their rewards: check failures only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.reward.scoring import check_failures
from rlhfless_ray.types import Sample


class PrescoredStage(ScoreStage):
    """A score stage without workers and leases."""

    def begin(self, samples: int) -> None: ...

    def prepare(self, seconds: float, slot: Slot) -> None: ...

    def fits(self, leases: list[Lease]) -> bool:
        return True

    def score_ahead(self, samples: list[Sample], leases: list[Lease]) -> list[Lease]:
        return leases

    def refs(self) -> list[Any]:
        return []

    def done_ahead(self) -> list[Lease]:
        return []

    @contextmanager
    def phase(self, name: str = "score") -> Iterator[None]:
        with self.context.phases.phase(name):
            yield

    def score(self, samples: list[Sample], step: int, name: str = "step") -> int:
        failed = sum(sample.error is not None for sample in samples)
        try:
            check_failures(samples, failed, self.context.recipe.reward.max_failed_share)
        except RunError:
            self.context.record.samples(step, samples, name)
            raise
        self._report_failures(samples, failed, name)
        return failed
