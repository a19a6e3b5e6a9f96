"""Partitions on their way to becoming plans: figures first, index arrays only for those that stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from placement.choice import Point
from placement.plan import Plan

P = TypeVar("P", bound=Point)
ROUNDING = 1e-12  # relative difference below which two times or costs are the same


@dataclass(frozen=True)
class Partition:
    """A point in time and cost. cuts: positions in `order` where groups start, and the end; group i is order[cuts[i]:cuts[i+1]].
    pools: kind of each group."""

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
    def of_groups(cls, time_s: float, cost: float, groups: Sequence[np.ndarray], pools: Sequence[int]) -> Partition:
        """From groups that are no ranges of a common order."""
        cuts = np.concatenate(([0], np.cumsum([len(g) for g in groups])))
        return cls(time_s, cost, np.concatenate(groups), tuple(cuts.tolist()), tuple(pools))


def pareto(points: Iterable[P], thin: float = 0.0) -> list[P]:
    """Those not dominated, by time ascending and cost descending. With `thin` a point goes when the next cheaper point kept
    is less than that share slower; the fastest and the cheapest always stay."""
    best: list[P] = []
    for point in sorted(points, key=lambda p: (p.time_s, p.cost)):
        if best and point.cost >= best[-1].cost * (1 - ROUNDING):
            continue
        if best and point.time_s <= best[-1].time_s * (1 + ROUNDING):
            best.pop()
        best.append(point)
    if thin <= 0 or len(best) <= 2:
        return best
    kept = [best[-1]]
    for point in best[-2:0:-1]:
        if kept[-1].time_s >= point.time_s * (1 + thin):
            kept.append(point)
    kept.append(best[0])
    return kept[::-1]
