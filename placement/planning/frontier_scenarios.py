"""The frontier for uncertain lengths: partitions are judged by the mean over scenarios of the slowest actor."""

from __future__ import annotations

import math

import numpy as np

from placement.planning.blocks import Blocks, Ranges
from placement.planning.multi_wave import wave_partitions
from placement.planning.partition import Partition, pareto
from placement.planning.plan import Plan
from placement.planning.scenario_search import ScenarioSearch
from placement.planning.workload import RolloutWorkload

# The suffix _FEW marks the value for at most FEW sequences.
SMALL = 12  # up to this many sequences every contiguous partition is examined, within MIXED
MIXED = 1_000_000  # limit on contiguous partitions × scenarios, over all mixes of actor types
FEW = 64  # up to this many sequences a cut may be anywhere
PER_ACTOR, MIN_PER_ACTOR = 10, 6  # blocks per actor at the shortest time bound of a level
SHARES = 20  # actors up to which each gets PER_ACTOR blocks: with more, scenarios are worth more than finer cuts
SPREADS, SPREADS_FEW = (2.0,), (0.0, 2.0)  # standard deviations in the sort key
STEPS, STEPS_FEW = 2, 8  # rounds of local search
STEPPED = 12  # partitions that one round of local search starts from, over all levels (with FEW sequences: all)
RATIO = 2.0  # longest over shortest time bound of a level
BOUNDS, BOUNDS_FEW = 6, 16  # time bounds per level
LONGEST = 1.3  # longest range examined, as a multiple of the level's longest bound
CELLS = 400_000  # ranges × scenarios of a level: beyond it the search uses fewer scenarios
LEVELS = 2  # up to this many levels each has CELLS: more levels share the same total
MIN_SCENARIOS = 8
MIN_SPEEDUP = 0.005  # relative gap in estimated time between partitions that are timed over all scenarios


def scenario_partitions(work: RolloutWorkload, thin: float) -> list[Plan]:
    """Find plans for joint scenarios. Their figures are means over all scenarios, and none dominates another.

    Groups are contiguous in a sorted order (`sort_orders`). Up to SMALL sequences all contiguous partitions are
    examined, with several pools only within MIXED. Otherwise `search` looks for good ones. A group must fit its cache
    in every scenario. Where there are too few actors for that, the plans are those of `wave_partitions`.
    """
    found: list[Partition] = []
    min_scenarios = work.lengths.shape[1]
    room = sum(kind.capacity * kind.max_actors for kind in work.kinds)
    for order, key in sort_orders(work) if work.held_tokens().sum(0).max() <= room else []:
        if len(order) <= SMALL and (len(work.kinds) == 1 or mixture_count(work) <= MIXED):
            found += all_contiguous_partitions(work, order)
        else:
            points, scenarios = search(work, order, key, thin)
            found += points
            min_scenarios = min(min_scenarios, scenarios)
    found = found or wave_partitions(work)
    return [point.plan(min_scenarios) for point in pareto(found, thin)]


def sort_orders(work: RolloutWorkload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the orders in which groups are contiguous, each with its descending key (n,) in tokens.

    A key is mean + spread · standard deviation: a sequence of uncertain length belongs with the long ones. Sorting by
    mean + 2 standard deviations instead of the mean costs 4.6 and 9.8 % less at equal time. This was measured on fresh
    scenarios of 512 and 2,048 log-normal responses, with relative spreads of 0.1, 0.35 and 0.8 mixed by prompt. With
    equal relative spreads it costs 0.5 % more.
    """
    mean, spread = work.lengths.mean(1), work.lengths.std(1)
    keys = [mean + times * spread for times in (SPREADS_FEW if len(mean) <= FEW else SPREADS)]
    if len(mean) <= SMALL:  # examining every cut of an order takes a millisecond, so more orders are tried
        keys += [mean + spread, np.median(work.lengths, axis=1), work.lengths.max(1)]
    orders: list[tuple[np.ndarray, np.ndarray]] = []
    for key in keys:
        order = np.argsort(-key, kind="stable")
        if not any(np.array_equal(order, other) for other, _ in orders):
            orders.append((order, key[order]))
    return orders


def all_contiguous_partitions(work: RolloutWorkload, order: np.ndarray) -> list[Partition]:
    """Examine all contiguous partitions of few sequences, on every mix of actor types."""
    n, kinds = len(order), work.kinds
    blocks = Blocks.from_workload(work, order, np.arange(n + 1))
    ranges = Ranges(blocks, np.full(n, n), kinds)
    starts = all_group_starts(n, len(kinds))
    fits = np.ones(len(starts), bool)
    for q, kind in enumerate(kinds):
        fits &= (starts == q + 1).sum(1) <= kind.max_actors
    starts = starts[fits]
    last, cost = np.zeros((len(starts), work.lengths.shape[1])), np.zeros(len(starts))
    end = np.full((len(starts), n + 1), n)  # where the group that starts at i ends
    for i in range(n - 1, 0, -1):
        end[:, i] = np.where(starts[:, i] > 0, i, end[:, i + 1])
    for i in range(n):
        for q in range(len(kinds)):
            rows = np.flatnonzero(starts[:, i] == q + 1)
            at = ranges.first[i] + end[rows, i + 1] - i - 1
            last[rows] = np.maximum(last[rows], ranges.seconds[q][at])
            cost[rows] += np.where(ranges.fits[q][at], ranges.cost[q][at], np.inf)
    time_s = last.mean(1)
    found, best = [], math.inf
    for m in np.lexsort((cost, time_s)):
        if cost[m] < best:
            best = float(cost[m])
            groups = np.flatnonzero(starts[m])
            pools = tuple(int(q) - 1 for q in starts[m, groups])
            found.append(Partition(float(time_s[m]), best, order, (*groups.tolist(), n), pools))
    return found


def mixture_count(work: RolloutWorkload) -> int:
    """Count contiguous partitions on all mixes of actor types, times scenarios."""
    (n, count), kinds = work.lengths.shape, len(work.kinds)
    return kinds * (kinds + 1) ** (n - 1) * count


def all_group_starts(n: int, kinds: int) -> np.ndarray:
    """Return all rows (kinds · (kinds + 1)^(n - 1), n): 0 where a group continues, 1 + the actor type where one starts."""
    later = np.arange((kinds + 1) ** (n - 1))[:, None] // (kinds + 1) ** np.arange(n - 1) % (kinds + 1)
    first = np.repeat(np.arange(1, kinds + 1), len(later))
    return np.column_stack((first, np.tile(later, (kinds, 1))))


def search(work: RolloutWorkload, order: np.ndarray, key: np.ndarray, thin: float) -> tuple[list[Partition], int]:
    """Search contiguous partitions of `order` near the frontier.

    Returns the partitions and the number of scenarios that the search looked at.

    The search goes level by level from long time bounds to short ones. Neighbouring sequences are joined to blocks
    small against one actor's work in that time. All ranges of blocks that one actor could take are timed in every
    scenario. Then `ScenarioSearch` looks for partitions into ranges: shortest paths against deadlines D_s = max(bound,
    the longest response of s alone), which nothing beats, followed by local search. Where ranges × scenarios exceed
    CELLS, or a level's share of LEVELS · CELLS, the search uses every k-th scenario. The figures of what it finds cover
    all scenarios.

    Not exact. On 400 random cases of 2 to 10 sequences and 4 to 64 scenarios, every point of the best contiguous
    partitions is met within 0.2 % on both axes. On 4,096 sequences, against a search with finer blocks, more bounds and
    a hundred times the steps, plans cost 0.8 % more at equal time in the mean, and the fastest is 0.6 to 1.5 % slower.
    Where two hundred actors pay, blocks and scenarios are fewer: against ten blocks an actor and CELLS for every level,
    plans cost 0.2 % more at equal time and the fastest is between 4 % faster and 4 % slower (two length sets).
    """
    n, count = work.lengths.shape
    alone_s = longest_alone_s(work)
    levels = _levels(work, order, float(alone_s.min()))
    fine = Blocks.from_workload(work, order, _edges(work, order, key, levels[-1]))
    points: list[Partition] = []
    min_used, exact = count, n <= FEW
    room = CELLS * min(1.0, LEVELS / len(levels))
    for low in levels:
        blocks = fine.merged(_edges(work, order, key, low))
        stop = blocks.range_stops(LONGEST * float(np.maximum(low * RATIO, alone_s).mean()), work.kinds)
        cells = int((stop - np.arange(len(stop))).sum()) * count * len(work.kinds)
        used = count if cells <= room else min(count, max(MIN_SCENARIOS, int(count * room / cells)))
        columns = np.linspace(0, count, used, endpoint=False).astype(int)
        min_used = min(min_used, used)
        exact = exact and used == count
        ranges = Ranges(blocks if used == count else blocks.columns(columns), stop, work.kinds, np.float64 if exact else np.float32)
        bounds = np.geomspace(low * RATIO, low, BOUNDS_FEW if n <= FEW else BOUNDS)
        found = ScenarioSearch(ranges)
        found.by_deadlines(np.maximum(bounds[:, None], alone_s[columns]))
        if n <= FEW:
            found.by_neighbours(STEPS_FEW, len(found.found))
        else:
            found.by_neighbours(STEPS, -(-STEPPED // len(levels)))
        if not found.found:
            break  # shorter bounds only need more actors
        points += [Partition(t, c, order, tuple(blocks.edges[list(path)].tolist()), pools) for t, c, (path, pools) in found.best()]
    held_tokens = None if fine.held is None else fine.held.sum(0).max()
    to_time = [
        Partition(0.0, 0.0, order, (0, n), (q,)) for q, kind in enumerate(work.kinds) if held_tokens is None or held_tokens <= kind.capacity
    ]
    if not exact:
        # Figures over fewer scenarios, or in single precision, only select the partitions to time exactly.
        to_time, points = [*to_time, *pareto(points, thin if min_used == count else max(thin, MIN_SPEEDUP))], []
    return [*points, *fine.retime(to_time, work)], min_used


def longest_alone_s(work: RolloutWorkload) -> np.ndarray:
    """Return (S,) seconds of the longest response alone on its fastest actor type: no plan is faster."""
    if all(kind.per_ctx_s == 0 and kind.prefill_s == 0 for kind in work.kinds):  # then the longest response is also the slowest
        longest = work.lengths.max(0)
        return np.minimum.reduce([kind.setup_s + (kind.base_s + kind.per_seq_s) * longest for kind in work.kinds])
    alone = [kind.setup_s + kind.base_s * work.lengths + work.work_s(kind) for kind in work.kinds]
    return np.minimum.reduce(alone).max(0)


def _levels(work: RolloutWorkload, order: np.ndarray, shortest: float) -> list[float]:
    """Return the shortest time bound of each level, from everything on one actor down to the longest response alone."""
    whole = Ranges(Blocks.from_workload(work, order, np.array([0, len(order)])), np.array([1]), work.kinds)
    high = min(float(seconds.mean()) for seconds in whole.seconds)
    levels = [max(high / RATIO, shortest)]
    while levels[-1] > shortest:
        levels.append(max(levels[-1] / RATIO, shortest))
    return levels


def _edges(work: RolloutWorkload, order: np.ndarray, key: np.ndarray, time_s: float) -> np.ndarray:
    """Return where blocks may start for actors that work `time_s`. Cuts between similar neighbours are left out."""
    n = len(order)
    if n <= FEW:
        return np.arange(n + 1)
    mean = work.lengths.mean(1)[order]
    drop = -np.diff(key, prepend=key[0])
    step = np.zeros(n)
    for kind in work.kinds:
        step = np.maximum(step, kind.base_s * drop + kind.work_s(mean, work.prompts[order]))
        if math.isfinite(kind.capacity):
            step = np.maximum(step, (mean + work.prompts[order]) * (time_s / kind.capacity))
    share = np.cumsum(step) / time_s
    mark = np.floor(share * np.clip(PER_ACTOR * SHARES / share[-1], MIN_PER_ACTOR, PER_ACTOR))
    return np.concatenate(([0], np.flatnonzero(np.diff(mark) > 0) + 1, [n]))
