"""The scoring of a step: reward processes under leases handed over by the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.reward.score import Scoring, check_failures, maker
from rlhfless_ray.reward.source import Source
from rlhfless_ray.site import Site
from rlhfless_ray.types import Sample


class ScoreStage:
    def __init__(self, site: Site, pool: Pool, source: Source | None = None, tokenizer: Any = None) -> None:
        """Without a source samples are given as a function `(prompt, response, row)` takes them."""
        self.site, self.pool = site, pool
        self.item = maker(source, tokenizer) if source is not None else None
        timeout_s = site.recipe.reward.timeout_s
        self.call_s = source.call_s(timeout_s) if source is not None else timeout_s
        self.ahead: Scoring | None = None  # of the step whose rollout goes on

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    def begin(self, samples: int) -> None:
        """A step of so many samples begins: some of them may be scored before its score phase."""
        self.ahead = self._scoring(samples)

    def score_ahead(self, samples: list[Sample], leases: list[Lease]) -> list[Lease]:
        """Score these under one of the leases; returns the others."""
        assert self.ahead is not None
        left = self.pool.resize(max(1, len(self.pool.working)), leases)
        self.ahead.add(samples)
        return left

    def refs(self) -> list[Any]:
        return list(self.ahead.running) if self.ahead is not None else []

    def done_ahead(self) -> list[Lease]:
        """Take the answers that are there; the leases back, once all that was asked for is answered."""
        if self.ahead is None or not self.pool.working:
            return []
        self.ahead.hear(waits=False)  # engines may hold every other slot
        return self._park() if not self.ahead.running else []

    # ---- the phase --------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str = "score") -> Iterator[None]:
        site = self.site
        with site.phases.phase(name):
            spare, reward = site.handed(), site.recipe.reward
            most = reward.ranks if reward.model_path else reward.workers
            site.spare = self.pool.resize(min(most, max(1, len(spare))), spare)
            yield
            site.spare += self._park()

    def _park(self) -> list[Lease]:
        for instance in list(self.pool.working):
            self.site.survived_start(self.pool, instance, self.site.told_start)
        return self.pool.park_all()

    def _scoring(self, samples: int) -> Scoring:
        recipe = self.site.recipe
        most = recipe.reward.max_failed_share * samples
        return Scoring(self.pool, recipe.reward.timeout_s, most, self.item, self.call_s)

    def score(self, samples: list[Sample], step: int, name: str = "step") -> int:
        """Every sample's reward, of those that were not scored ahead; returns how many have none. Raises RunError when too many:
        the samples are on disk then."""
        record, share = self.site.record, self.site.recipe.reward.max_failed_share
        scoring, self.ahead = self.ahead or self._scoring(len(samples)), None
        try:
            before = {id(sample) for sample in scoring.samples}
            scoring.add([sample for sample in samples if id(sample) not in before])
            scoring.finish(record.progress.phase)
            failed = scoring.failed
            check_failures(samples, failed, share)
        except RunError:
            record.samples(step, samples, name)
            raise
        self._tell(samples, failed, name)
        return failed

    def _tell(self, samples: list[Sample], failed: int, name: str) -> None:
        if failed:
            first, where = next(s for s in samples if s.error is not None), "update" if name == "step" else name
            self.site.record.progress.message(
                f"{failed} of {len(samples)} samples could not be scored and are left out of the {where}; row "
                f"{first.prompt.index}: {first.error}"
            )
