"""Resizing decisions as values, each with its reason. The pools carry them out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from placement.planning.objective import Objective, Point, choose_nearest, in_words
from placement.planning.plan import Plan

MAX_COST_SHARE = 0.5  # share of the predicted saving that a change may cost (Nereus)
MIN_SAVING = 0.02  # share of a step's cost that a change must save: predictions fluctuate by as much
NEW_TARGET_CHANGE = 0.3  # relative change of the plan's number of actors that counts as a new target (Nereus)
INTERVAL_WEIGHT = 0.5  # weight of the newest interval
MAX_PREFER = 0.999  # at prefer = 1 a second would be worth any cost


@dataclass(frozen=True)
class Decision:
    """A decision about a pool: hold `actors` actors from now on.

    `plan` assigns sequences to them, where a plan was made. time_s: predicted time of the rollout. cost: predicted
    cost, each actor billed until its own last response.
    """

    actors: int
    reason: str
    time_s: float = 0.0
    cost: float = 0.0
    plan: Plan | None = field(default=None, compare=False, repr=False)

    @property
    def action(self) -> str:
        """Return "Hold", "Grow", "Shrink", "Release" or "Park"."""
        return type(self).__name__


class Grow(Decision):
    """Take more actors."""


class Shrink(Decision):
    """Give up actors."""


class Hold(Decision):
    """Keep the number of actors."""


class Release(Decision):
    """Give leases back. Processes stay warm only as long as that costs nothing."""


@dataclass(frozen=True)
class Park(Decision):
    """Give leases back and keep processes warm for `keep_s` seconds."""

    keep_s: float = 0.0


@dataclass(frozen=True)
class Transition:
    """One-time costs of changing the number of actors, in seconds per actor. Actors of one change start in parallel.

    start_s: from lease to ready, of a new actor. restart_s: start of a parked actor, also of one that is given up now and needed again
    later. price: of one actor-second. warm: number of actors that are parked or work, so that only more than these start anew.
    """

    start_s: float
    restart_s: float = 0.0
    price: float = 1.0
    warm: int = 0

    def starts(self, current: int, wanted: int) -> tuple[float, float]:
        """Return the seconds by which a change to `wanted` actors delays the step, and what its starts cost.

        >>> Transition(20.0, restart_s=0.5, warm=3).starts(2, 5)
        (20.0, 40.5)
        """
        more = max(0, wanted - current)
        cold = min(more, max(0, wanted - self.warm))
        longest_s = self.start_s if cold else self.restart_s if more else 0.0
        return longest_s, self.price * (cold * self.start_s + (more - cold) * self.restart_s)


@dataclass(frozen=True)
class ResizeHistory:
    """The history of target numbers of actors: how many steps they last.

    A new target begins when the plan's number differs from the old one by more than 30 % (Nereus' threshold).
    """

    wanted: int | None = None
    since: int = 0
    mean_interval: float | None = None

    def record(self, step: int, wanted: int) -> ResizeHistory:
        """Return the history after this step's plan. Call it before `decide`."""
        if self.wanted is None:
            return ResizeHistory(wanted, step)
        if abs(wanted - self.wanted) <= NEW_TARGET_CHANGE * self.wanted:
            return self
        lasted = max(1.0, float(step - self.since))
        mean = lasted if self.mean_interval is None else (1 - INTERVAL_WEIGHT) * self.mean_interval + INTERVAL_WEIGHT * lasted
        return ResizeHistory(wanted, step, mean)

    def horizon(self, step: int) -> float:
        """Return the steps that this target will probably last.

        That is the exponential mean of past targets (1 before the first has ended), or its own age if that is more.
        """
        return max(1.0, self.mean_interval or 1.0, float(step - self.since))


def preferred_value(prefer: float, least_cost: float, least_s: float) -> float:
    """Return the worth of a second, in cost, with `prefer`, the lowest cost and the shortest time: p/(1-p)·C*/T*."""
    share = min(prefer, MAX_PREFER)
    return share / (1 - share) * least_cost / max(least_s, 1e-12)


def time_value(objective: Objective, plans: Sequence[Point]) -> float:
    """Return the worth of a second, in cost, for an objective on a frontier of plans.

    `prefer` p scores p·T/T* + (1-p)·C/C*, so a second is worth p/(1-p)·C*/T*. For `deadline_s` a second is
    worth nothing if a plan meets it, and otherwise as much as for `prefer` 1. For `budget` it is the other way round. For `knee` cost
    and time count alike over the frontier's width.
    """
    if not plans:
        return 0.0
    times, costs = [p.time_s for p in plans], [p.cost for p in plans]
    if objective.deadline_s is not None and min(times) <= objective.deadline_s:
        return 0.0
    if objective.budget is not None and min(costs) > objective.budget:
        return 0.0
    prefer = objective.prefer if objective.deadline_s is None and objective.budget is None else 1.0
    if prefer is not None:
        return preferred_value(prefer, min(costs), min(times))
    return (max(costs) - min(costs)) / max(max(times) - min(times), 1e-12) if len(plans) > 1 else 1.0


def best_held_plan(plans: Sequence[Plan], current: int, objective: Objective) -> Plan | None:
    """Return the best plan that needs no more actors than `current`, or None if every plan that meets the objective needs more.

    Where no plan meets it, return the nearest of those that need no more.
    """
    held = [plan for plan in plans if plan.actors <= current]

    def meets(plan: Plan) -> bool:
        return plan.time_s <= (objective.deadline_s or math.inf) and plan.cost <= (objective.budget or math.inf)

    if not any(map(meets, plans)):
        return choose_nearest(held, objective).plan if held else None
    worth = time_value(objective, plans)
    return min(filter(meets, held), key=lambda plan: plan.cost + worth * plan.time_s, default=None)


def decide(
    current: int,
    chosen: Plan,
    stay: Plan | None,
    *,
    transition: Transition,
    history: ResizeHistory,
    step: int,
    value_per_s: float,
    least: int = 1,
    steps_left: float = math.inf,
    gamma: float = MAX_COST_SHARE,
    min_saving: float = MIN_SAVING,
    urgent: str = "",
    unit: str = "slot-s",
) -> Decision:
    """Decide whether to go from `current` actors to those of the `chosen` plan.

    stay: the best plan for the actors held (`best_held_plan`), or None. Both plans exclude one-time starts.
    value_per_s: worth of a second of the step (`time_value`). least: actors that are held even without work. urgent: why the change
    must not wait, if so. unit: of costs, for the reason.

    A change is made if its one-time cost is at most gamma · saving per step · steps it will last (Nereus, 2026: gamma
    0.5, horizon the mean of past intervals between targets). So short-lived targets are not followed. It must save at
    least `min_saving` of a step's cost, in either direction. Giving an actor up is charged with the start for getting
    it back. Staying is charged with the starts of the actors that `stay` leaves idle: plans bill only actors that work. If no plan
    works with the actors held, the change is urgent and made.
    """
    if chosen.actors == current:
        return _to(chosen, current, "as many as are held")
    if stay is None:
        urgent = urgent or ("none is held yet" if current == 0 else f"no plan works with the {current} that are held")
    if urgent:
        return _to(chosen, current, urgent)
    assert stay is not None
    wanted, idle = max(chosen.actors, least), max(0, current - max(stay.actors, least))
    stay_cost = stay.cost + idle * transition.price * transition.restart_s
    before, after = stay_cost + value_per_s * stay.time_s, chosen.cost + value_per_s * chosen.time_s
    saving, more = before - after, wanted - current
    now = f"{in_words(replace(stay, cost=stay_cost), unit)}{f', and {idle} idle' if idle else ''}"
    if more > 0:
        delay_s, starts = transition.starts(current, wanted)
        once = starts + value_per_s * delay_s
    else:
        once = -more * transition.price * transition.restart_s
    pays, why = pays_back(saving, before, once, min(history.horizon(step), steps_left), gamma, min_saving, unit)
    if pays:
        return _to(chosen, current, f"against {now}, that {why}")
    return Hold(current, f"{now}; a change to {in_words(chosen, unit)} {why}", stay.time_s, stay.cost, stay)


def with_starts(plan: Plan, current: int, transition: Transition, lasts: float, gamma: float = MAX_COST_SHARE) -> Plan:
    """Return the plan with the starts that it needs beyond `current` actors in its time and cost.

    lasts: steps that the change will last. Its one-time cost is spread over gamma times as many, within which `decide` wants it paid
    back. So of plans with their starts the better one is better by more than that.

    >>> few, many = (Plan(seconds, 40.0, (np.arange(1),) * actors) for actors, seconds in ((1, 40.0), (2, 20.0)))
    >>> with_starts(few, 1, Transition(22.0), lasts=4) is few, with_starts(many, 1, Transition(22.0), lasts=4).time_s
    (True, 31.0)
    """
    if plan.actors <= current:
        return plan
    delay_s, starts = transition.starts(current, plan.actors)
    return replace(plan, time_s=plan.time_s + delay_s / (gamma * lasts), cost=plan.cost + starts / (gamma * lasts))


def started_later(plan: Plan, now: Plan, transition: Transition) -> Plan:
    """Return a plan for the rest of a running rollout with the time until its further actors have started.

    now: the plan for the actors that work, which are alone until then. The part of the work that they do meanwhile takes the same part of
    both plans' time and cost.

    >>> now, more = (Plan(seconds, 40.0, (np.arange(1),) * actors) for actors, seconds in ((1, 40.0), (2, 20.0)))
    >>> later = started_later(more, now, Transition(10.0))
    >>> later.time_s, later.cost, started_later(more, now, Transition(60.0)).time_s
    (25.0, 50.0, 40.0)
    """
    if plan.actors <= now.actors:
        return plan
    delay_s, _ = transition.starts(now.actors, plan.actors)
    alone_s = min(delay_s, now.time_s)
    after = 1 - alone_s / max(now.time_s, 1e-12)
    held = transition.price * (plan.actors - now.actors) * alone_s
    return replace(plan, time_s=alone_s + after * plan.time_s, cost=(1 - after) * now.cost + after * plan.cost + held)


def pays_back(
    saving: float, before: float, once: float, lasts: float, gamma: float, min_saving: float, unit: str = "slot-s"
) -> tuple[bool, str]:
    """Return whether a change pays back, and why.

    saving: per step, of the cost `before` it, the worth of its seconds included. once: its one-time cost. lasts: steps that it will last.
    unit: of all of them. It must save at least `min_saving` of a step's cost, and cost at most gamma · saving · lasts.
    """
    if saving <= min_saving * before:
        return False, f"saves {saving / max(before, 1e-12):.1%} a step, less than {min_saving:.0%}"
    balance = f"saves the worth of {saving:.3g} {unit} a step for {once:.3g} once"
    if once <= gamma * saving * lasts:
        return True, f"{balance}, expected to last {lasts:.3g} steps"
    return False, f"{balance}: pays back in {once / saving:.3g} steps, but must within {gamma * lasts:.3g}"


def kind_of_change(actors: int, current: int) -> type[Decision]:
    """Return the class of a decision for so many actors instead of `current`."""
    return Hold if actors == current else Grow if actors > current else Shrink


def counted_from(decision: Decision, current: int, why: str) -> Decision:
    """Return the decision as a change from `current` actors, with `why` before its reason."""
    kind = kind_of_change(decision.actors, current)
    return kind(decision.actors, f"{why}; {decision.reason}", decision.time_s, decision.cost, decision.plan)


def _to(plan: Plan, current: int, reason: str) -> Decision:
    return kind_of_change(plan.actors, current)(plan.actors, reason, plan.time_s, plan.cost, plan)


def assign_groups(lengths: np.ndarray, groups: np.ndarray, actors: int) -> list[np.ndarray]:
    """Assign whole groups (sequences of one prompt), longest first, each to the least loaded actor.

    lengths (n,): forecast tokens. groups (n,): the prompt of each sequence. Returns `actors` index arrays, some
    possibly empty. The load of an actor is its sum of forecast tokens.
    """
    by_group = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[by_group], prepend=-1)) if len(groups) else np.empty(0, int)
    members = np.split(by_group, starts[1:]) if len(groups) else []
    loads = [(0.0, actor) for actor in range(actors)]
    dealt: list[list[np.ndarray]] = [[] for _ in range(actors)]
    for group in sorted(members, key=lambda m: -float(lengths[m].sum())):
        load, actor = heapq.heappop(loads)
        dealt[actor].append(group)
        heapq.heappush(loads, (load + float(lengths[group].sum()), actor))
    return [np.concatenate(d) if d else np.empty(0, int) for d in dealt]


def slots_to_yield(held: int, least: int, others_wait: bool, surplus: int = 0, usable: int = 0) -> Decision:
    """Decide how many slots to give up at the end of a step if other jobs wait.

    surplus: slots that this run should give back to waiting runs, as the shared pool reports it; usable: held slots that they could use.
    If surplus is 0 because the waiting jobs are not in the pool, half of the slots are given up, or all if only the minimum
    `least` is held. On a shared cluster leases pass from phase to phase and never through Ray's queue, so without this another job's
    request would wait forever.
    """
    if not others_wait or held == 0:
        return Hold(held, "no other job waits for slots")
    if surplus:
        keep = held - min(surplus, usable)
        if keep == held:
            return Hold(held, "waiting runs can use none of these slots")
        return Release(keep, f"other runs wait for their share of the pool: {held - keep} of {held} slots go to them")
    keep = max(least, math.ceil(held / 2)) if held > least else 0
    return Release(keep, f"another job waits: {held - keep} of {held} slots go back to Ray")
