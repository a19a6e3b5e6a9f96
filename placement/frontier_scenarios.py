"""The frontier when lengths are not known: partitions judged by the mean over scenarios of the slowest actor."""

from __future__ import annotations

import math

import numpy as np

from placement.blocks import Blocks, Ranges
from placement.partition import Partition, pareto
from placement.plan import Plan
from placement.waves import in_waves
from placement.workload import Workload

SMALL = 12  # sequences up to which every contiguous partition is looked at
FEW = 64  # sequences up to which a cut may be anywhere
PER_ACTOR = 12  # blocks that one actor's share is cut into at the shortest time bound of a level
RATIO = 2.0  # longest to shortest time bound of a level
BOUNDS, BOUNDS_FEW = 5, 16  # time bounds of a level, and for few sequences
LONGEST = 1.3  # times a level's longest bound: how long a range may take to be looked at
RATES = (0.003, 0.02, 0.1, 0.5)  # seconds of lateness that one actor-second of the cheapest kind is worth
CELLS = 600_000  # ranges × scenarios of a level; beyond it the search looks at fewer scenarios
LEAST_SCENARIOS = 8
ROUNDS = 6  # of dearer actors, when a partition takes more than there are


def scenario_partitions(work: Workload, thin: float) -> list[Plan]:
    found: list[Partition] = []
    looked = work.lengths.shape[1]
    for order in sort_orders(work):
        if len(order) <= SMALL and len(work.kinds) == 1:
            found += every_cut(work, order)
        else:
            points, used = search(work, order)
            found += points
            looked = min(looked, used)
    found = found or in_waves(work)
    return [point.plan(looked) for point in pareto(found, thin)]


def sort_orders(work: Workload) -> list[np.ndarray]:
    """Orders in which groups are contiguous: by mean length, and by mean plus one standard deviation, because a sequence of
    uncertain length belongs with the long ones."""
    mean = work.lengths.mean(1)
    spread = work.lengths.std(1)
    orders = [np.argsort(-mean, kind="stable"), np.argsort(-(mean + spread), kind="stable")]
    return orders[:1] if np.array_equal(*orders) else orders


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


def search(work: Workload, order: np.ndarray) -> tuple[list[Partition], int]:
    """Contiguous partitions of `order` near the frontier, and how many scenarios the search for them looked at."""
    n, count = work.lengths.shape
    alone_s = tail_s(work)
    levels = _levels(work, order, float(alone_s.min()))
    fine = Blocks.of(work, order, _edges(work, order, levels[-1]))
    found: dict[Choice, tuple[float, float]] = {}
    looked = count
    for low in levels:
        blocks = fine.coarser(_edges(work, order, low))
        stop = blocks.reach(LONGEST * float(np.maximum(low * RATIO, alone_s).mean()), work.kinds)
        cells = int((stop - np.arange(len(stop))).sum()) * count * len(work.kinds)
        used = count if cells <= CELLS else min(count, max(LEAST_SCENARIOS, int(count * CELLS / cells)))
        columns = np.linspace(0, count, used, endpoint=False).astype(int)
        looked = min(looked, used)
        ranges = Ranges(blocks if used == count else blocks.columns(columns), stop, work.kinds)
        bounds = np.geomspace(low * RATIO, low, BOUNDS_FEW if n <= FEW else BOUNDS)
        new = _level(ranges, alone_s[columns], bounds)
        if not new:
            break  # shorter bounds only take more actors
        found.update(new)
    points = [Partition(time_s, cost, order, *choice) for choice, (time_s, cost) in found.items()]
    held = None if fine.held is None else fine.held.sum(0).max()
    whole = [Partition(0.0, 0.0, order, (0, n), (q,)) for q, kind in enumerate(work.kinds) if held is None or held <= kind.capacity]
    if looked < count:
        whole, points = [*whole, *pareto(points)], []
    return [*points, *fine.judge(whole, work)], looked


def tail_s(work: Workload) -> np.ndarray:
    """(S,) seconds of the longest response alone on the kind that is fastest with it: nobody is faster."""
    alone = [
        kind.over_s + kind.base_s * work.lengths + (work.work_s(kind) if kind.per_ctx_s else kind.per_seq_s * work.lengths)
        for kind in work.kinds
    ]
    return np.minimum.reduce(alone).max(0)


def _levels(work: Workload, order: np.ndarray, shortest: float) -> list[float]:
    """Shortest time bound of each level, from everything on one actor down to the longest response alone."""
    whole = Ranges(Blocks.of(work, order, np.array([0, len(order)])), np.array([1]), work.kinds)
    high = min(float(seconds.mean()) for seconds in whole.seconds)
    levels = [high / RATIO]
    while levels[-1] > shortest:
        levels.append(levels[-1] / RATIO)
    return levels


def _edges(work: Workload, order: np.ndarray, time_s: float) -> np.ndarray:
    """Where blocks may start, for actors that work `time_s`: cuts between neighbours that differ little are left out."""
    n = len(order)
    if n <= FEW:
        return np.arange(n + 1)
    mean = work.lengths.mean(1)[order]
    drop = np.abs(np.diff(mean, prepend=mean[0]))
    step = np.zeros(n)
    for kind in work.kinds:
        step = np.maximum(step, kind.base_s * drop + kind.work_s(mean, work.prompts[order]))
        if math.isfinite(kind.capacity):
            step = np.maximum(step, (mean + work.prompts[order]) * (time_s / kind.capacity))
    mark = np.floor(np.cumsum(step) * (PER_ACTOR / time_s))
    return np.concatenate(([0], np.flatnonzero(np.diff(mark) > 0) + 1, [n]))


Choice = tuple[tuple[int, ...], tuple[int, ...]]  # cuts (positions in the order), kind of each group


def _level(ranges: Ranges, alone_s: np.ndarray, bounds: np.ndarray) -> dict[Choice, tuple[float, float]]:
    """Partitions of one level with their (time_s, cost), over the scenarios of `ranges`.

    The mean over scenarios of the slowest actor is no sum over actors, so a shortest path cannot minimise it. But for any
    deadlines D_s it is at most mean D_s + Σ over actors of mean (t_s - D_s)⁺, and close to it when rarely two actors are late
    at once. That is a sum: for D_s = max(bound, the longest response of s alone), which no plan beats, and several rates
    between lateness and cost, a shortest path over the ranges minimises it. Every partition found is then timed as it is.
    """
    kinds = ranges.kinds
    dearest = max(kind.price for kind in kinds)
    late, fare = [], []
    for q, kind in enumerate(kinds):
        fare.append(np.where(ranges.fits[q], ranges.cost[q], np.inf))
        late.append(np.stack([_mean_late(ranges.seconds[q], np.maximum(bound, alone_s)) for bound in bounds]))
    limits = np.array([kind.max_actors for kind in kinds])
    rate = np.tile(np.asarray(RATES) / dearest, len(bounds))
    bound_of = np.repeat(np.arange(len(bounds)), len(RATES))
    extra = np.zeros((len(rate), len(kinds)))
    found: dict[Choice, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        value = np.full((len(rate), len(ranges.cost[0])), np.inf)
        kind_of = np.zeros(value.shape, int)
        for q in range(len(kinds)):
            own = late[q][bound_of] + rate[:, None] * fare[q] + extra[:, q: q + 1]
            if len(kinds) == 1:
                value = own
            else:
                better = own < value
                kind_of[better] = q
                value = np.where(better, own, value)
        again = []
        for row, path in enumerate(_shortest(value, ranges)):
            if path is None:
                continue
            at = [ranges.index(i, j) for i, j in zip(path, path[1:], strict=False)]
            pools = tuple(int(kind_of[row, r]) for r in at)
            over = np.bincount(pools, minlength=len(kinds)) > limits
            if over.any():
                mean_s = value[row, at].mean()
                extra[row, over] = np.maximum(2 * extra[row, over], 0.02 * bounds[bound_of[row]] + 0 * mean_s)
                again.append(row)
                continue
            choice = tuple(int(ranges.blocks.edges[i]) for i in path), pools
            if choice not in found:
                slowest = np.maximum.reduce([ranges.seconds[q][r] for q, r in zip(pools, at, strict=True)])
                found[choice] = float(slowest.mean()), float(sum(ranges.cost[q][r] for q, r in zip(pools, at, strict=True)))
        if not again:
            break
        rate, bound_of, extra = rate[again], bound_of[again], extra[again]
    return found


def _mean_late(seconds: np.ndarray, deadlines: np.ndarray) -> np.ndarray:
    late = seconds - deadlines
    np.maximum(late, 0.0, out=late)
    return late.mean(1)


def _shortest(value: np.ndarray, ranges: Ranges) -> list[list[int] | None]:
    """For each row of value (C, R) the blocks where the ranges of the cheapest way from the first to the end start."""
    rows, count = len(value), len(ranges.stop)
    best = np.zeros((rows, count + 1))
    to = np.zeros((rows, count), int)
    every = np.arange(rows)
    for i in range(count - 1, -1, -1):
        ways = value[:, ranges.first[i]: ranges.first[i + 1]] + best[:, i + 1: ranges.stop[i] + 1]
        j = ways.argmin(1)
        to[:, i] = i + 1 + j
        best[:, i] = ways[every, j]
    paths: list[list[int] | None] = []
    for row in range(rows):
        if not math.isfinite(best[row, 0]):
            paths.append(None)
            continue
        path, steps = [0], to[row].tolist()
        while path[-1] < count:
            path.append(steps[path[-1]])
        paths.append(path)
    return paths
