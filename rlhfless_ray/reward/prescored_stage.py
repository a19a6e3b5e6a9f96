"""The score stage of samples that come with their rewards: count failures only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.reward.score_stage import ScoreStage
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

    def _score(self, samples: list[Sample]) -> int:
        return sum(sample.error is not None for sample in samples)
