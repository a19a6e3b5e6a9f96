"""The frontier for uncertain lengths: two families of assignments, judged by the mean over scenarios of the slowest actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from placement.planning.frontier_pools import with_spare
from placement.planning.greedy_fill import Ordered, sweep
from placement.planning.multi_wave import wave_partitions
from placement.planning.partition import Partition, pareto
from placement.planning.plan import Plan
from placement.planning.workload import RolloutWorkload

SMALL = 11  # up to this many sequences every contiguous partition on one pool is examined, in each order of `SPREADS_FEW`
SPREADS_FEW = (0.0, 1.0, 2.0)
SPREAD = 2.0  # standard deviations in the sort key: a sequence of uncertain length belongs with the long ones
RATIOS = (1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0, 16.0, 32.0)  # largest over smallest share of the sequences that an actor gets
COUNT_STEP = 1.15  # ratio of the numbers of actors for which shares are tried, beyond the first few
BOUND_STEP = 0.03  # relative distance of the time bounds up to which actors are filled
CELLS = 120_000  # groups × scenarios that all candidates are judged by. The best of them are judged by all scenarios
LEAST_SCENARIOS = 12
LEAST_SPLIT = 16  # scenarios from which one half orders sequences and the other judges plans
DOUBT = 0.03  # candidates are judged if no other one seems better by so much in both time and cost


def scenario_partitions(work: RolloutWorkload, thin: float) -> list[Plan]:
    """Find plans for joint scenarios. Their figures are means over all scenarios, and none dominates another.

    Groups are contiguous in the descending order of mean + `SPREAD` · standard deviation of log length. Two families of
    cuts are tried, for each number of actors. One gives actors shares of the sequences that grow geometrically, equal ones
    among them. Equal shares are what a random split has if the forecast knows nothing. The other fills actors from the
    longest sequence down to a time bound, which is exact for known lengths, and the best if responses are of two kinds.

    On fresh scenarios of six kinds of lengths (64 to 2,048 responses, 4 to 64 actors, three speeds), the plans take 0.5 %
    less time at equal cost in the mean than those of shortest paths and local search over all contiguous partitions. At the
    median cost of the worst kind they take 2.4 % more.

    Up to `SMALL` sequences on one pool, all contiguous partitions are examined.

    A group must fit its cache in every scenario. Where there are too few actors for that, the plans are those of `wave_partitions`.
    """
    (n, count), found, used = work.lengths.shape, list[Partition](), work.lengths.shape[1]
    for spread in SPREADS_FEW if n <= SMALL else (SPREAD,):
        # What a sequence's own draws say of it by chance must not choose its place and judge that place too.
        known = np.arange(0, count, 2) if n > SMALL and count >= LEAST_SPLIT else np.arange(count)
        fresh = np.setdiff1d(np.arange(count), known) if len(known) < count else known
        ordered = Ordered.of_scenarios(work, spread, known)
        if len(work.kinds) == 1:
            filled = sweep(ordered, work.kinds[0], BOUND_STEP, BOUND_STEP / 4)
        else:
            filled = with_spare(ordered, work.kinds, BOUND_STEP if n > SMALL else 0.0)
        tried = [*(candidates(ordered, work, q) for q in range(len(work.kinds))), *map(cut_set, filled)]
        cuts = CutSet.of(tried)
        used = min(len(fresh), max(LEAST_SCENARIOS, CELLS // len(cuts.first)))
        best = judge(work, ordered.order, cuts, fresh[evenly(len(fresh), used)])
        if used < count and best:
            best = judge(work, ordered.order, CutSet.of(list(map(cut_set, pareto(best, thin)))), evenly(count, count))
        found += best
    return [point.plan(used) for point in pareto(found or wave_partitions(work), thin)]


def evenly(count: int, most: int) -> np.ndarray:
    """Return at most so many of `count` columns, evenly spread."""
    return np.linspace(0, count, min(count, most), endpoint=False).astype(int)


@dataclass(frozen=True)
class CutSet:
    """Contiguous partitions of one order, one after the other. first, last, pools (G,): of each group. sizes (P,): groups of each."""

    first: np.ndarray
    last: np.ndarray
    pools: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[CutSet]) -> CutSet:
        """Join some sets."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("first", "last", "pools", "sizes")))

    @cached_property
    def begin(self) -> np.ndarray:
        """(P,) where the groups of each partition begin."""
        return np.asarray(np.cumsum(self.sizes) - self.sizes)


def cut_set(point: Partition) -> CutSet:
    cuts = np.array(point.cuts)
    return CutSet(cuts[:-1], cuts[1:], np.array(point.pools), np.array([len(cuts) - 1]))


def candidates(ordered: Ordered, work: RolloutWorkload, pool: int) -> CutSet:
    """Return the partitions on one pool that are worth judging."""
    n, most = len(ordered.order), work.kinds[pool].max_actors
    return all_cuts(n, most, pool) if n <= SMALL else promising(share_cuts(n, min(most, n), pool), ordered, work)


@lru_cache(maxsize=16)
def all_cuts(n: int, most: int, pool: int) -> CutSet:
    """Return all contiguous partitions of n sequences into at most `most` groups."""
    starts = np.arange(2 ** (n - 1))[:, None] >> np.arange(n - 1) & 1  # whether a group starts at the second, third, … sequence
    each = [np.concatenate(([0], np.flatnonzero(row) + 1, [n])) for row in starts if row.sum() < most]
    return CutSet.of([CutSet(cuts[:-1], cuts[1:], np.full(len(cuts) - 1, pool), np.array([len(cuts) - 1])) for cuts in each])


@lru_cache(maxsize=16)  # the same in every step
def share_cuts(n: int, most: int, pool: int) -> CutSet:
    """Cut n sequences into shares that grow geometrically by one of `RATIOS` overall, for numbers of actors up to `most`."""
    found, m = list[CutSet](), 1
    while m <= most:
        for ratio in RATIOS if m > 1 else RATIOS[:1]:
            share = np.geomspace(1.0, ratio, m).cumsum()
            cuts = np.unique(np.concatenate(([0], (share * (n / share[-1])).round().astype(int))))
            found.append(CutSet(cuts[:-1], cuts[1:], np.full(len(cuts) - 1, pool), np.array([len(cuts) - 1])))
        m = most if m < most < m * COUNT_STEP else max(m + 1, int(m * COUNT_STEP))
    return CutSet.of(found)


def promising(cuts: CutSet, ordered: Ordered, work: RolloutWorkload) -> CutSet:
    """Leave out partitions on one pool that seem worse than another by `DOUBT` in time and in cost, by the mean of each sequence."""
    kind = work.kinds[int(cuts.pools[0])]
    done = np.concatenate(([0.0], np.cumsum(ordered.work_s(kind))))
    seconds = kind.setup_s + kind.base_s * ordered.longest[cuts.first] + done[cuts.last] - done[cuts.first]
    time_s, cost = np.maximum.reduceat(seconds, cuts.begin), np.add.reduceat(seconds, cuts.begin)
    by_time = np.argsort(time_s)
    least = np.minimum.accumulate(cost[by_time])
    faster = np.searchsorted(time_s[by_time], time_s * (1 - DOUBT), side="right") - 1
    keep = (faster < 0) | (cost * (1 - DOUBT) < least[faster])
    groups = keep.repeat(cuts.sizes)
    return CutSet(cuts.first[groups], cuts.last[groups], cuts.pools[groups], cuts.sizes[keep])


def judge(work: RolloutWorkload, order: np.ndarray, cuts: CutSet, columns: np.ndarray) -> list[Partition]:
    """Compute time and cost of all partitions over these scenarios, and return the best.

    Those that overflow a cache in one of the scenarios are left out. Some of the scenarios are enough to rank partitions, and so is
    single precision.
    """
    edges, at = np.unique(np.concatenate((cuts.first, cuts.last)), return_inverse=True)
    first, last = at[: len(cuts.first)], at[len(cuts.first) :]
    is_whole = len(columns) == work.lengths.shape[1]
    lengths, dtype = (work.lengths[order], np.float64) if is_whole else (work.lengths[np.ix_(order, columns)], np.float32)
    prompts, starts = work.prompts[order][:, None], edges[:-1]
    longest = range_maxima(np.maximum.reduceat(lengths, starts, axis=0).astype(dtype), first, last)
    seconds, fits = np.empty(longest.shape, dtype), np.ones(len(first), bool)
    tokens, before = prefix_sums(lengths, starts), prefix_sums(prompts, starts)
    read = prefix_sums(lengths * (prompts + lengths / 2), starts) if any(kind.per_ctx_s for kind in work.kinds) else 0.0
    held = tokens + before if any(kind.capacity < np.inf for kind in work.kinds) else None
    for q, kind in enumerate(work.kinds):
        mine = np.flatnonzero(cuts.pools == q) if len(work.kinds) > 1 else slice(None)
        done: np.ndarray = (kind.per_seq_s * tokens + kind.per_ctx_s * read + kind.prefill_s * before).astype(dtype)
        seconds[mine] = kind.base_s * longest[mine] + (done[last[mine]] - done[first[mine]]) + kind.setup_s
        if held is not None:
            fits[mine] = (held[last[mine]] - held[first[mine]]).max(1) <= kind.capacity
    price = np.array([kind.price for kind in work.kinds])[cuts.pools]
    if work.is_risky:
        ends = [work.ends_s(seconds[at : at + k], cuts.pools[at : at + k, None]) for at, k in zip(cuts.begin, cuts.sizes, strict=True)]
        time_s = np.array(ends).mean(1, dtype=float)
    else:
        time_s = np.maximum.reduceat(seconds, cuts.begin, axis=0).mean(1, dtype=float)
    cost = np.add.reduceat(price * seconds.mean(1, dtype=float), cuts.begin)
    cost[~np.logical_and.reduceat(fits, cuts.begin)] = np.inf
    found, least = list[Partition](), np.inf
    for p in np.lexsort((cost, time_s)):
        if cost[p] < least:
            least = cost[p]
            groups = slice(cuts.begin[p], cuts.begin[p] + cuts.sizes[p])
            place = (*cuts.first[groups].tolist(), len(order))
            found.append(Partition(float(time_s[p]), float(least), order, place, tuple(cuts.pools[groups].tolist())))
    return found


def range_maxima(values: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return (G, S) maxima of values (B, S) over the rows from first (G,) up to, but excluding, last (G,), with a sparse table."""
    level = np.frexp(last - first)[1] - 1  # of the widest power of two that fits
    found = np.empty((len(first), values.shape[1]), values.dtype)
    for k in range(level.max() + 1):
        mine = np.flatnonzero(level == k)
        found[mine] = np.maximum(values[first[mine]], values[last[mine] - (1 << k)])
        if k < level.max():
            values = np.maximum(values[: -(1 << k)], values[1 << k :])
    return found


def prefix_sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return (B + 1, S) sums of values (n, S) before each of B blocks of rows, which begin at `starts`, and before the end."""
    sums = np.zeros((len(starts) + 1, values.shape[1]))
    np.cumsum(np.add.reduceat(values, starts, axis=0), axis=0, out=sums[1:])
    return sums
