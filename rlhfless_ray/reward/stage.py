"""The scoring of a step: reward processes under leases handed over by the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.reward import score as scoring
from rlhfless_ray.site import Site
from rlhfless_ray.types import Sample


class ScoreStage:
    def __init__(self, site: Site, pool: Pool) -> None:
        self.site, self.pool = site, pool

    @contextmanager
    def phase(self, name: str = "score") -> Iterator[None]:
        site = self.site
        with site.phases.phase(name):
            spare = site.handed()
            site.spare = self.pool.resize(min(site.recipe.reward.workers, max(1, len(spare))), spare)
            yield
            for instance in self.pool.working:
                site.told_start(instance)
            site.spare += self.pool.park_all()

    def score(self, samples: list[Sample], step: int, name: str = "step") -> int:
        """Every sample's reward; returns how many have none. Raises RunError when too many: the samples are on disk then."""
        recipe, record = self.site.recipe, self.site.record
        share = recipe.reward.max_failed_share
        try:
            failed = scoring.score_samples(
                self.pool, samples, recipe.reward.timeout_s, max_failed_share=share,
                max_replacements=recipe.functions.max_replacements, say=record.progress.phase,
            )
            scoring.check_failures(samples, failed, share)
        except RunError:
            record.samples(step, samples, name)
            raise
        if failed:
            first, where = next(s for s in samples if s.error is not None), "update" if name == "step" else name
            record.progress.message(
                f"{failed} of {len(samples)} samples could not be scored and are left out of the {where}; row "
                f"{first.prompt.index}: {first.error}"
            )
        return failed
