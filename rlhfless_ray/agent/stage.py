"""The scoring of samples that come with their rewards: there is nothing left to do but to look at what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.reward.score import check_failures
from rlhfless_ray.reward.stage import ScoreStage
from rlhfless_ray.types import Sample


class PlayedStage(ScoreStage):
    """Takes no lease."""

    def begin(self, samples: int) -> None: ...

    def score_ahead(self, samples: list[Sample], leases: list[Lease]) -> list[Lease]:
        return leases

    def refs(self) -> list[Any]:
        return []

    def done_ahead(self) -> list[Lease]:
        return []

    @contextmanager
    def phase(self, name: str = "score") -> Iterator[None]:
        with self.site.phases.phase(name):
            yield

    def score(self, samples: list[Sample], step: int, name: str = "step") -> int:
        failed = sum(sample.error is not None for sample in samples)
        try:
            check_failures(samples, failed, self.site.recipe.reward.max_failed_share)
        except RunError:
            self.site.record.samples(step, samples, name)
            raise
        self._tell(samples, failed, name)
        return failed
