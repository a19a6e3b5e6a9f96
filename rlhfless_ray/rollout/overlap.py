"""Score and train in the tail of a rollout, on slots that engines have left while others still decode.

Work done now need not be done later, so it costs nothing and shortens the step. Finished samples are scored as they arrive, and the
passes before the update (reference, learner, critic) are computed for them. Gradients of complete, scored groups are accumulated if
that is exact (`learn/overlap_rules.py`).
"""

from __future__ import annotations

import time
from typing import Any

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.rollout.neighbours import EarlyLearning, EarlyScoring
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.types import Sample, SampleId, Scored

ASK_S = 1.0  # pause after a request for free slots got none that fit, because each request waits for up to `FREE_S`


class OverlapScheduler:
    def __init__(
        self,
        scoring: EarlyScoring,
        learning: EarlyLearning,
        broker: SlotBroker,
        prompts: int,
        count: int,
        drafter: TrainedDrafter | None = None,
    ) -> None:
        """Schedule the tail of a step with `prompts` prompts and `count` samples each.

        It works on the free leases of `broker`, which are those that engines have left. `drafter`: is trained on leases that
        scoring and learning do not need now.
        """
        self.scoring, self.learning, self.broker, self.count, self.drafter = scoring, learning, broker, count, drafter
        scoring.begin(prompts * count)
        learning.begin(prompts * count)
        self.unscored: list[Sample] = []
        self.by_group: dict[SampleId, list[SampleId]] = {}  # samples submitted for scoring whose gradients are not accumulated yet
        self.scored = self.learned = 0

    def add_samples(self, samples: list[Sample]) -> None:
        """Add finished responses."""
        self.unscored += samples
        self.learning.passes.add_samples(samples)
        if self.drafter is not None:
            self.drafter.add_samples(samples)

    def wants_slot(self) -> bool:
        """Return whether one more slot would have work."""
        drafts = self.drafter is not None and self.drafter.wants_slot
        return not self.broker.free and (bool(self.unscored) or self.learning.wants_slot or drafts)

    def refs(self) -> list[Any]:
        """Return references to the work in progress."""
        return [*self.scoring.refs(), *self.learning.pending(), *(self.drafter.refs() if self.drafter is not None else ())]

    def poll(self, seconds: float) -> None:
        """Collect finished work and start more. `seconds`: time for which engines will continue."""
        given_back = [*self.scoring.done_ahead(), *self.learning.done_ahead()]  # may also put leases of lost ranks into the broker
        if self.drafter is not None:
            given_back += self.drafter.done_ahead()
        # A pool would wait for another slot instead of one whose node is lost or drained, and engines may hold every other slot.
        leases = self.broker.leases.without_lost([*self.broker.take(), *given_back])
        if leases and self.unscored and seconds > 0 and self.scoring.fits(leases):
            samples, self.unscored = self.unscored, []
            leases = self.scoring.score_ahead(samples, leases)
            self.scored += len(samples)
            for sample in samples:
                self.by_group.setdefault(sample.id.group(self.count), []).append(sample.id)
        if self.learning.fits(leases):
            chosen = self.learning.choose_samples(self._scored_groups(), seconds)
            for sample in chosen:
                self.by_group.pop(sample.id.group(self.count), None)
            if chosen:
                leases = self.learning.accumulate(chosen, leases)
                self.learned += len(chosen)
        if leases:
            leases = self.learning.passes.start_ahead(leases, seconds)
        if self.drafter is not None:
            leases = self.drafter.start_ahead(leases, seconds)
        self.broker.put(leases)

    def finish(self) -> None:
        """End the drafter's training, which may not outlive the rollout."""
        if self.drafter is not None:
            self.broker.put(self.drafter.finish())

    def _scored_groups(self) -> list[list[Scored]]:
        """Return the complete groups that are scored and whose gradients are not accumulated yet."""
        scored = self.scoring.scored
        groups = [[scored[name] for name in names if name in scored] for names in self.by_group.values()]
        return [group for group in groups if len(group) == self.count]

    def metrics(self) -> dict[str, Any]:
        counts = {"overlap/scored": self.scored, "overlap/learned": self.learned, "overlap/obstacle": self.learning.obstacle or ""}
        return counts | self.learning.passes.metrics() | (self.drafter.metrics() if self.drafter is not None else {})


class PartialOverlap(OverlapScheduler):
    """Score and train beside a partial rollout, on the groups that the step will certainly train on (`RolloutBatch.settled`).

    Engines are busy until such a rollout ends, so this also takes free slots that no engine was planned for.
    """

    def __init__(self, scoring: EarlyScoring, learning: EarlyLearning, broker: SlotBroker, batch: RolloutBatch) -> None:
        super().__init__(scoring, learning, broker, batch.quota, batch.count)
        self.batch = batch
        self.finished = {sample.id: sample for key, sample in batch.samples.items() if not batch.unfinished[key]}
        self.complete = 0  # number of complete groups at the last look
        self.added: set[int] = set()  # settled groups that were added
        self.ask_at_s = 0.0  # earliest time to ask for slots again

    def add_samples(self, samples: list[Sample]) -> None:
        self.finished |= {sample.id: sample for sample in samples}

    def poll(self, seconds: float) -> None:
        if len(self.batch.completed) > self.complete:
            self.complete, new = len(self.batch.completed), [g for g in self.batch.settled() if g not in self.added]
            self.added.update(new)
            super().add_samples([self.finished[name] for g in new for name in self.batch.ids_of(g)])
        taken = self._take_free_slots(seconds)
        super().poll(seconds)
        if taken is not None and all(lease in self.broker.free for lease in taken):  # the caller releases them
            self.ask_at_s = time.monotonic() + ASK_S

    def _take_free_slots(self, seconds: float) -> list[Lease] | None:
        """Take free slots of the cluster if there is work for them that ends within `seconds`. Returns the leases, or None without work."""
        if self.broker.free or self.scoring.refs() or time.monotonic() < self.ask_at_s:
            return None
        unscored = [self.unscored[at : at + self.count] for at in range(0, len(self.unscored), self.count)]  # `poll` adds whole groups
        if not (worker_groups := self.learning.with_work([*self._scored_groups(), *unscored], seconds)):
            return None
        leases = self.learning.lease_free_slots(worker_groups)
        self.broker.put(leases)
        return leases


class BesideUpdate:
    """In a rollout beside an update: passes of the learner over finished samples, on its own slots, once the update has ended.

    Engines' slots stay with them, and nothing is scored ahead. The last pass may outlive the rollout: the update's result waits for it.
    """

    def __init__(self, learning: EarlyLearning, broker: SlotBroker, samples: int) -> None:
        self.learning, self.broker = learning, broker
        learning.begin(samples)

    def add_samples(self, samples: list[Sample]) -> None:
        self.learning.passes.add_samples(samples)

    def wants_slot(self) -> bool:
        return False

    def refs(self) -> list[Any]:
        return self.learning.pending()

    def poll(self, seconds: float) -> None:
        self.learning.pass_beside(seconds)

    def finish(self) -> None:
        """Do nothing: waiting for the last pass could replace a lost learner, and engines still hold their leases."""

    def metrics(self) -> dict[str, Any]:
        return {
            "overlap/scored": 0,
            "overlap/learned": 0,
            "overlap/obstacle": self.learning.obstacle or "",
            **self.learning.passes.metrics(),
        }
