"""The time/cost frontier of a rollout: the assignments of sequences to actors that no other beats on both axes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from placement.planning.frontier_pools import pool_partitions
from placement.planning.frontier_scenarios import scenario_partitions
from placement.planning.frontier_small import PACKED, SMALL, SMALL_UNBOUNDED, all_partitions, best_fit
from placement.planning.multi_wave import wave_partitions
from placement.planning.partition import Partition, pareto
from placement.planning.plan import Plan, Pool
from placement.planning.workload import ActorType, RolloutWorkload
from placement.speed.decode_speed import Speed

MIN_STEP = 1e-9  # least relative step of the time bound, so that rounding cannot stall a sweep
GRID_STEP = 1e-3  # from this thinning on, all time bounds are filled at once
END_STEP = 1e-6  # relative precision with which a sweep finds the fastest plan


def frontier(
    lengths: np.ndarray,
    speed: Speed | None = None,
    *,
    max_actors: int | None = None,
    capacity: int | None = None,
    price: float = 1.0,
    pools: Sequence[Pool] | None = None,
    prompts: np.ndarray | float | None = None,
    transfer_s: float = 0.0,
    thin: float = 0.0,
) -> list[Plan]:
    """Find the plans that no other plan found beats on both time and cost.

    Parameters
    ----------
    lengths : array of shape (n,) or (n, S)
        Known response tokens, or S joint scenarios of them (one column is one draw). With scenarios, a plan's `time_s`
        is the mean over columns of the maximum over actors, and its `cost` the mean of the sum.
    speed, max_actors, capacity, price
        Short form of a single `Pool`.
    pools : sequence of Pool, optional
        General form. Give either `pools` or the short form.
    prompts : float or array of shape (n,), optional
        Prompt tokens. Default 0.
    transfer_s : float
        Seconds that every actor spends on weights or KV pages before it decodes, in addition to its pool's `start_s`.
        Both count in its time and its cost.
    thin : float
        Leave out plans that another one matches to this share on both axes (0.005: half a percent). The exact frontier
        of thousands of sequences has thousands of points. A thinned one is found faster.

    Returns
    -------
    list of Plan
        By time ascending and cost descending.

    Raises
    ------
    ValueError
        For lengths that are empty, not finite or not positive, for no actors, a sequence that no actor can hold, pools
        that cannot work, and arguments that contradict each other.

    Notes
    -----
    An actor takes setup + base · L₁ + Σ (per_seq · L + per_ctx · (p·L + L²/2)) seconds for sequences L₁ ≥ L₂ ≥ …
    admitted at once: the sum over decode steps of TailSieve's replica time with an affine step (see `Speed.rollout_s`).

    Exact for known lengths on one pool over groups that are contiguous in the sorted order. For a time bound T, filling
    actors from the longest sequence down starts every group as late as possible, so no contiguous partition has fewer
    actors or a smaller sum of group maxima. T sweeps down over every makespan. Exact over all partitions, on any pools,
    for up to SMALL sequences (`all_partitions`). Up to PACKED sequences, on one pool whose capacity does not bind,
    leftover time is packed as well (`best_fit`). Beyond that, contiguity cost 0.2 % at the worst point of a frontier,
    measured against `cost_bound` (16 actors, 512 sequences, five draws of log-normal lengths). Several pools: see
    `frontier_pools`. Scenarios: see `frontier_scenarios`.

    Capacity: a group must hold its prompts and full responses at once (with scenarios, in every column). A second wave
    on the same actor costs as much as on an actor of its own and ends later. Waves are therefore planned only if
    `max_actors` cannot hold everything at once (see `multi_wave`). Such plans are not claimed to be exact.

    Examples
    --------
    >>> plans = frontier([120, 80, 75, 900], Speed(base_s=0.01, per_seq_s=1e-4), max_actors=4)
    >>> [(round(plan.time_s, 2), round(plan.cost, 2)) for plan in plans]
    [(9.09, 10.32), (9.1, 9.92), (9.11, 9.87), (9.12, 9.12)]
    """
    work = RolloutWorkload.from_arguments(
        lengths, speed, max_actors=max_actors, capacity=capacity, price=price, pools=pools, prompts=prompts, transfer_s=transfer_s
    )
    if not (math.isfinite(thin) and 0 <= thin < 1):
        raise ValueError(f"thin is a share of at least 0 and below 1, got {thin}")
    if not work.known:
        return scenario_partitions(work, thin)
    n, on_one_type = len(work.lengths), len(work.kinds) == 1
    exact = n <= (PACKED if on_one_type else SMALL)  # few enough sequences to thin only at the end
    share = 0.0 if exact else thin
    found = sweep(work, work.kinds[0], share) if on_one_type else pool_partitions(work, share)
    if n <= (SMALL if found else SMALL_UNBOUNDED):
        found = [*found, *all_partitions(work, pareto(found))]
    elif n <= PACKED and on_one_type and work.held_tokens().sum() <= work.kinds[0].capacity:
        found = [*found, *best_fit(work, found)]
    # A thinned sweep's bounds are already `thin` apart: thinning again could leave gaps twice as wide.
    return [point.plan() for point in pareto(found or wave_partitions(work), thin if exact else 0.0)]


def sweep(work: RolloutWorkload, kind: ActorType, thin: float = 0.0) -> list[Partition]:
    """Return contiguous partitions of known lengths on one actor type, cheapest first. Empty where capacity allows none."""
    lengths = work.lengths[:, 0]
    order = np.argsort(-lengths, kind="stable")
    fill = GreedyFill(lengths[order], kind.work_s(lengths[order], work.prompts[order]), (work.prompts + lengths)[order], kind)
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
            bound = found[-1].time_s * (1 - max(thin, MIN_STEP))
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


class GreedyFill:
    """Greedy filling of actors of one type with sorted sequences up to a time bound, in O(actors · log n) each."""

    def __init__(self, lengths: np.ndarray, work_s: np.ndarray, held: np.ndarray, kind: ActorType) -> None:
        """lengths (n,): descending tokens. work_s (n,) seconds and held (n,) tokens: in the same order."""
        self.n, self.kind = len(lengths), kind
        self.done, self.open = np.concatenate(([0.0], np.cumsum(work_s))), kind.setup_s + kind.base_s * lengths
        self.alone_s = float((self.open + work_s).max())
        # For a single value, bisecting a list costs a fifth of a searchsorted call.
        self.done_s: list[float] = self.done.tolist()
        self.open_s: list[float] = self.open.tolist()
        self.stop: list[int] | None = None
        if math.isfinite(kind.capacity):
            tokens = np.concatenate(([0.0], np.cumsum(held)))
            self.stop = (np.searchsorted(tokens, tokens[:-1] + kind.capacity, side="right") - 1).tolist()

    def cuts(self, bound: float) -> list[int] | None:
        """Return where groups start if each is filled up to `bound` seconds, and n. None if that takes too many actors."""
        done_s, open_s, stop, n = self.done_s, self.open_s, self.stop, self.n
        cuts, i = [0], 0
        for _ in range(self.kind.max_actors):
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
        """Compute the partitions of `cuts` for falling bounds (m,) at once.

        Stops at the first bound that takes too many actors. Drops partitions that cost at most the share `thin` less
        than a faster one.
        """
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
            end = np.maximum(end, at + 1)  # one sequence alone fits: rounding must not say otherwise
            seconds = done[end] - before
            slowest[live] = np.maximum(slowest[live], seconds)
            total[live] += seconds
            column = np.full(len(bounds), n)
            column[live] = end
            columns.append(column)
            live, at = live[end < n], end[end < n]
            if not len(live):
                break
        count = int(live[0]) if len(live) else len(bounds)  # shorter bounds need at least as many actors
        cost = self.kind.price * total[:count]
        cuts = np.stack(columns, 1)
        found: list[Partition] = []
        # From the fastest on, a slower one must save more than `thin`. The cheapest always stays.
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
