"""Objectives: which point of a frontier to take, and the reason in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Point(Protocol):
    """Anything with a time and a cost, such as a `Plan`."""

    @property
    def time_s(self) -> float: ...
    @property
    def cost(self) -> float: ...


P = TypeVar("P", bound=Point)


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


def choose(plans: Sequence[P], objective: Objective) -> Choice[P]:
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
    choice = choose_nearest(plans, objective)
    if not choice.met:
        raise NotFeasible(choice)
    return choice


def choose_nearest(plans: Sequence[P], objective: Objective) -> Choice[P]:
    """Choose as `choose` does, but return the nearest plan with `met=False` where no plan meets the objective.

    Use it in a loop that must not stop. Raises ValueError only if `plans` is empty.

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
        why = f"prefer {share:g} between cheapest (0) and fastest (1)"
    elif objective.deadline_s is not None:
        can = [i for i in every if times[i] <= objective.deadline_s]
        met = bool(can)
        at = min(can, key=lambda i: (costs[i], times[i])) if can else fast
        why = f"the cheapest within {objective.deadline_s:g} s"
        if not met:
            why = f"no plan takes {objective.deadline_s:g} s or less; the nearest deadline that can be met is {times[at]:.4g} s"
    elif objective.budget is not None:
        can = [i for i in every if costs[i] <= objective.budget]
        met = bool(can)
        at = min(can, key=lambda i: (times[i], costs[i])) if can else cheap
        why = f"the fastest at a cost of at most {objective.budget:g}"
        if not met:
            why = f"no plan costs {objective.budget:g} or less; the nearest budget that can be met is {costs[at]:.4g}"
    else:
        at = _knee(times, costs)
        why = "the knee: going faster costs more than it gains, going cheaper the other way round"
    figures = f"{times[at]:.4g} s at cost {costs[at]:.4g}"
    span = f"fastest {times[fast]:.4g} s at cost {costs[fast]:.4g}, cheapest {times[cheap]:.4g} s at cost {costs[cheap]:.4g}"
    return Choice(plans[at], at, f"{figures}: {why} ({span})" if met else f"{why}: {figures} ({span})", met)


def _knee(times: Sequence[float], costs: Sequence[float]) -> int:
    """Return the index of the knee, or of the fastest plan if one axis has no range."""
    wide, high = max(times) - min(times), max(costs) - min(costs)
    if wide <= 0 or high <= 0:
        return min(range(len(times)), key=lambda i: (times[i], costs[i]))
    below = [(t - min(times)) / wide + (c - min(costs)) / high for t, c in zip(times, costs, strict=True)]
    return min(range(len(times)), key=lambda i: (below[i], times[i]))
