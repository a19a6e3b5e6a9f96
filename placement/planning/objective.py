"""Objectives: which point of a frontier to take, and the reason in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


class Point(Protocol):
    """Anything with a time and a cost."""

    @property
    def time_s(self) -> float: ...
    @property
    def cost(self) -> float: ...


class EnginesPoint(Point, Protocol):
    """A point of some number of engines, such as a `Plan`."""

    @property
    def actors(self) -> int: ...


P = TypeVar("P", bound=EnginesPoint)


@dataclass(frozen=True)
class Objective:
    """A goal for choosing among plans. Set exactly one field.

    Parameters
    ----------
    prefer : float, optional
        Trade-off from 0 (cheapest) to 1 (fastest).
    deadline_s : float, optional
        Take the cheapest plan within this many seconds.
    budget : float, optional
        Take the fastest plan within this cost.
    knee : bool
        Take the point where going faster begins to cost more than it gains.

    Examples
    --------
    >>> Objective(deadline_s=30.0).deadline_s
    30.0
    >>> Objective.parse("knee")
    Objective(prefer=None, deadline_s=None, budget=None, knee=True)
    """

    prefer: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    knee: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("prefer", "deadline_s", "budget") if getattr(self, name) is not None]
        given += ["knee"] if self.knee else []
        if len(given) != 1:
            raise ValueError(f"an objective is one of prefer, deadline_s, budget and knee, got {', '.join(given) or 'none'}")
        if self.prefer is not None and not 0 <= self.prefer <= 1:
            raise ValueError(f"prefer lies between 0 (cheapest) and 1 (fastest), got {self.prefer}")
        for name in ("deadline_s", "budget"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and above 0, got {value}")

    @classmethod
    def parse(cls, value: Objective | Mapping[str, Any] | str | float) -> Objective:
        """Build an objective from a recipe's value: "knee", a number (`prefer`), or a mapping with one key."""
        if isinstance(value, Objective):
            return value
        if isinstance(value, Mapping):
            unknown = set(value) - {"prefer", "deadline_s", "budget", "knee"}
            if unknown:
                raise ValueError(f"an objective knows prefer, deadline_s, budget and knee, not {', '.join(sorted(unknown))}")
            return cls(**value)
        if value == "knee":
            return cls(knee=True)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f'an objective is "knee", a number between 0 and 1 or a mapping, got {value!r}')
        return cls(prefer=float(value))


@dataclass(frozen=True)
class Choice(Generic[P]):
    """A chosen plan: its index on the frontier, the reason in words, and whether it meets the objective.

    Examples
    --------
    >>> from placement import Objective, Speed, choose, frontier
    >>> plans = frontier([120, 80, 75, 900], Speed(base_s=0.01, per_seq_s=1e-4), max_actors=4)
    >>> choice = choose(plans, Objective(prefer=1.0))
    >>> choice.index, choice.plan.actors, choice.met
    (0, 2, True)
    """

    plan: P
    index: int
    reason: str
    met: bool = True


class NotFeasible(ValueError):
    """Raised when no plan meets the deadline or the budget. `nearest` holds the choice that comes closest.

    Examples
    --------
    >>> from placement import Objective, Speed, choose, frontier
    >>> plans = frontier([120, 900], Speed(base_s=0.01, per_seq_s=1e-4), max_actors=2)
    >>> try:
    ...     choose(plans, Objective(deadline_s=1.0))
    ... except NotFeasible as error:
    ...     print(round(error.nearest.plan.time_s, 2))
    9.09
    """

    def __init__(self, nearest: Choice[Any]) -> None:
        super().__init__(nearest.reason)
        self.nearest = nearest


def choose(plans: Sequence[P], objective: Objective, unit: str = "slot-s") -> Choice[P]:
    """Choose the plan that meets an objective best.

    `prefer` minimises prefer · time / fastest + (1 - prefer) · cost / cheapest, and takes the faster plan on a tie.
    `knee` takes the point farthest below the line between fastest and cheapest, with both axes scaled to 0..1 (Kneedle,
    Satopää et al. 2011, offline form).

    Raises
    ------
    NotFeasible
        If no plan meets the deadline or the budget. This ValueError carries the nearest choice.
    ValueError
        If `plans` is empty.

    Examples
    --------
    >>> from placement import Speed, frontier
    >>> plans = frontier([900, 80, 75], Speed(0.01, 1e-4), max_actors=2)
    >>> choose(plans, Objective(prefer=1.0)).plan is plans[0]
    True
    """
    choice = choose_nearest(plans, objective, unit)
    if not choice.met:
        raise NotFeasible(choice)
    return choice


def choose_nearest(plans: Sequence[P], objective: Objective, unit: str = "slot-s") -> Choice[P]:
    """Choose as `choose` does, but return the nearest plan with `met=False` where no plan meets the objective.

    Use it in a loop that must not stop. `unit`: of costs, for the reason. Raises ValueError only if `plans` is empty.

    Examples
    --------
    >>> from placement import Speed, frontier
    >>> plans = frontier([900, 80, 75], Speed(0.01, 1e-4), max_actors=2)
    >>> choose_nearest(plans, Objective(deadline_s=0.1)).met
    False
    """
    if not len(plans):
        raise ValueError("there are no plans to choose from")
    times, costs = [plan.time_s for plan in plans], [plan.cost for plan in plans]
    every = range(len(plans))
    fast = min(every, key=lambda i: (times[i], costs[i]))
    cheap = min(every, key=lambda i: (costs[i], times[i]))
    met, why = True, ""
    if objective.prefer is not None:
        share = objective.prefer
        fastest, cheapest = max(times[fast], 1e-300), max(costs[cheap], 1e-300)
        at = min(every, key=lambda i: (share * times[i] / fastest + (1 - share) * costs[i] / cheapest, times[i], costs[i]))
        if share in (0.0, 1.0):
            at = fast if share else cheap
    elif objective.deadline_s is not None:
        can = [i for i in every if times[i] <= objective.deadline_s]
        met = bool(can)
        at = min(can, key=lambda i: (costs[i], times[i])) if can else fast
        why = f"the cheapest within {objective.deadline_s:g} s: "
        if not met:
            why = f"no plan takes {objective.deadline_s:g} s or less; the nearest deadline that can be met is {times[at]:.4g} s: "
    elif objective.budget is not None:
        can = [i for i in every if costs[i] <= objective.budget]
        met = bool(can)
        at = min(can, key=lambda i: (times[i], costs[i])) if can else cheap
        why = f"the fastest for at most {objective.budget:g} {unit}: "
        if not met:
            why = f"no plan costs {objective.budget:g} {unit} or less; the nearest budget that can be met is {costs[at]:.4g} {unit}: "
    else:
        at, why = _knee(times, costs), "the knee: "
    return Choice(plans[at], at, f"{why}{in_words(plans[at], unit)}{_alternative(plans[at], plans, unit)}", met)


def in_words(plan: EnginesPoint, unit: str = "slot-s") -> str:
    """Return a plan's engines, seconds and cost, such as "2 engines, 3.81 s, 7.14 slot-s". `unit`: of the cost."""
    return f"{plan.actors} engine{'s' * (plan.actors != 1)}, {plan.time_s:.3g} s, {plan.cost:.3g} {unit}"


def _alternative(chosen: EnginesPoint, plans: Sequence[EnginesPoint], unit: str) -> str:
    """Say what more engines would save, or if that is nothing, what fewer would cost in time."""
    faster = [plan for plan in plans if plan.actors > chosen.actors and plan.time_s < chosen.time_s]
    if faster:
        next_one = min(faster, key=lambda plan: (plan.actors, plan.time_s))
        more, number = next_one.actors - chosen.actors, next_one.actors - 2
        who = f"{more} more" if more > 1 else f"a {ORDINALS[number]}" if number < len(ORDINALS) else "one more"
        return f"; {who} would save {chosen.time_s - next_one.time_s:.2g} s for {next_one.cost - chosen.cost:.2g} {unit}"
    cheaper = [plan for plan in plans if plan.actors < chosen.actors and plan.cost < chosen.cost]
    if not cheaper:
        return ""
    next_one = max(cheaper, key=lambda plan: (plan.actors, -plan.cost))
    return (
        f"; {next_one.actors} would save {chosen.cost - next_one.cost:.2g} {unit} but take {next_one.time_s - chosen.time_s:.2g} s longer"
    )


def _knee(times: Sequence[float], costs: Sequence[float]) -> int:
    """Return the index of the knee, or of the fastest plan if one axis has no range."""
    wide, high = max(times) - min(times), max(costs) - min(costs)
    if wide <= 0 or high <= 0:
        return min(range(len(times)), key=lambda i: (times[i], costs[i]))
    below = [(t - min(times)) / wide + (c - min(costs)) / high for t, c in zip(times, costs, strict=True)]
    return min(range(len(times)), key=lambda i: (below[i], times[i]))
