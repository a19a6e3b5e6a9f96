"""The frontier when lengths are not known: partitions judged by the mean over scenarios of the slowest actor."""

from __future__ import annotations

import math

import numpy as np

from placement.blocks import Blocks, Ranges
from placement.partition import Partition, pareto
from placement.plan import Plan
from placement.scenario_search import ScenarioSearch
from placement.waves import in_waves
from placement.workload import Workload

SMALL = 12  # sequences up to which every contiguous partition is looked at, unless that makes too many of several kinds
MIXED = 1_000_000  # contiguous partitions × scenarios, on all mixes of kinds, up to which they are (9 sequences, two kinds and 64)
FEW = 64  # sequences up to which a cut may be anywhere
PER_ACTOR, PER_ACTOR_LEAST = 10, 6  # blocks that one actor's share is cut into at the shortest time bound of a level
SHARES = 20  # actors' shares up to which they are cut into PER_ACTOR blocks: more of them leave scenarios for finer cuts
SPREADS, SPREADS_FEW = (2.0,), (0.0, 2.0)  # standard deviations in the sort key
STEPS, STEPS_FEW = 2, 8  # rounds of steps to neighbours
STEPPED = 12  # partitions that are stepped from in one round, over all levels (with few sequences all)
RATIO = 2.0  # longest to shortest time bound of a level
BOUNDS, BOUNDS_FEW = 6, 16  # time bounds of a level, and for few sequences
LONGEST = 1.3  # times a level's longest bound: how long a range may take to be looked at
CELLS = 400_000  # ranges × scenarios of a level; beyond it the search looks at fewer scenarios
LEVELS = 2  # levels up to which each has CELLS; more of them share what these have
LEAST_SCENARIOS = 8
JUDGED = 0.005  # how much faster a partition must look than the one before, to be timed over all scenarios after that


def scenario_partitions(work: Workload, thin: float) -> list[Plan]:
    """Plans for joint scenarios, judged by their means over all of them; not dominated by any other found.

    Groups are contiguous in a sorted order (sort_orders). Up to SMALL sequences all contiguous partitions are looked at, on
    several pools as long as they are no more than MIXED; otherwise `search` looks for good ones, on any pools. Capacity: a
    group must fit in every scenario; where there are too few actors for that, the plans of in_waves.
    """
    found: list[Partition] = []
    looked = work.lengths.shape[1]
    room = sum(kind.capacity * kind.max_actors for kind in work.kinds)
    for order, key in sort_orders(work) if work.held_tokens().sum(0).max() <= room else []:
        if len(order) <= SMALL and (len(work.kinds) == 1 or mixtures(work) <= MIXED):
            found += every_cut(work, order)
        else:
            points, used = search(work, order, key, thin)
            found += points
            looked = min(looked, used)
    found = found or in_waves(work)
    return [point.plan(looked) for point in pareto(found, thin)]


def sort_orders(work: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """Orders in which groups are contiguous, each with its falling key (n,) in tokens: mean + spread · standard deviation.

    A sequence of uncertain length belongs with the long ones. Measured on fresh scenarios (512 and 2,048 responses, log-normal,
    relative spreads of 0.1, 0.35 and 0.8 mixed by prompt), sorting by mean + 2 standard deviations instead of the mean costs
    4.6 and 9.8 % less at equal time; with equal relative spreads it costs 0.5 % more.
    """
    mean, spread = work.lengths.mean(1), work.lengths.std(1)
    keys = [mean + times * spread for times in (SPREADS_FEW if len(mean) <= FEW else SPREADS)]
    if len(mean) <= SMALL:  # every cut of an order takes a millisecond, so more of them are tried
        keys += [mean + spread, np.median(work.lengths, axis=1), work.lengths.max(1)]
    orders: list[tuple[np.ndarray, np.ndarray]] = []
    for key in keys:
        order = np.argsort(-key, kind="stable")
        if not any(np.array_equal(order, other) for other, _ in orders):
            orders.append((order, key[order]))
    return orders


def every_cut(work: Workload, order: np.ndarray) -> list[Partition]:
    """All contiguous partitions of few sequences, on every mix of kinds: for each, the slowest actor of every scenario."""
    n, kinds = len(order), work.kinds
    blocks = Blocks.of(work, order, np.arange(n + 1))
    ranges = Ranges(blocks, np.full(n, n), kinds)
    starts = every_start(n, len(kinds))
    fits = np.ones(len(starts), bool)
    for q, kind in enumerate(kinds):
        fits &= (starts == q + 1).sum(1) <= kind.max_actors
    starts = starts[fits]
    last, cost = np.zeros((len(starts), work.lengths.shape[1])), np.zeros(len(starts))
    end = np.full((len(starts), n + 1), n)  # of a group that starts at i: where the next one does
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


def mixtures(work: Workload) -> int:
    """Contiguous partitions on all mixes of kinds, times scenarios."""
    (n, count), kinds = work.lengths.shape, len(work.kinds)
    return kinds * (kinds + 1) ** (n - 1) * count


def every_start(n: int, kinds: int) -> np.ndarray:
    """(kinds · (kinds + 1)^(n - 1), n): at each position 0 where its group goes on, or 1 + the kind of the group that starts."""
    later = np.arange((kinds + 1) ** (n - 1))[:, None] // (kinds + 1) ** np.arange(n - 1) % (kinds + 1)
    first = np.repeat(np.arange(1, kinds + 1), len(later))
    return np.column_stack((first, np.tile(later, (kinds, 1))))


def search(work: Workload, order: np.ndarray, key: np.ndarray, thin: float) -> tuple[list[Partition], int]:
    """Contiguous partitions of `order` near the frontier, and how many scenarios the search for them looked at.

    Level by level, from long time bounds to short ones, neighbouring sequences are joined to blocks small against what one
    actor does in that time, all ranges of blocks that an actor could take are timed in every scenario, and partitions into
    ranges are searched (ScenarioSearch): shortest paths against deadlines D_s = max(bound, the longest response of s alone),
    which nothing beats, then steps to neighbours. Where ranges × scenarios exceed CELLS, or a level's share of
    LEVELS · CELLS, the search takes every so many-th scenario; the figures of what it finds are over all.

    Not exact. Measured on 400 random cases of 2 to 10 sequences, 4 to 64 scenarios: every point of the best contiguous
    partitions is met within 0.2 % on both axes. On 4,096 sequences, against a search with finer blocks, more bounds and
    a hundred times the steps: 0.8 % dearer at equal time in the mean, the fastest plan 0.6 to 1.5 % slower.
    Where two hundred actors pay, blocks and scenarios are fewer: against ten blocks an actor and CELLS for every level, plans are
    0.2 % dearer at equal time and the fastest is 4 % faster to 4 % slower (two length sets).
    """
    n, count = work.lengths.shape
    alone_s = tail_s(work)
    levels = _levels(work, order, float(alone_s.min()))
    fine = Blocks.of(work, order, _edges(work, order, key, levels[-1]))
    points: list[Partition] = []
    looked, exact = count, n <= FEW
    room = CELLS * min(1.0, LEVELS / len(levels))
    for low in levels:
        blocks = fine.coarser(_edges(work, order, key, low))
        stop = blocks.reach(LONGEST * float(np.maximum(low * RATIO, alone_s).mean()), work.kinds)
        cells = int((stop - np.arange(len(stop))).sum()) * count * len(work.kinds)
        used = count if cells <= room else min(count, max(LEAST_SCENARIOS, int(count * room / cells)))
        columns = np.linspace(0, count, used, endpoint=False).astype(int)
        looked = min(looked, used)
        exact = exact and used == count
        ranges = Ranges(
            blocks if used == count else blocks.columns(columns), stop, work.kinds, np.float64 if exact else np.float32,
        )
        bounds = np.geomspace(low * RATIO, low, BOUNDS_FEW if n <= FEW else BOUNDS)
        found = ScenarioSearch(ranges)
        found.by_deadlines(np.maximum(bounds[:, None], alone_s[columns]))
        if n <= FEW:
            found.by_neighbours(STEPS_FEW, len(found.found))
        else:
            found.by_neighbours(STEPS, -(-STEPPED // len(levels)))
        if not found.found:
            break  # shorter bounds only take more actors
        points += [Partition(t, c, order, tuple(blocks.edges[list(path)].tolist()), pools) for t, c, (path, pools) in found.best()]
    held = None if fine.held is None else fine.held.sum(0).max()
    whole = [Partition(0.0, 0.0, order, (0, n), (q,)) for q, kind in enumerate(work.kinds) if held is None or held <= kind.capacity]
    if not exact:
        # figures over fewer scenarios, or in single precision, only say which partitions are worth timing as they are
        whole, points = [*whole, *pareto(points, thin if looked == count else max(thin, JUDGED))], []
    return [*points, *fine.judge(whole, work)], looked


def tail_s(work: Workload) -> np.ndarray:
    """(S,) seconds of the longest response alone on the kind that is fastest with it: nobody is faster."""
    if all(kind.per_ctx_s == 0 and kind.prefill_s == 0 for kind in work.kinds):  # then the longest response is the longest on every kind
        longest = work.lengths.max(0)
        return np.minimum.reduce([kind.over_s + (kind.base_s + kind.per_seq_s) * longest for kind in work.kinds])
    alone = [kind.over_s + kind.base_s * work.lengths + work.work_s(kind) for kind in work.kinds]
    return np.minimum.reduce(alone).max(0)


def _levels(work: Workload, order: np.ndarray, shortest: float) -> list[float]:
    """Shortest time bound of each level, from everything on one actor down to the longest response alone."""
    whole = Ranges(Blocks.of(work, order, np.array([0, len(order)])), np.array([1]), work.kinds)
    high = min(float(seconds.mean()) for seconds in whole.seconds)
    levels = [max(high / RATIO, shortest)]
    while levels[-1] > shortest:
        levels.append(max(levels[-1] / RATIO, shortest))
    return levels


def _edges(work: Workload, order: np.ndarray, key: np.ndarray, time_s: float) -> np.ndarray:
    """Where blocks may start, for actors that work `time_s`: cuts between neighbours that differ little are left out."""
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
    mark = np.floor(share * np.clip(PER_ACTOR * SHARES / share[-1], PER_ACTOR_LEAST, PER_ACTOR))
    return np.concatenate(([0], np.flatnonzero(np.diff(mark) > 0) + 1, [n]))
