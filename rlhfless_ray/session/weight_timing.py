"""When the engines of a rollout beside an update take its weights, by `placement.scaling.take_weights`."""

from __future__ import annotations

import time
from typing import Any

from placement.scaling.take_weights import PauseCosts, TakeWeights, decide_weights
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.rollout.live_rollout import LiveRollout

LEAST_S = 0.05  # between two decisions


class WeightTiming:
    """Ends one rollout beside an update once its engines should take the update's weights.

    A decision stands until the time that it states. By then the rollout has ended, or another decision is made from the newest forecasts.
    """

    def __init__(
        self, autoscaler: Autoscaler, update: Pending[Any], stale_cost: float | None, most_engines: int, learner_slots: int, can_wait: bool
    ) -> None:
        """Configure the decisions.

        Args:
            stale_cost: loss of learning value per version. None: it was not measured yet.
            most_engines: maximum number of engines after the update, if no other run takes slots.
            learner_slots: slots that the learner holds until then.
            can_wait: whether engines may go on under the old weights. Otherwise they take the new ones as soon as the update is done.
        """
        self.autoscaler, self.update, self.stale_cost, self.can_wait = autoscaler, update, stale_cost, can_wait
        self.most_engines, self.learner_slots = most_engines, learner_slots
        self.ready_s: float | None = None  # when the update was found done, on the clock of time.monotonic
        self.look_at_s = 0.0
        self.waited_s: float | None = None  # until they took the weights; None: not yet
        self.reason = ""

    def ends(self, rollout: LiveRollout) -> bool:
        """Return whether the engines take the new weights now."""
        if not self.update.is_ready():
            return False
        now = time.monotonic()
        if self.ready_s is None:
            self.ready_s = now
        if now < self.look_at_s and STOP.number is None:
            return False
        decided = self._decide(rollout)
        self.reason = self.reason or decided.reason  # the first one says why; later ones only follow what the forecasts missed
        self.look_at_s = now + max(decided.wait_s, LEAST_S)
        if decided.wait_s > 0:
            return False
        self.waited_s = now - self.ready_s
        return True

    def _decide(self, rollout: LiveRollout) -> TakeWeights:
        autoscaler = self.autoscaler
        if not self.can_wait or STOP.number is not None or self.update.has_failed():
            return TakeWeights(0.0, "")
        is_measured = autoscaler.terms.pause.records and autoscaler.engines.fit.records and autoscaler.predictor.step_s
        if self.stale_cost is None or not is_measured:
            return TakeWeights(0.0, "new weights now: the price of a pause or of old tokens is not measured yet")
        recipe, width = autoscaler.recipe, autoscaler.engines.width
        costs = PauseCosts(
            autoscaler.predictor.engine_speed,
            max(1, len(rollout.pool.working)),
            autoscaler.most_after_update(self.most_engines),
            width,
            self.learner_slots,
            autoscaler.terms.pause.predict(),
            recipe.rollout.partial_kv == "recompute",
            autoscaler.criteria.value_per_s,
            autoscaler.predictor.step_s,
            autoscaler.predictor.update_tokens,
            self.stale_cost,
        )
        return autoscaler.safely(
            "deciding when engines take new weights",
            lambda: decide_weights(*rollout.remaining(), rollout.horizon(), costs),
            lambda: TakeWeights(0.0, "new weights now: the decision failed"),
        )

    def metrics(self) -> JsonObject:
        """Return the metrics of the rollout, which has ended just now."""
        waited_s = self.waited_s
        if waited_s is None:  # it went on under the old weights to its end, or ended before the update
            waited_s = 0.0 if self.ready_s is None else time.monotonic() - self.ready_s
        return {"partial/weights_wait_s": waited_s, "partial/weights_reason": self.reason}
