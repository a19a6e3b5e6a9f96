"""The tail of a rollout: what is scored and learned on slots that engines have left, while others still decode.

Work done now on a slot is work not done later on one, so it costs nothing and shortens the step. Samples are scored as they
come; of those that have ended the passes are made that the update begins with, by reference, learner and critic; of groups that are
complete and scored the gradients are accumulated, where that is exact (`learn/overlap_rules.py`).
"""

from __future__ import annotations

from typing import Any

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.rollout.neighbours import EarlyLearning, EarlyScoring
from rlhfless_ray.types import Sample


class OverlapScheduler:
    def __init__(self, scoring: EarlyScoring, learning: EarlyLearning, broker: SlotBroker, prompts: int, count: int) -> None:
        """Of a step with so many prompts, `count` samples each. It works on the free leases of `broker`: during a rollout these
        are the ones that engines have left."""
        self.scoring, self.learning, self.broker, self.count = scoring, learning, broker, count
        scoring.begin(prompts * count)
        learning.begin(prompts * count)
        self.unscored: list[Sample] = []
        self.by_group: dict[int, list[Sample]] = {}  # asked to be scored, not learned
        self.scored = self.learned = 0

    def heard(self, samples: list[Sample]) -> None:
        """Responses that have come to their end."""
        self.unscored += samples
        self.learning.passes.heard(samples)

    def wants_slot(self) -> bool:
        """Whether a slot more would have work."""
        return not self.broker.free and (bool(self.unscored) or self.learning.wants_slot)

    def take(self, leases: list[Lease]) -> None:
        self.broker.put(leases)

    def refs(self) -> list[Any]:
        """What is under way."""
        return [*self.scoring.refs(), *self.learning.pending()]

    def poll(self, seconds: float) -> None:
        """Take what is done, begin what can be. `seconds`: for how long engines will go on."""
        given_back = [*self.scoring.done_ahead(), *self.learning.done_ahead()]  # may also put leases of lost ranks into the broker
        leases = [*self.broker.take(), *given_back]
        if leases and self.unscored and seconds > 0:
            samples, self.unscored = self.unscored, []
            leases = self.scoring.score_ahead(samples, leases)
            self.scored += len(samples)
            for sample in samples:
                self.by_group.setdefault(self.learning.group_of(sample), []).append(sample)
        if self.learning.fits(leases):
            samples = self.learning.some([group for group in self.by_group.values() if self._is_done(group)], seconds)
            for sample in samples:
                self.by_group.pop(self.learning.group_of(sample), None)
            if samples:
                leases = self.learning.accumulate(samples, leases)
                self.learned += len(samples)
        if leases:
            leases = self.learning.passes.look(leases, seconds)
        self.broker.put(leases)

    def _is_done(self, group: list[Sample]) -> bool:
        return len(group) == self.count and all(s.reward is not None or s.error is not None for s in group)

    def metrics(self) -> dict[str, Any]:
        found = {"overlap/scored": self.scored, "overlap/learned": self.learned, "overlap/obstacle": self.learning.obstacle or ""}
        return found | self.learning.passes.metrics()
