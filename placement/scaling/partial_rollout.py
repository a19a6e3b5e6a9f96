"""Partial rollouts: choose the groups that a step trains and how many it begins, and predict the gain of a bound on the lag.

A group is begun in one step and trained in that step or a later one, at most a bound of steps later. Each step makes one weight
version. So no token of a trained group is more versions old than the bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.speed.decode_speed import Speed

SHARES = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)  # groups at work, as multiples of those trained, that are tried
TRIED = 4  # steps of the pipeline that a share is tried on, once groups have every age


def choose_groups(
    last_steps: Sequence[int] | np.ndarray, completed: Sequence[int] | np.ndarray, step: int, quota: int, per_step: int | None = None
) -> list[int] | None:
    """Choose the groups that a step trains, or return None while one of them is not complete.

    Parameters
    ----------
    last_steps : sequence of int
        The last step in which each group may be trained.
    completed : sequence of int
        The complete groups, in the order in which they became complete.
    step : int
        Number of this step.
    quota : int
        Groups to choose.
    per_step : int, optional
        Groups that each later step trains. None: as many as this one.

    Returns
    -------
    list of int or None
        Ascending numbers of `quota` groups: the first complete ones, except that enough groups with an early last step are among
        them for all others to be trained in time.
    """
    chosen, is_enough = _choose(last_steps, completed, step, quota, per_step or quota)
    return np.flatnonzero(chosen).tolist() if is_enough else None


def settled_groups(
    last_steps: Sequence[int] | np.ndarray, completed: Sequence[int] | np.ndarray, step: int, quota: int, per_step: int | None = None
) -> list[int]:
    """Return the complete groups that the step trains whichever groups become complete after them, ascending.

    Arguments are those of `choose_groups`. Work on these groups may begin while others are still generated.
    """
    return np.flatnonzero(_choose(last_steps, completed, step, quota, per_step or quota)[0]).tolist()


def _choose(
    last_steps: Sequence[int] | np.ndarray, completed: Sequence[int] | np.ndarray, step: int, quota: int, per_step: int
) -> tuple[np.ndarray, bool]:
    """Return which groups are chosen by now (a bool for each), and whether these are all that the step trains.

    How many groups the step owes to each last step depends on the groups, not on their completion. So a place that no complete group
    fills yet stays free, and a group that has a place keeps it.
    """
    until, complete = np.asarray(last_steps), np.asarray(completed, int)
    chosen, places, is_enough = np.zeros(len(until), bool), 0, True

    def choose(candidates: np.ndarray, wanted: int) -> None:
        nonlocal places, is_enough
        if (free := wanted - places) > 0:
            taken = candidates[~chosen[candidates]][:free]
            chosen[taken] = True
            places, is_enough = wanted, is_enough and len(taken) == free

    for last in range(step, int(until.max(initial=step)) + 1):
        # the steps after this one, up to `last`, train the other groups that may not be trained later than that
        owed = min(quota, int((until <= last).sum()) - (last - step) * per_step)
        choose(complete[until[complete] <= last], owed)
    choose(complete, quota)
    return chosen, is_enough


def _first_batch(last_steps: np.ndarray, order: np.ndarray, step: int, quota: int) -> tuple[int, list[int]]:
    """Return how many groups, in the order in which they become complete, a step waits for, and those that it trains."""

    def chosen(count: int) -> list[int] | None:
        return choose_groups(last_steps, order[:count], step, quota)

    count = bisect_left(range(len(order)), True, quota, key=lambda n: chosen(n) is not None)  # more complete groups are never worse
    found = chosen(count)
    assert found is not None, "all groups that are at work suffice"
    return count, found


def find_late(last_steps: Sequence[int], step: int, quota: int) -> list[int]:
    """Return the groups that cannot be trained in time, even if all are complete and the most urgent are trained first.

    They begin again, so they take no place from the others.
    """
    late, places = list[int](), 0
    for g in np.argsort(last_steps, kind="stable").tolist():
        if last_steps[g] < step + places // quota:
            late.append(g)
        else:
            places += 1
    return sorted(late)


@dataclass(frozen=True)
class StepCosts:
    """Figures that a step's time and cost depend on besides the lengths of its responses.

    Parameters
    ----------
    speed : Speed
        Decode speed of an engine. Responses are spread evenly over the engines.
    engines : int
        Number of engines.
    prompt_tokens : float
        Mean tokens of a prompt.
    learn_s : float
        Seconds of the learn phase.
    learn_slots : int
        Slots of the learner.
    ahead : bool
        Whether a rollout begins beside the update of the step before it.
    recomputes : bool
        Whether the context of a response that continues in the next step is computed again.
    """

    speed: Speed
    engines: int
    prompt_tokens: float
    learn_s: float
    learn_slots: int
    ahead: bool = False
    recomputes: bool = True


@dataclass(frozen=True)
class LagPoint:
    """A step at one bound: share of groups at work, seconds, slot-seconds, and the mean lag of trained tokens in versions."""

    bound: int
    share: float
    step_s: float
    slot_s: float
    lag: float


def steady_step(groups: np.ndarray, quota: int, share: float, bound: int, costs: StepCosts) -> LagPoint:
    """Predict a step in the steady state of a pipeline of partial rollouts.

    groups: (m, count) tokens of the responses of m groups, which are begun in this order, and again from the first.
    """
    ahead = costs.ahead and bound > 0
    at_work, steps = math.ceil(quota * share), bound + 1 + TRIED
    stream = np.resize(np.arange(len(groups)), at_work + steps * quota)
    lengths, begun = groups[:0], np.zeros(0, int)
    drawn = np.zeros((0, groups.shape[1], steps))  # tokens by step
    taken, points = 0, list[tuple[float, float, float]]()
    speed = costs.speed
    for step in range(steps):
        new = at_work - len(lengths)
        lengths = np.concatenate([lengths, groups[stream[taken : taken + new]]])
        drawn, begun = np.pad(drawn, ((0, new), (0, 0), (0, 0))), np.r_[begun, np.full(new, step - ahead)]
        taken += new
        made = drawn.sum(2)
        left = lengths - made
        ends = left.max(1)
        order = np.argsort(ends, kind="stable")
        count, chosen = _first_batch(begun + bound, order, step, quota)
        decoded = np.minimum(left, ends[order[count - 1]])
        context = decoded * (costs.prompt_tokens + made) + decoded**2 / 2
        again = (costs.prompt_tokens + made)[(made > 0) & (decoded > 0)].sum() * speed.prefill_s * costs.recomputes
        seconds = speed.base_s * decoded.max() + (speed.per_seq_s * decoded.sum() + speed.per_ctx_s * context.sum() + again) / costs.engines
        drawn[:, :, step] = decoded
        of_batch = drawn[chosen]
        ages = step - np.arange(steps) + ahead * min(1.0, costs.learn_s / max(seconds, 1e-9))  # the first tokens are a version older
        lag = float((of_batch * ages).sum() / of_batch.sum())
        stay = np.setdiff1d(np.arange(len(lengths)), chosen)
        lengths, drawn, begun = lengths[stay], drawn[stay], begun[stay]
        step_s = max(seconds, costs.learn_s) if ahead else seconds + costs.learn_s
        points.append((step_s, costs.engines * seconds + costs.learn_slots * costs.learn_s, lag))
    means = np.mean(points[-TRIED:], axis=0).tolist()
    return LagPoint(bound, share, *means)


@dataclass(frozen=True)
class Oversample:
    """The chosen share of groups at work, its reason, and the best point at each bound, the synchronous step first."""

    share: float
    reason: str
    frontier: tuple[LagPoint, ...]


def choose_share(groups: np.ndarray, quota: int, bound: int, costs: StepCosts, prefer: float, stale_cost: float = 0.0) -> Oversample:
    """Choose how many groups are at work, by the predicted time and cost of a step and the lower value of old tokens.

    Parameters
    ----------
    groups : ndarray
        Tokens of the responses of groups, (m, count), as in `steady_step`.
    quota : int
        Groups that a step trains.
    bound : int
        Largest lag, at least 1.
    costs : StepCosts
        The other figures of a step.
    prefer : float
        1 counts time only, 0 slot-seconds only; between them shares of a synchronous step's are weighted.
    stale_cost : float
        The learning value of a batch falls with its mean lag: x versions count as exp(-stale_cost·x) of a fresh batch.
    """
    base = steady_step(groups, quota, 1.0, 0, replace(costs, ahead=False))

    def score(point: LagPoint) -> float:
        relative = prefer * point.step_s / base.step_s + (1 - prefer) * point.slot_s / base.slot_s
        return relative * math.exp(stale_cost * point.lag)

    frontier = [base]
    for most in range(1, bound + 1):
        tried = [steady_step(groups, quota, share, most, costs) for share in SHARES if share <= most + (not costs.ahead)]
        frontier.append(min(tried, key=score))
    chosen = min(frontier[1:], key=score)
    figures = "; ".join(
        f"bound {p.bound}: {p.step_s / base.step_s:.2f} of the time for {p.slot_s / base.slot_s:.2f} of the slot-seconds, lag {p.lag:.1f}"
        for p in frontier[1:]
    )
    return Oversample(chosen.share, f"oversample {chosen.share:g}: against a synchronous step, {figures}", tuple(frontier))
