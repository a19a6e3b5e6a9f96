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

SMALL = 12  # sequences up to which every contiguous partition is looked at
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

    Groups are contiguous in a sorted order (sort_orders). Up to SMALL sequences on one pool all contiguous partitions are
    looked at; otherwise `search` looks for good ones, on any pools. Capacity: a group must fit in every scenario; where
    there are too few actors for that, the plans of in_waves.
    """
    found: list[Partition] = []
    looked = work.lengths.shape[1]
    room = sum(kind.capacity * kind.max_actors for kind in work.kinds)
    for order, key in sort_orders(work) if work.held_tokens().sum(0).max() <= room else []:
        if len(order) <= SMALL and len(work.kinds) == 1:
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
    """All contiguous partitions of few sequences on one kind of actor: for each, the slowest actor of every scenario."""
    n, kind = len(order), work.kinds[0]
    blocks = Blocks.of(work, order, np.arange(n + 1))
    ranges = Ranges(blocks, np.full(n, n), work.kinds)
    masks = np.arange(1 << (n - 1))  # bit i - 1: a group starts at position i
    last, cost, actors = np.zeros((len(masks), work.lengths.shape[1])), np.zeros(len(masks)), np.ones(len(masks), int)
    for i in range(1, n):
        actors += masks >> (i - 1) & 1
    fits = actors <= kind.max_actors
    for i in range(n):
        for j in range(i + 1, n + 1):
            inner = (1 << (j - 1)) - (1 << i)
            bounds = (1 << (i - 1) if i else 0) | (1 << (j - 1) if j < n else 0)
            rows = np.flatnonzero((masks & (inner | bounds)) == bounds)
            at = ranges.index(i, j)
            last[rows] = np.maximum(last[rows], ranges.seconds[0][at])
            cost[rows] += ranges.cost[0][at]
            if not ranges.fits[0][at]:
                fits[rows] = False
    time_s = last.mean(1)
    found, best = [], math.inf
    for m in np.lexsort((cost, time_s)):
        if fits[m] and cost[m] < best:
            best = float(cost[m])
            cuts = (0, *(i for i in range(1, n) if masks[m] >> (i - 1) & 1), n)
            found.append(Partition(float(time_s[m]), best, order, cuts, (0,) * (len(cuts) - 1)))
    return found


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
