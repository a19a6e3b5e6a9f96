"""The learning of a step: advantages, the update by the gang, and the weights it publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from placement.policy import Decision
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.advantage import group_advantages
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.gang import Gang
from rlhfless_ray.learn.overlap import obstacle
from rlhfless_ray.site import Site
from rlhfless_ray.types import Sample, UpdateStats, WeightVersion
from rlhfless_ray.waits import STOP

UPDATE_GRACE_S = 1.5  # `ray job stop` kills 3 s after SIGTERM: an update may take this much of them to end


class LearnStage:
    def __init__(self, site: Site, gang: Gang) -> None:
        self.site, self.gang = site, gang
        self.plan: Decision | None = None
        self.obstacle = obstacle(site.recipe)
        self.learned: set[int] = set()  # keys of the step's samples whose gradients have been asked for
        self.refs: list[Any] = []  # of the gradients under way

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: gradients of its first groups may be accumulated before its learn phase."""
        self.learned = set()

    def fits(self, leases: list[Lease]) -> bool:
        """Whether gradients could be accumulated under these leases, without asking for more."""
        return self.obstacle is None and not self.refs and self.gang.fits(leases)

    def some(self, groups: list[list[Sample]], seconds: float) -> list[Sample]:
        """Of complete groups, about a micro-batch for each rank, if there are enough and they would be done in `seconds`."""
        most = self.site.recipe.learner.micro_batch_tokens * self.gang.ranks
        found: list[Sample] = []
        tokens = 0
        for group in groups:
            size = sum(len(s.prompt.token_ids) + len(s.completion.token_ids) for s in group)
            if found and tokens + size > most:
                break
            found += group
            tokens += size
        enough = tokens >= most / 2 and self.site.autoscaler.learner.predict(1, tokens) <= seconds
        return found if enough else []

    def accumulate(self, samples: list[Sample], leases: list[Lease]) -> list[Lease]:
        """Accumulate gradients of complete groups under some of the leases; returns the others."""
        self.gang.slots = self.gang.ranks
        left = self.gang.staff(leases) if not self.gang.working else leases
        self.refs = self.gang.accumulate(self.advantages(samples))
        self.learned |= {sample.completion.key for sample in samples}
        return left

    def pending(self) -> list[Any]:
        return self.gang.pending(self.refs)

    def done_ahead(self, wait: bool = False) -> list[Lease]:
        """The leases back, once the gradients are there. On GPU the gang keeps them: gradients stay on its devices."""
        if not self.refs or (self.pending() and not wait):
            return []
        self.gang.accumulated(self.refs)
        self.refs = []
        return self.gang.park() if self.site.leases.resource == "cpu" else []

    # ---- the phase --------------------------------------------------------------------------------------------

    def group_of(self, sample: Sample) -> int:
        """The position of its prompt in the step."""
        return sample.completion.key // self.site.recipe.rollout.samples_per_prompt

    def advantages(self, samples: list[Sample]) -> Batch:
        """The learner's batch, of whole groups; samples without a reward and those learned ahead are not in it."""
        algorithm, count = self.site.recipe.algorithm, self.site.recipe.rollout.samples_per_prompt
        samples = [sample for sample in samples if sample.completion.key not in self.learned]
        rewards = np.array([np.nan if s.reward is None else s.reward for s in samples]).reshape(-1, count)
        values = group_advantages(rewards, algorithm.normalize_std).reshape(-1)
        sequences = []
        for sample, value in zip(samples, values, strict=True):
            if np.isnan(value):
                continue
            sample.advantage = float(value)
            answer = sample.completion
            sequences.append((sample.prompt.token_ids, answer.token_ids, answer.logprobs, float(value), self.group_of(sample)))
        return Batch.of(sequences)

    @contextmanager
    def phase(self, samples: list[Sample]) -> Iterator[None]:
        """Rollout engines hold no lease here."""
        site = self.site
        with site.phases.phase("learn"):
            self.plan = site.autoscaler.size_learner(samples)
            site.spare += self.done_ahead(wait=True)
            if site.leases.resource == "cpu":  # a slot more is a thread more; on GPU a rank has one device
                self.gang.slots = self.gang.ranks * self.plan.actors
            if not self.gang.working:
                site.leases.release(self.gang.staff(site.handed()))
            else:  # it kept its devices, with gradients on them
                site.leases.release(site.handed())
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
