"""The learning of a step: advantages, the update by the gang, and the weights it publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from placement.policy import Decision
from rlhfless_ray.learn.advantage import group_advantages
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.gang import Gang
from rlhfless_ray.site import Site
from rlhfless_ray.types import Sample, UpdateStats, WeightVersion
from rlhfless_ray.waits import STOP

UPDATE_GRACE_S = 1.5  # `ray job stop` kills 3 s after SIGTERM: an update may take this much of them to end


class LearnStage:
    def __init__(self, site: Site, gang: Gang) -> None:
        self.site, self.gang = site, gang
        self.plan: Decision | None = None

    def advantages(self, samples: list[Sample]) -> Batch:
        """The learner's batch; a sample without a reward is not in it."""
        algorithm, count = self.site.recipe.algorithm, self.site.recipe.rollout.samples_per_prompt
        rewards = np.array([np.nan if s.reward is None else s.reward for s in samples]).reshape(-1, count)
        values = group_advantages(rewards, algorithm.normalize_std).reshape(-1)
        sequences = []
        for i, (sample, value) in enumerate(zip(samples, values, strict=True)):
            if np.isnan(value):
                continue
            sample.advantage = float(value)
            answer = sample.completion
            sequences.append((sample.prompt.token_ids, answer.token_ids, answer.logprobs, float(value), i // count))
        return Batch.of(sequences)

    @contextmanager
    def phase(self, samples: list[Sample]) -> Iterator[None]:
        """Rollout engines hold no lease here."""
        site = self.site
        with site.phases.phase("learn"):
            self.plan = site.autoscaler.size_learner(samples)
            if site.leases.resource == "cpu":  # a slot more is a thread more; on GPU a rank has one device
                self.gang.slots = self.gang.ranks * self.plan.actors
            site.leases.release(self.gang.staff(site.handed()))
            yield
            site.spare = self.gang.park()

    def update(self, batch: Batch, samples: list[Sample], meanwhile: Callable[[], None]) -> tuple[UpdateStats, dict[str, Any]]:
        """Statistics, and metrics of the gang's size. A stop signal waits for the update to end: one that is half done cannot
        be saved. `meanwhile` runs on the driver while the gang works."""
        assert self.plan is not None
        progress = self.site.record.progress
        with STOP.deferred(UPDATE_GRACE_S, progress.message):
            began_s = time.monotonic()
            stats = self.gang.update(batch, meanwhile)
            slots = min(len(instance.leases) for instance in self.gang.by_rank)
            self.site.autoscaler.observe_update(slots, samples, time.monotonic() - began_s)
        if stats.skipped:
            progress.message(f"optimizer step skipped: {stats.reason}")
        return stats, {"pool/learn_slots": slots * self.gang.ranks, "pool/learn_reason": self.plan.reason}

    def publish(self, version: int) -> WeightVersion:
        with self.site.phases.phase("publish"):
            return self.gang.publish(version)
