"""Decide when engines that generate beside an update take its weights.

An update has ended before the rollout beside it. Engines can pause now, load the new weights and go on with more slots, because the learner
has left its own. Or they go on under the old weights until some responses have ended, or until the rollout ends, so that nothing pauses.

The decision minimises the cost of the rest, in slot-seconds. With d tokens of each unfinished response drawn before the pause it is

    v · (old(d) + pause + new(d)) + slots of both parts + c · C · tokens(d) / N

`v` is the worth of a second of the step in slot-seconds. `old` and `new` are seconds of decoding by the fitted speed, with responses spread
evenly over the engines. `new` includes computing the contexts of unfinished responses again, unless their KV is kept. The last term is the
price of age. A batch whose tokens are x versions older on average is worth exp(-c·x) of a fresh one, with the same c as in
`partial_rollout.choose_share`. So a step of C slot-seconds whose batch has N tokens loses about c·C/N by each token that the old version
draws. The pause is what waiting to the end avoids: planning, calls and an engine's start. The load itself is only put off.

The bound on the lag holds either way. A group of a rollout beside update n counts as begun in step n or before. So its tokens may come from
version n - 1, as those that were drawn before the update ended, and it is not trained later because of this decision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.scaling.overlapped_step import engines_in_words
from placement.scaling.resize_policy import MIN_SAVING
from placement.speed.decode_speed import Speed

POINTS = 64  # times at which the weights may be taken that are compared


@dataclass(frozen=True)
class PauseCosts:
    """Figures that the decision depends on besides the responses.

    Parameters
    ----------
    speed : Speed
        Decode speed of an engine.
    engines, most_engines : int
        Engines now, and at most after the update.
    width : int
        Slots of an engine.
    learner_slots : int
        Slots that the learner holds until the weights are taken.
    pause_s : float
        Seconds of a pause besides computing contexts again.
    recomputes : bool
        Whether contexts are computed again under the new weights.
    value_per_s : float
        Worth of a second of the step, in slot-seconds.
    step_s, step_tokens : float
        Seconds of a step, and the tokens of its batch.
    stale_cost : float
        Loss of learning value per version, see `choose_share`.
    """

    speed: Speed
    engines: int
    most_engines: int
    width: int
    learner_slots: int
    pause_s: float
    recomputes: bool
    value_per_s: float
    step_s: float
    step_tokens: float
    stale_cost: float

    @property
    def step_cost(self) -> float:
        """Slot-seconds of a step, with its seconds at their worth."""
        return (self.value_per_s + self.engines * self.width + self.learner_slots) * self.step_s


@dataclass(frozen=True)
class TakeWeights:
    """Take the weights after `wait_s` more seconds under the old ones: 0 means now."""

    wait_s: float
    reason: str


def decide_weights(left: np.ndarray, context: np.ndarray, horizon: float, costs: PauseCosts) -> TakeWeights:
    """Decide when the engines of a rollout beside an update that has ended take the new weights.

    Waiting must save `MIN_SAVING` of a step's cost, because forecasts fluctuate by as much.

    Parameters
    ----------
    left : ndarray
        (n,) expected tokens that each unfinished response still gets.
    context : ndarray
        (n,) tokens that it has, its prompt included.
    horizon : float
        Tokens that a response gets until the rollout ends.
    costs : PauseCosts
        The other figures.
    """
    points, cost, old_s, new_s, engines = compare_points(left, context, horizon, costs)
    best = int(np.argmin(cost))
    at_once = f"new weights now: {new_s[0]:.2g} s to the end on {engines_in_words(int(engines[0]))} with the pause"
    if best == 0 or cost[0] - cost[best] < MIN_SAVING * costs.step_cost:
        return TakeWeights(0.0, f"{at_once}, {old_s[-1]:.2g} s on {costs.engines} without")
    saved = f"saves {(cost[0] - cost[best]) / costs.step_cost:.0%} of a step's cost"
    if best == len(points) - 1:
        reason = f"old weights to the end of the rollout in {old_s[-1]:.2g} s, which {saved}: with a pause {new_s[0]:.2g} s"
        return TakeWeights(float(old_s[best]), reason)
    ended = int((left <= points[best]).sum())
    reason = f"old weights for {old_s[best]:.2g} s, until {ended} of {len(left)} responses have ended, which {saved}"
    return TakeWeights(float(old_s[best]), reason)


def compare_points(
    left: np.ndarray, context: np.ndarray, horizon: float, costs: PauseCosts
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the points at which the weights may be taken, in tokens from now on, and the figures of each.

    Arguments are those of `decide_weights`. The points are now, ends of responses, and last the end of the rollout, which may be now.

    Returns:
        (k,) tokens, cost in slot-seconds, seconds before the pause, seconds from the pause on, and engines after it. At the last point
        there is no pause.
    """
    speed, ends = costs.speed, np.unique(left[(left > 0) & (left < horizon)])
    chosen_ends = ends[np.unique(np.linspace(0, len(ends) - 1, min(len(ends), POINTS)).round().astype(int))]
    points = np.unique(np.r_[0.0, chosen_ends, horizon])  # one if the rollout ends now
    drawn = np.minimum(left, points[:, None])  # (k, n)
    tokens, read = drawn.sum(1), (drawn * context + drawn**2 / 2).sum(1)
    work_s = speed.per_seq_s * tokens + speed.per_ctx_s * read  # of one engine, besides what a step takes whatever its size
    old_s = speed.base_s * points + work_s / costs.engines
    goes_on = left > points[:, None]
    again_s = ((context + drawn) * goes_on).sum(1) * speed.prefill_s * costs.recomputes
    most = max(costs.engines, min(costs.most_engines, int(goes_on[0].sum())))
    engines = np.arange(costs.engines, most + 1)[:, None]  # (e, 1)
    new_s = costs.pause_s + speed.base_s * (horizon - points) + (work_s[-1] - work_s + again_s) / engines  # (e, k)
    new_s[:, -1] = 0.0
    rest = (costs.value_per_s + engines * costs.width) * new_s
    chosen = np.argmin(rest, axis=0)
    before = (costs.value_per_s + costs.engines * costs.width + costs.learner_slots) * old_s
    stale = costs.stale_cost * costs.step_cost * tokens / max(costs.step_tokens, 1.0)
    columns = np.arange(len(points))
    return points, before + rest[chosen, columns] + stale, old_s, new_s[chosen, columns], engines[chosen, 0]
