"""Decisions as values, each with its reason. The pools act on them; nothing here does."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from placement.choice import Objective
from placement.plan import Plan

GAMMA = 0.5  # share of the predicted saving that a change may cost (Nereus)
BAND = 0.02  # a change must save more than this share of what a step costs: predictions differ by as much for no reason
THRESHOLD = 0.3
MEMORY = 0.5  # weight of the newest interval
DEAREST = 0.999  # prefer = 1 would make a second worth any money


@dataclass(frozen=True)
class Decision:
    """What to do with a pool: hold `actors` of it from now on. `plan` says which sequences each takes, where one was
    made."""

    actors: int
    reason: str
    time_s: float = 0.0  # predicted time of the rollout
    cost: float = 0.0  # predicted, every actor until its own last response
    plan: Plan | None = field(default=None, compare=False, repr=False)

    @property
    def action(self) -> str:
        return type(self).__name__

    @property
    def cost_slot_s(self) -> float:
        """The cost at the neutral price of one per slot-second."""
        return self.cost


class Grow(Decision):
    """More actors than now."""


class Shrink(Decision):
    """Fewer actors than now."""


class Hold(Decision):
    """As many as now."""


class Release(Decision):
    """Leases go back; nothing is kept warm for them longer than it costs nothing."""


@dataclass(frozen=True)
class Park(Decision):
    """Leases go back, processes stay warm for `keep_s` seconds and end then."""

    keep_s: float = 0.0


@dataclass(frozen=True)
class Transition:
    """What changing the number of actors costs once. Seconds per actor; the actors of one change start side by side.

    start_s: from lease to ready (cold, or warm where one is parked). hidden_s: of that, while other work goes on. return_s:
    start of an actor that is given up now, should it be needed again. price: of one actor-second.
    """

    start_s: float
    hidden_s: float = 0.0
    return_s: float = 0.0
    price: float = 1.0


@dataclass(frozen=True)
class ResizeHistory:
    """How long a wish for a number of actors lasts, in steps. A new wish begins when the plan's number leaves the old one's
    by more than 30 % (Nereus' threshold for its signals)."""

    wanted: int | None = None
    since: int = 0
    mean_interval: float | None = None

    def saw(self, step: int, wanted: int) -> ResizeHistory:
        """After this step's plan, before `decide`."""
        if self.wanted is None:
            return ResizeHistory(wanted, step)
        if abs(wanted - self.wanted) <= THRESHOLD * self.wanted:
            return self
        lasted = max(1.0, float(step - self.since))
        mean = lasted if self.mean_interval is None else (1 - MEMORY) * self.mean_interval + MEMORY * lasted
        return ResizeHistory(wanted, step, mean)

    def horizon(self, step: int) -> float:
        """Steps that this wish will probably last: the exponential mean of earlier ones (1 before the first has ended), or
        as long as it has lasted already."""
        return max(1.0, self.mean_interval or 1.0, float(step - self.since))


def time_value(objective: Objective, plans: Sequence[Plan]) -> float:
    """What a second of rollout time is worth, in cost, to an objective on a frontier of plans.

    prefer p scores p·T/T* + (1-p)·C/C*: a second is worth p/(1-p)·C*/T*. knee, and budget as far as it is met: cost and time
    count alike over the frontier's width. deadline_s, as far as it is met: nothing.
    """
    if not plans or objective.deadline_s is not None:
        return 0.0
    times, costs = [p.time_s for p in plans], [p.cost for p in plans]
    if objective.prefer is not None:
        share = min(objective.prefer, DEAREST)
        return share / (1 - share) * min(costs) / max(min(times), 1e-12)
    return (max(costs) - min(costs)) / max(max(times) - min(times), 1e-12) if len(plans) > 1 else 1.0


def plan_of_current(plans: Sequence[Plan], current: int, objective: Objective) -> Plan | None:
    """The best plan that needs no actor more than now (None where every plan does): what staying would mean."""
    worth = time_value(objective, plans)
    can = [plan for plan in plans if plan.actors <= current]
    if objective.deadline_s is not None:
        can = [plan for plan in can if plan.time_s <= objective.deadline_s] or can[:1]
    elif objective.budget is not None:
        can = [plan for plan in can if plan.cost <= objective.budget] or can[-1:]
    return min(can, key=lambda plan: plan.cost + worth * plan.time_s, default=None)


def decide(
    current: int, chosen: Plan, stay: Plan | None, *, transition: Transition, history: ResizeHistory, step: int,
    second: float, steps_left: float = math.inf, gamma: float = GAMMA, band: float = BAND, urgent: str = "",
) -> Decision:
    """Whether to go from `current` actors to those of the `chosen` plan.

    stay: the best plan for the actors held (`plan_of_current`), None where there is none; both plans are without one-time
    starts. second: what a second of the step is worth (`time_value`). urgent: why the change must not wait, if so.

    A change is made when its one-time cost is at most gamma · saving per step · steps it will last (Nereus, 2026: gamma 0.5,
    horizon the mean of past intervals between such wishes), so a wish that comes and goes is not followed. It is not made
    for less than `band` of a step's cost in either direction; giving an actor up is charged with its start for the way back.
    Where nothing can be done with the actors held, the change is urgent and made.
    """
    if chosen.actors == current:
        return _to(chosen, current, f"{current} actors are what the plan wants")
    if stay is None:
        urgent = urgent or ("no actor is held yet" if current == 0 else f"no plan works with {current} actors")
    if urgent:
        return _to(chosen, current, f"{urgent}: {chosen.actors} actors at once")
    assert stay is not None
    before, after = stay.cost + second * stay.time_s, chosen.cost + second * chosen.time_s
    saving, more = before - after, chosen.actors - current
    figures = (
        f"{chosen.actors} actors: {chosen.time_s:.3g} s for {chosen.cost:.3g} "
        f"(now {current}: {stay.time_s:.3g} s for {stay.cost:.3g})"
    )
    if saving <= band * before:
        return _stay(stay, current, f"{figures} saves {saving / max(before, 1e-12):.1%} a step, less than {band:.0%}")
    if more > 0:
        once = more * transition.price * transition.start_s + second * max(0.0, transition.start_s - transition.hidden_s)
    else:
        once = -more * transition.price * transition.return_s
    lasts = min(history.horizon(step), steps_left)
    balance = f"{figures} saves {saving:.3g} a step for {once:.3g} once"
    if once <= gamma * saving * lasts:
        return _to(chosen, current, f"{balance}, expected to last {lasts:.3g} steps")
    return _stay(stay, current, f"{balance}: pays back in {once / saving:.3g} steps, but must within {gamma * lasts:.3g}")


def _to(plan: Plan, current: int, reason: str) -> Decision:
    kind = Hold if plan.actors == current else Grow if plan.actors > current else Shrink
    return kind(plan.actors, reason, plan.time_s, plan.cost, plan)


def _stay(plan: Plan, current: int, reason: str) -> Decision:
    return Hold(current, reason, plan.time_s, plan.cost, plan)


def safe_decide(
    last: Decision | None, make: Callable[..., Decision], *arguments: Any, fallback: int = 1, **named: Any
) -> Decision:
    """`make(*arguments, **named)`; where it raises, the last good decision held, with a reason that says what went wrong.

    A running loop goes on with the plan it had. Without one, `fallback` actors. The plan's groups are dropped: they are of
    another step's sequences. `failed(decision)` tells the caller to log it.
    """
    try:
        return make(*arguments, **named)
    except Exception as error:
        wrong = f"{FAILED} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
        if last is None:
            return Hold(fallback, f"{wrong}; no plan before it, {fallback} actors")
        reason = last.reason.split(KEPT)[-1]
        return Hold(last.actors, f"{wrong}{KEPT}{reason}", last.time_s, last.cost)


FAILED, KEPT = "the planner failed", "; the last good plan is kept: "


def failed(decision: Decision) -> bool:
    """Whether a decision of `safe_decide` stands in for one that could not be made."""
    return decision.reason.startswith(FAILED)


def deal(lengths: np.ndarray, groups: np.ndarray, actors: int) -> list[np.ndarray]:
    """Share sequences out: whole groups (they share a prompt), longest first, each to the least loaded actor.

    lengths (n,) forecast tokens, groups (n,) the prompt of each sequence. Returns `actors` index arrays, some perhaps
    empty. Load is the sum of forecast tokens.
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


def slots_to_yield(held: int, least: int, others_wait: bool) -> Decision:
    """On a shared cluster leases are handed from phase to phase and never pass through Ray's queue, so somebody else's
    request would wait for ever: at the end of a step give up half, or everything when only the least is held."""
    if not others_wait or held == 0:
        return Hold(held, "nobody else waits")
    keep = max(least, math.ceil(held / 2)) if held > least else 0
    return Release(keep, f"somebody else waits: {held - keep} of {held} slots go back to Ray")
