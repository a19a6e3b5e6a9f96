"""Search the schedules of a step for the one of least cost, with its seconds at their worth.

Few schedules are searched exactly: those whose lower bound is better than the best schedule so far. Of many, Metropolis chains look for a
good one. All chains take each of their moves together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from placement.call_schedule import Option, Problem, Scheduler, Schedules

MAX_CHOICES = 1 << 17  # ways to choose an option for each call that are searched exactly
MAX_ORDERS = 256
MAX_ROWS = 20_000  # schedules in an exact search: 50 ms on one core of an AMD EPYC server
FIRST_ROWS, LATER_ROWS = 256, 2048
CHAINS, MOVES = 64, 250
EXCHANGES = 0.2  # share of moves that exchange two calls
PAIRS = 0.5  # share of the other moves that also let another call run beside the first
TEMPERATURES = (0.05, 0.0005)  # first and last, as a share of the value
OVER = 100.0  # penalty of what exceeds a limit, as a multiple of the whole cost
SLACK = 1e-9  # relative: sums of the same numbers in another order


@dataclass(frozen=True)
class Goal:
    """What a search looks for: least slot-seconds, with seconds at `value_per_s`, within limits."""

    value_per_s: float
    most_s: float = math.inf
    most_slot_s: float = math.inf

    def allows(self, seconds: float, slot_seconds: float) -> bool:
        return seconds <= self.most_s * (1 + SLACK) and slot_seconds <= self.most_slot_s * (1 + SLACK)

    def value(self, seconds: np.ndarray, slot_seconds: np.ndarray, slots: int) -> np.ndarray:
        """Return (R,) costs of schedules, and far more than that outside of the limits."""
        over = np.maximum(seconds / self.most_s, slot_seconds / self.most_slot_s) - 1
        return slot_seconds + self.value_per_s * seconds + np.where(over > SLACK, OVER * over * (slot_seconds + slots * seconds), 0.0)


@dataclass(frozen=True)
class Found:
    """The best schedule that was found: its list (n,), the options by number of the call, and the schedule as the only one of `schedules`.

    is_allowed: whether it is within the goal's limits. is_exact: no schedule is better.
    """

    order: np.ndarray
    options: tuple[Option, ...]
    schedules: Schedules
    is_allowed: bool
    is_exact: bool

    @property
    def seconds(self) -> float:
        return float(self.schedules.seconds[0])

    @property
    def slot_seconds(self) -> float:
        return float(self.schedules.slot_seconds[0])


class ScheduleSearch:
    """Searches the schedules of one problem, for one goal after the other."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self.problem, self.scheduler, self.seed = problem, Scheduler(problem), seed
        self.goal = Goal(0.0)
        self.counts = np.array([len(options) for options in self.scheduler.options])
        self.orders = np.array(list(itertools.islice(_orders(self.scheduler.needs), MAX_ORDERS + 1)))

    @property
    def is_small(self) -> bool:
        """Whether an exact search is tried. On several nodes no list may give the best schedule."""
        return self.problem.nodes == 1 and len(self.orders) <= MAX_ORDERS and math.prod(self.counts.tolist()) <= MAX_CHOICES

    def best(self, goal: Goal, *, exactly: bool = True) -> Found:
        """Return the best schedule for a goal. exactly: whether few schedules are searched exactly."""
        self.goal, self.value = goal, math.inf
        self.order, self.choice = self.orders[0], self._greedy()
        self._try(self.order[None], self.choice[None])
        is_exact = exactly and self.is_small and self._search_exactly()
        if not is_exact:
            self._run_chains()
        return self._found(self.order[None], self.choice[None], is_exact)

    def _found(self, order: np.ndarray, choice: np.ndarray, is_exact: bool) -> Found:
        schedules = self.scheduler.run(order, choice)
        options = tuple(some[at] for some, at in zip(self.scheduler.options, choice[0], strict=True))
        is_allowed = self.goal.allows(float(schedules.seconds[0]), float(schedules.slot_seconds[0]))
        return Found(order[0], options, schedules, is_allowed, is_exact)

    def _try(self, orders: np.ndarray, choices: np.ndarray) -> np.ndarray:
        """Compute schedules, and keep the best. Returns their values (R,)."""
        found = self.scheduler.run(orders, choices)
        values = self.goal.value(found.seconds, found.slot_seconds, self.problem.slots)
        at = int(values.argmin())
        if values[at] < self.value * (1 - SLACK):
            self.value, self.order, self.choice = float(values[at]), orders[at], choices[at]
        return values

    def _greedy(self) -> np.ndarray:
        """Return the option of each call (n,) that is best by itself."""
        scheduler = self.scheduler
        return np.argmin((scheduler.slots + self.goal.value_per_s) * scheduler.seconds, axis=1)

    def _search_exactly(self) -> bool:
        """Try every list with every choice whose bound is better than the best so far. Returns whether there was time for all."""
        choices = np.indices(tuple(self.counts)).reshape(len(self.counts), -1).T
        bounds = self.goal.value(*self.scheduler.least(choices), self.problem.slots)
        by_bound = np.argsort(bounds, kind="stable")
        done, rows, size = 0, 0, FIRST_ROWS
        while done < len(by_bound) and bounds[by_bound[done]] < self.value * (1 - SLACK):
            if rows >= MAX_ROWS:
                return False
            some = by_bound[done : done + max(1, size // len(self.orders))]
            some = some[bounds[some] < self.value * (1 - SLACK)]
            self._try(np.tile(self.orders, (len(some), 1)), np.repeat(choices[some], len(self.orders), axis=0))
            done, rows, size = done + len(some), rows + len(some) * len(self.orders), LATER_ROWS
        return True

    def _run_chains(self) -> None:
        """Change one thing of each list after the other. Keep what is better, and what is worse less and less often (Metropolis)."""
        random = np.random.default_rng(self.seed)
        rows, n = np.arange(CHAINS), len(self.counts)
        orders, choices = np.tile(self.order, (CHAINS, 1)), np.tile(self.choice, (CHAINS, 1))
        choices[CHAINS // 2 :] = random.integers(0, self.counts, (CHAINS - CHAINS // 2, n))
        values = self._try(orders, choices)
        hot, cold = TEMPERATURES
        for move in range(MOVES):
            others, other_choices = orders.copy(), choices.copy()
            at, exchange = random.integers(0, n, CHAINS), random.random(CHAINS) < EXCHANGES
            call, before = orders[rows, at], orders[rows, at - 1]
            exchange &= (at > 0) & ~self.scheduler.needs[call, before]
            others[rows[exchange], at[exchange]], others[rows[exchange], at[exchange] - 1] = before[exchange], call[exchange]
            other_choices[rows[~exchange], call[~exchange]] = random.integers(0, self.counts[call[~exchange]])
            beside = ~exchange & (random.random(CHAINS) < PAIRS) & (call != before)
            self._fit_beside(other_choices, rows[beside], call[beside], before[beside], random.random(int(beside.sum())))
            found = self._try(others, other_choices)
            heat = values * hot * (cold / hot) ** (move / MOVES)
            take = (found <= values) | (random.random(CHAINS) < np.exp(np.minimum(0.0, (values - found) / heat)))
            orders[take], choices[take], values[take] = others[take], other_choices[take], found[take]

    def _fit_beside(self, choices: np.ndarray, rows: np.ndarray, calls: np.ndarray, others: np.ndarray, drawn: np.ndarray) -> None:
        """Change the options of `others` to ones that leave the slots of `calls`, mostly of many slots. drawn: in [0, 1)."""
        slots = self.scheduler.slots
        left = self.problem.slots - slots[calls, choices[rows, calls]]
        fits = ((slots[others] <= left[:, None]) & np.isfinite(self.scheduler.seconds[others])).sum(1)
        choices[rows, others] = np.where(fits, (fits * np.sqrt(drawn)).astype(int), choices[rows, others])


def _orders(needs: np.ndarray) -> Iterator[list[int]]:
    """Yield all lists of calls in which each comes after those that it needs."""

    def longer(listed: list[int]) -> Iterator[list[int]]:
        if len(listed) == len(needs):
            yield listed
        for call in range(len(needs)):
            if call not in listed and all(need in listed for need in np.nonzero(needs[call])[0]):
                yield from longer([*listed, call])

    return longer([])
