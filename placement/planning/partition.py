"""Partitions under construction. They hold figures and cuts; index arrays are built only for those that become plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from placement.planning.objective import Point
from placement.planning.plan import Plan

P = TypeVar("P", bound=Point)
ROUNDING = 1e-12  # relative difference below which two times or costs count as equal


@dataclass(frozen=True)
class Partition:
    """A contiguous partition of `order`, with its time and cost.

    Group i is `order[cuts[i]:cuts[i + 1]]` and runs on actor type `pools[i]`.
    """

    time_s: float
    cost: float
    order: np.ndarray
    cuts: tuple[int, ...]
    pools: tuple[int, ...]

    def plan(self, search_scenarios: int = 0) -> Plan:
        order, cuts = self.order, self.cuts
        groups = tuple([order[a:b] for a, b in itertools.pairwise(cuts)])
        return Plan(self.time_s, self.cost, groups, self.pools, search_scenarios)

    @classmethod
    def from_groups(cls, time_s: float, cost: float, groups: Sequence[np.ndarray], pools: Sequence[int]) -> Partition:
        """Build a partition from groups that are not ranges of a common order."""
        cuts = np.concatenate(([0], np.cumsum([len(g) for g in groups])))
        return cls(time_s, cost, np.concatenate(groups), tuple(cuts.tolist()), tuple(pools))


def pareto(points: Iterable[P], thin: float = 0.0) -> list[P]:
    """Return the points that no other dominates, by time ascending and cost descending.

    With `thin` > 0, keep only enough points that each dropped one has a kept neighbour at most this share slower and at
    most this share more expensive. The fastest and the cheapest always stay.
    """
    best: list[P] = []
    for point in sorted(points, key=lambda p: (p.time_s, p.cost)):
        if best and point.cost >= best[-1].cost * (1 - ROUNDING):
            continue
        if best and point.time_s <= best[-1].time_s * (1 + ROUNDING):
            best.pop()
        best.append(point)
    if thin <= 0 or len(best) <= 2:
        return best
    kept, i, last = [best[0]], 1, len(best) - 1
    while i < last:
        need = best[i]
        if kept[-1].cost > need.cost * (1 + thin):
            # the slowest point within reach of this one also covers those in between
            while i + 1 < last and best[i + 1].time_s <= need.time_s * (1 + thin):
                i += 1
            kept.append(best[i])
        i += 1
    return [*kept, best[-1]]
