"""The cost/speed frontier of a rollout: the partitions of sequences over actors that no other beats on both axes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from placement.frontier_pools import pool_partitions
from placement.frontier_scenarios import scenario_partitions
from placement.frontier_small import PACKED, SMALL, SMALL_OPEN, best_fit, every_partition
from placement.partition import Partition, pareto
from placement.plan import Plan, Pool
from placement.speed import Speed
from placement.waves import in_waves
from placement.workload import Kind, Workload

LEAST_STEP = 1e-9  # relative step of the time bound: rounding must not let a sweep stand still
GRID_STEP = 1e-3  # thinning from which all time bounds are filled at once
END_STEP = 1e-6  # how closely a thinned sweep finds the fastest plan


def frontier(
    lengths: np.ndarray, speed: Speed | None = None, *, max_actors: int | None = None, capacity: int | None = None,
    price: float = 1.0, pools: Sequence[Pool] | None = None, prompts: np.ndarray | float | None = None,
    transfer_s: float = 0.0, thin: float = 0.0,
) -> list[Plan]:
    """Plans that no other plan found beats on both time and cost, by time ascending and cost descending.

    lengths: (n,) known response tokens, or (n, S) joint scenarios, one column a draw; then time_s is the mean over columns
    of the maximum over actors, and cost the mean of the sum. prompts: tokens, (n,) or one number (0).
    speed, max_actors, capacity, price: the short form of one Pool. transfer_s: seconds every actor spends on weights or KV
    before it decodes, on top of its pool's start_s; both count in its time and its cost.
    thin: leave out plans that another one matches to this share on both axes (0.005: half a percent). The exact frontier of
    thousands of sequences has thousands of points; thinned it is found in less time.

    An actor takes over + base · L₁ + Σ (per_seq · L + per_ctx · (p·L + L²/2)) seconds for sequences L₁ ≥ L₂ ≥ … all admitted
    at once: the sum over decode steps of TailSieve's replica time with an affine step (see Speed.rollout_s).

    Exact for known lengths on one pool over groups that are contiguous in the sorted order: for a time bound T, filling
    actors from the longest down starts every group as late as possible, so no contiguous partition has fewer actors or a
    smaller sum of group maxima; T sweeps down over every makespan. Exact over all partitions, on any pools, for up to
    SMALL sequences (every_partition). Up to PACKED, on one pool whose capacity does not bind, leftover time is packed as well
    (best_fit). What contiguity gives away beyond that was measured against bounds.cost_bound, at the worst point of a
    frontier on 16 actors, five draws of log-normal lengths: 0.2 % of the cost with 512 sequences.
    Several pools: see frontier_pools. Scenarios: see frontier_scenarios.

    Capacity: a group must hold its prompts and full responses at once (with scenarios in every column). A second wave on
    the same actor would cost as much as on an actor of its own and end later, so waves are planned only when max_actors
    cannot hold everything at once (see waves); then nothing is claimed to be exact.

    Raises ValueError for lengths that are empty, not finite or not positive, no actors, a sequence that no actor can hold,
    pools that cannot work, and arguments that contradict each other.
    """
    work = Workload.of(
        lengths, speed, max_actors=max_actors, capacity=capacity, price=price, pools=pools, prompts=prompts,
        transfer_s=transfer_s,
    )
    if not (math.isfinite(thin) and 0 <= thin < 1):
        raise ValueError(f"thin is a share of at least 0 and below 1, got {thin}")
    if not work.known:
        return scenario_partitions(work, thin)
    n, one = len(work.lengths), len(work.kinds) == 1
    exact = n <= (PACKED if one else SMALL)  # few enough to be thinned at the end only
    share = 0.0 if exact else thin
    found = sweep(work, work.kinds[0], share) if one else pool_partitions(work, share)
    if n <= (SMALL if found else SMALL_OPEN):
        found = [*found, *every_partition(work, pareto(found))]
    elif n <= PACKED and one and work.held_tokens().sum() <= work.kinds[0].capacity:
        found = [*found, *best_fit(work, found)]
    # bounds swept thinly are `thin` apart already: thinning again could leave gaps of twice that
    return [point.plan() for point in pareto(found or in_waves(work), thin if exact else 0.0)]


def sweep(work: Workload, kind: Kind, thin: float = 0.0) -> list[Partition]:
    """Contiguous partitions of known lengths on one kind of actor, from the cheapest on; empty where capacity allows none."""
    lengths = work.lengths[:, 0]
    order = np.argsort(-lengths, kind="stable")
    fill = Fill(lengths[order], kind.work_s(lengths[order], work.prompts[order]), (work.prompts + lengths)[order], kind)
    found: list[Partition] = []
    first = fill.cuts(math.inf)
    if first is None:
        return found
    if thin >= GRID_STEP:
        longest = fill.partition(order, first).time_s
        steps = math.ceil(math.log(longest / fill.alone_s) / -math.log1p(-thin)) + 1
        found = [fill.partition(order, first), *fill.many(order, longest * (1 - thin) ** np.arange(1, steps + 1), thin)]
        bound = found[-1].time_s * (1 - thin)
    else:
        cuts: list[int] | None = first
        while cuts is not None:
            found.append(fill.partition(order, cuts))
            bound = found[-1].time_s * (1 - max(thin, LEAST_STEP))
            cuts = fill.cuts(bound)
    low, high = bound, found[-1].time_s
    while high - low > END_STEP * high:
        cuts = fill.cuts((low + high) / 2)
        if cuts is None:
            low = (low + high) / 2
        else:
            found.append(fill.partition(order, cuts))
            high = found[-1].time_s
    return found


class Fill:
    """Greedy filling of one kind of actor with sorted sequences, for any time bound; O(actors · log n) each."""

    def __init__(self, lengths: np.ndarray, work_s: np.ndarray, held: np.ndarray, kind: Kind) -> None:
        """lengths (n,) descending, work_s (n,) and held (n,) tokens in the same order."""
        self.n, self.kind = len(lengths), kind
        self.done, self.open = np.concatenate(([0.0], np.cumsum(work_s))), kind.over_s + kind.base_s * lengths
        self.alone_s = float((self.open + work_s).max())
        # lists: bisecting one costs a fifth of a searchsorted call for a single value
        self.done_s: list[float] = self.done.tolist()
        self.open_s: list[float] = self.open.tolist()
        self.stop: list[int] | None = None
        if math.isfinite(kind.capacity):
            tokens = np.concatenate(([0.0], np.cumsum(held)))
            self.stop = (np.searchsorted(tokens, tokens[:-1] + kind.capacity, side="right") - 1).tolist()

    def cuts(self, bound: float) -> list[int] | None:
        """Where groups start when each is filled up to `bound` seconds, and n; None if that takes too many actors."""
        return self.cuts_each(itertools.repeat(bound, self.kind.max_actors))

    def cuts_each(self, bounds: Iterable[float]) -> list[int] | None:
        """The same with a bound of its own for every actor."""
        done_s, open_s, stop, n = self.done_s, self.open_s, self.stop, self.n
        cuts, i = [0], 0
        for bound in bounds:
            end = bisect_right(done_s, bound - open_s[i] + done_s[i], i, n + 1) - 1
            if stop is not None and stop[i] < end:
                end = stop[i]
            if end <= i:
                return None
            cuts.append(end)
            if end == n:
                return cuts
            i = end
        return None

    def many(self, order: np.ndarray, bounds: np.ndarray, thin: float) -> list[Partition]:
        """Partitions by `cuts` for falling bounds (m,), all at once, up to the first that takes too many actors; without those
        that cost at most the share `thin` less than a faster one."""
        done, opened, n = self.done, self.open, self.n
        stop = None if self.stop is None else np.array(self.stop)
        bounds = bounds[bounds >= self.alone_s]
        live, at = np.arange(len(bounds)), np.zeros(len(bounds), int)
        slowest, total = np.zeros(len(bounds)), np.zeros(len(bounds))
        columns = [at]
        for _ in range(self.kind.max_actors if len(bounds) else 0):
            before = done[at] - opened[at]
            end = np.searchsorted(done, bounds[live] + before, side="right") - 1
            if stop is not None:
                end = np.minimum(end, stop[at])
            end = np.maximum(end, at + 1)  # one alone fits, whatever rounding says
            seconds = done[end] - before
            slowest[live] = np.maximum(slowest[live], seconds)
            total[live] += seconds
            column = np.full(len(bounds), n)
            column[live] = end
            columns.append(column)
            live, at = live[end < n], end[end < n]
            if not len(live):
                break
        count = int(live[0]) if len(live) else len(bounds)  # a shorter bound takes no fewer actors
        cost = self.kind.price * total[:count]
        cuts = np.stack(columns, 1)
        found: list[Partition] = []
        # from the fastest on: slower ones must save more than `thin`, the cheapest stays
        for row in range(count - 1, -1, -1):
            if not found or cost[row] * (1 + thin) < found[-1].cost or (row == 0 and cost[row] < found[-1].cost):
                starts = cuts[row]
                k = int((starts < n).sum())
                found.append(Partition(float(slowest[row]), float(cost[row]), order, tuple(starts[: k + 1].tolist()), (0,) * k))
        return found[::-1]

    def partition(self, order: np.ndarray, cuts: list[int]) -> Partition:
        done_s, open_s = self.done_s, self.open_s
        seconds = [open_s[a] + done_s[b] - done_s[a] for a, b in itertools.pairwise(cuts)]
        return Partition(max(seconds), self.kind.price * math.fsum(seconds), order, tuple(cuts), (0,) * len(seconds))
