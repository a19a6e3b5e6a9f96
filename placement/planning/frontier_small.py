"""Few sequences: non-contiguous partitions, which use the time that contiguous ones leave unused."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from placement.planning.partition import Partition, pareto
from placement.planning.workload import RolloutWorkload

SMALL = 11  # up to this many sequences every partition is examined (at most 20 ms for 11, 130 ms for 12)
SMALL_UNBOUNDED = 9  # the same if no contiguous partition fits the caches, so that nothing prunes the search
PACKED = 128  # up to this many sequences unused time is packed: with more it gains at most 1 % and takes long
MIN_GAIN = 1e-9  # relative gain below which a partition does not count as new


def all_partitions(work: RolloutWorkload, known: Sequence[Partition]) -> list[Partition]:
    """Search all partitions of at most SMALL known lengths, on any mix of actor types.

    Returns those that no point of the frontier `known` dominates. Contiguous groups leave time unused that shorter
    sequences could fill (bin packing): this matters with few sequences, not with hundreds.

    Breadth first over the sorted sequences: each joins an open group or opens one, on every actor type. A group's time
    and the cost so far only grow, and preemptions of the others only add to the slowest group's time. So a state is dropped
    as soon as a point of `known` is as fast and as cheap as it already is. Among states with equal group loads only the
    cheapest is kept.
    """
    order = np.argsort(-work.lengths[:, 0], kind="stable")
    lengths, prompts = work.lengths[order, 0], work.prompts[order]
    held, kinds = prompts + lengths, work.kinds
    n, slots = len(lengths), min(len(lengths), sum(kind.max_actors for kind in kinds))
    times = np.array([point.time_s for point in known])
    costs = np.array([point.cost for point in known])  # descending
    own_s = np.array([kind.work_s(lengths, prompts) for kind in kinds])  # (kinds, n)
    price = np.array([kind.price for kind in kinds])
    rest = np.concatenate((np.cumsum((price[:, None] * own_s).min(0)[::-1])[::-1], [0.0]))
    load, tokens, cost = np.zeros((1, slots)), np.zeros((1, slots)), np.zeros(1)
    kind_of, place = np.full((1, slots), -1), np.zeros((1, 0), int)
    for i in range(n):
        parts = []
        for g in range(min(i + 1, slots)):
            for q, kind in enumerate(kinds):
                opens = (kind_of[:, g] < 0) & ((kind_of >= 0).sum(1) == g) & ((kind_of == q).sum(1) < kind.max_actors)
                add_s = own_s[q, i] + np.where(opens, kind.setup_s + kind.base_s * lengths[i], 0.0)
                fits = (opens | (kind_of[:, g] == q)) & (tokens[:, g] + held[i] <= kind.capacity)
                row = np.flatnonzero(fits & _open(load[:, g] + add_s, cost + price[q] * add_s + rest[i + 1], times, costs))
                parts.append((row, np.full(len(row), g), np.full(len(row), q), add_s[row]))
        row, g, q, add_s = (np.concatenate(column) for column in zip(*parts, strict=True))
        load, tokens, kind_of, cost = load[row], tokens[row], kind_of[row], cost[row] + price[q] * add_s
        at = np.arange(len(row))
        load[at, g] += add_s
        tokens[at, g] += held[i]
        kind_of[at, g] = q
        place = np.column_stack((place[row], g))
        keep = _distinct(load, tokens, kind_of, cost)
        keep = keep[_open(load[keep].max(1), cost[keep] + rest[i + 1], times, costs)]
        load, tokens, kind_of, cost, place = load[keep], tokens[keep], kind_of[keep], cost[keep], place[keep]
    found = []
    makespan = work.ends_s(load.T, kind_of.T) if len(load) else np.zeros(0)
    best = np.inf
    for s in np.lexsort((cost, makespan)):
        if cost[s] < best:
            best = cost[s]
            groups = [order[place[s] == g] for g in range(place[s].max() + 1)]
            found.append(Partition.from_groups(makespan[s], cost[s], groups, kind_of[s, : len(groups)].tolist()))
    return found


def best_fit(work: RolloutWorkload, known: Sequence[Partition]) -> list[Partition]:
    """Pack known lengths on one actor type without capacity limit: for each known makespan, best-fit decreasing.

    Each sequence, longest first, joins the fullest group that it fits in, and opens one only if it fits in none.

    Measured on 16 actors against `CostBound` (six draws of log-normal lengths): with 16, 32 and 128 sequences the
    worst point of the frontier goes from 8.2, 6.5 and 3.9 % above the bound to 4.9, 2.6 and 1.1 %.
    """
    kind = work.kinds[0]
    order = np.argsort(-work.lengths[:, 0], kind="stable")
    lengths = work.lengths[order, 0]
    own_s = kind.work_s(lengths, work.prompts[order]).tolist()
    alone_s = (kind.setup_s + kind.base_s * lengths + np.array(own_s)).tolist()
    found = []
    for bound in sorted({point.time_s for point in known}):
        room = bound * (1 + MIN_GAIN)
        loads: list[float] = []  # ascending
        groups: list[int] = []  # group of each load
        place, total = [], 0.0
        for own, alone in zip(own_s, alone_s, strict=True):
            at = bisect_right(loads, room - own) - 1
            if at >= 0:
                load, group = loads.pop(at) + own, groups.pop(at)
                total += own
            elif len(loads) < kind.max_actors and alone <= room:
                load, group = alone, len(groups)
                total += alone
            else:
                break
            to = bisect_right(loads, load)
            loads.insert(to, load)
            groups.insert(to, group)
            place.append(group)
        else:
            placed = np.array(place)
            members = [order[placed == g] for g in range(len(groups))]
            found.append(Partition.from_groups(loads[-1], kind.price * total, members, (0,) * len(members)))
    return pareto(found)


def _open(time_s: np.ndarray, cost: np.ndarray, times: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return a mask of the states that no known point beats on both axes. Known costs descend with known times."""
    if not len(times):
        return np.ones(len(time_s), bool)
    slower = np.searchsorted(times, time_s * (1 + MIN_GAIN), side="right") - 1
    return (slower < 0) | (costs[slower] > cost * (1 + MIN_GAIN))


def _distinct(load: np.ndarray, tokens: np.ndarray, kind_of: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the rows to keep if, of states with equal groups in any order, only the cheapest stays."""
    if len(load) < 2:
        return np.arange(len(load))
    # One number per group. Exact equality is not needed: different states must only rarely collide.
    mark = load * 1.0 + 0.61803 * np.log1p(tokens) + 7.1 * (kind_of + 1)
    key = np.round(np.stack([mark.sum(1), np.square(mark).sum(1), np.sqrt(np.abs(mark)).sum(1)]), 9)
    by = np.lexsort((cost, key[2], key[1], key[0]))
    same = np.all(np.diff(key[:, by], axis=1) == 0, axis=0)
    return by[np.concatenate(([True], ~same))]
