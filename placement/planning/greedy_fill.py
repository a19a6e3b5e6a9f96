"""Greedy filling of one kind of actor with sorted sequences, up to a time bound."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from placement.planning.partition import Partition
from placement.planning.workload import ActorType, RolloutWorkload

MIN_STEP = 1e-9  # least relative step of the time bound, so that rounding cannot stall a sweep
GRID_STEP = 1e-3  # from this thinning on, all time bounds are filled at once
END_STEP = 1e-6


@dataclass(frozen=True)
class Ordered:
    """Sequences in the order in which groups are contiguous, the longest first.

    order (n,): indices. longest (n,): longest response in tokens of a group that starts at a position. lengths (n, S): response tokens.
    prompts (n,), held (n,): prompt tokens, and tokens that a sequence holds in a cache at its end.
    """

    order: np.ndarray
    longest: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    held: np.ndarray

    @classmethod
    def of_known(cls, work: RolloutWorkload) -> Ordered:
        """Order known lengths."""
        order = np.argsort(-work.lengths[:, 0], kind="stable")
        lengths, prompts = work.lengths[order], work.prompts[order]
        return cls(order, lengths[:, 0], lengths, prompts, lengths[:, 0] + prompts)

    @classmethod
    def of_scenarios(cls, work: RolloutWorkload, spread: float, columns: np.ndarray) -> Ordered:
        """Order scenarios by mean + spread · standard deviation of log length over these columns, and keep these.

        A group's longest response is taken to be the mean over scenarios of the maximum over all sequences from its first one on. Its
        last members add little to that, so where a group ends hardly matters.
        """
        logs = np.log(work.lengths[:, columns].astype(np.float32))
        order = np.argsort(-(logs.mean(1) + spread * logs.std(1)), kind="stable")
        lengths, prompts = work.lengths[np.ix_(order, columns)], work.prompts[order]
        longest = np.maximum.accumulate(lengths[::-1], axis=0)[::-1].mean(1)
        return cls(order, longest, lengths, prompts, work.lengths.max(1)[order] + prompts)

    def work_s(self, kind: ActorType) -> np.ndarray:
        """Return (n,) seconds that each sequence adds to its actor in the mean, besides base_s · longest."""
        return kind.work_s(self.lengths, self.prompts[:, None]).mean(1)


def sweep(ordered: Ordered, kind: ActorType, thin: float = 0.0, precision: float = END_STEP) -> list[Partition]:
    """Return contiguous partitions on one actor type, cheapest first. Empty where capacity allows none.

    `precision`: relative, with which the fastest is found.
    """
    order, fill, found = ordered.order, GreedyFill(ordered, kind), list[Partition]()
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
    while high - low > precision * high:
        cuts = fill.cuts((low + high) / 2)
        if cuts is None:
            low = (low + high) / 2
        else:
            found.append(fill.partition(order, cuts))
            high = found[-1].time_s
    return found


class GreedyFill:
    """Greedy filling of actors of one type with sorted sequences up to a time bound, in O(actors · log n) each."""

    def __init__(self, ordered: Ordered, kind: ActorType) -> None:
        work_s, held = ordered.work_s(kind), ordered.held
        self.n, self.kind = len(work_s), kind
        self.done, self.open = np.concatenate(([0.0], np.cumsum(work_s))), kind.setup_s + kind.base_s * ordered.longest
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
