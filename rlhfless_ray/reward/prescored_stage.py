"""The score stage of samples that come with their rewards: count failures only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.types import Sample


class PrescoredStage(ScoreStage):
    """A score stage without workers and leases."""

    def prepare(self, seconds: float, slot: Slot) -> None: ...

    def fits(self, leases: list[Lease]) -> bool:
        return True

    def score_ahead(self, samples: Sequence[Sample], leases: list[Lease]) -> list[Lease]:
        assert self.ahead is not None
        self.ahead.add(samples)
        return leases

    @contextmanager
    def phase(self, name: str = "score") -> Iterator[None]:
        with self.context.phases.phase(name):
            yield
