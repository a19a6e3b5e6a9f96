"""The frontier of known lengths over several pools: which pool takes which range of the sorted sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from placement.planning.greedy_fill import Ordered
from placement.planning.partition import Partition
from placement.planning.workload import ActorType

POOLS_PER_PLAN = 3  # pools that one plan may mix: of more pools, every triple is tried
FEW = 64  # up to this many sequences every cut and every time bound is tried
CUTS = 8  # with more sequences: further first cuts tried when three pools share them
STEP = 0.005  # with more sequences: relative step of the time bound
MIN_STEP, END_STEP = 1e-9, 1e-5


def with_spare(ordered: Ordered, kinds: Sequence[ActorType], thin: float) -> list[Partition]:
    """Find partitions as `pool_partitions` does, and where actors may be preempted also those that leave them time for one loss."""
    found = pool_partitions(ordered, kinds, thin)
    spare = [kind.loss_s * kind.growth if kind.preempt_per_s else 0.0 for kind in kinds]
    return [*found, *pool_partitions(ordered, kinds, thin, spare)] if any(spare) else found


def pool_partitions(ordered: Ordered, kinds: Sequence[ActorType], thin: float, spare_s: Sequence[float] = ()) -> list[Partition]:
    """Find partitions of ordered sequences over several actor types. Empty where capacity allows none without waves.

    Each order of the pools is tried for a time bound T. The first pool takes the longest sequences, the next pool the
    following ones, and so on. Any pool may take none. Within its range a pool is filled greedily, which is optimal
    there (see `frontier`). The limits on actors hold exactly.

    Exact for that family. With two pools every cut between them is tried at once: prefix sums give the front, and
    doubling the jumps from one actor's first sequence to the next one's gives the rest. With three pools every first
    cut is tried up to FEW sequences. Beyond that, the ends of the first pool's actors and CUTS more positions are tried
    (8 or 64 made no difference on 4,096 sequences).

    Not covered: plans in which a pool's actors lie on both sides of another's and, beyond FEW sequences, bounds closer
    than max(thin, STEP). Measured against all contiguous mixtures on 149 random cases of up to 7 sequences: 8 % worse
    in the worst case, more than 3 % in five.

    spare_s: seconds by which actors of each type must end before the time bound. Times count them.
    """
    order, ranges = ordered.order, [Range(ordered, kind, spare) for kind, spare in zip(kinds, spare_s or [0.0] * len(kinds), strict=True)]
    orders = list(permutations(range(len(ranges)), min(len(ranges), POOLS_PER_PLAN)))
    few = len(order) <= FEW
    step = max(thin, MIN_STEP) if few else max(thin, STEP)
    found: list[Partition] = []
    bound = math.inf
    while (point := _cheapest(ranges, orders, order, bound, few)) is not None:
        found.append(point)
        bound = point.time_s * (1 - step)
    if found and step > END_STEP:
        low, high = bound, found[-1].time_s
        while high - low > END_STEP * high:
            point = _cheapest(ranges, orders, order, (low + high) / 2, few)
            if point is None:
                low = (low + high) / 2
            else:
                found.append(point)
                high = point.time_s
    return found


class Range:
    """Greedy filling of one actor type from any position of the sorted sequences, up to a time bound."""

    def __init__(self, ordered: Ordered, kind: ActorType, spare_s: float) -> None:
        self.kind, self.n, self.spare_s = kind, len(ordered.order), spare_s
        self.done_s = np.concatenate(([0.0], np.cumsum(ordered.work_s(kind))))
        self.open_s = kind.setup_s + kind.base_s * ordered.longest
        self.held = np.concatenate(([0.0], np.cumsum(ordered.held)))
        self.next = np.zeros(0, int)

    def bound(self, time_s: float) -> None:
        """Set the time bound. `next[i]` is then where an actor that starts at i must stop."""
        self.next = np.searchsorted(self.done_s, self.done_s[:-1] - self.open_s + time_s - self.spare_s, side="right") - 1
        if math.isfinite(self.kind.capacity):
            fits = np.searchsorted(self.held, self.held[:-1] + self.kind.capacity, side="right") - 1
            self.next = np.minimum(self.next, fits)

    def starts(self, first: int) -> list[int]:
        """Return where actors start that are filled one after the other from `first`, and where the last one stops."""
        at, starts = first, [first]
        while at < self.n and len(starts) <= self.kind.max_actors:
            to = int(self.next[at])
            if to <= at:
                break
            starts.append(to)
            at = to
        return starts

    def up_to(self, starts: list[int]) -> np.ndarray:
        """Return (n + 1,) cost of the range from starts[0] to each position; inf before it and where the actors do not reach."""
        cost = np.full(self.n + 1, np.inf)
        first, reach = starts[0], starts[-1]
        opened = np.concatenate(([0.0], np.cumsum(self.open_s[starts[:-1]])))
        actors = np.searchsorted(starts[:-1], np.arange(first, reach + 1), side="left")
        cost[first : reach + 1] = self.kind.price * (opened[actors] + self.done_s[first : reach + 1] - self.done_s[first])
        return cost

    def from_here(self) -> np.ndarray:
        """Return (n + 1,) cost of the range from each position to the end; inf where the actors do not reach."""
        n = self.n
        stuck = self.next <= np.arange(n)
        jump = np.append(np.where(stuck, n + 1, self.next), [n, n + 1])
        opened, actors = np.append(self.open_s, [0.0, np.inf]), np.append(np.ones(n), [0.0, np.inf])
        while True:
            ahead = jump[jump]
            if np.array_equal(ahead, jump):
                break
            # every pass doubles the number of actors counted in `opened`
            opened, actors, jump = opened + opened[jump], actors + actors[jump], ahead
        opened, actors = opened + opened[jump], actors + actors[jump]
        cost = self.kind.price * (opened[: n + 1] + self.done_s[n] - self.done_s)
        cost[actors[: n + 1] > self.kind.max_actors] = np.inf
        return cost


def _cheapest(ranges: list[Range], orders: list[tuple[int, ...]], order: np.ndarray, time_s: float, few: bool) -> Partition | None:
    """Return the cheapest plan in which no actor takes longer than `time_s`, or None."""
    for fill in ranges:
        fill.bound(time_s)
    ends = [fill.from_here() for fill in ranges]
    heads = [fill.starts(0) for fill in ranges]
    fronts = [fill.up_to(starts) for fill, starts in zip(ranges, heads, strict=True)]
    best: tuple[float, tuple[tuple[int, int, int], ...]] = (math.inf, ())
    for pools in orders:
        a, b = pools[0], pools[1]
        n = ranges[a].n
        if len(pools) == 2:
            total = fronts[a] + ends[b]
            x = int(total.argmin())
            if total[x] < best[0]:
                best = (float(total[x]), ((a, 0, x), (b, x, n)))
            continue
        c = pools[2]
        reach = heads[a][-1]
        firsts = range(reach + 1) if few else sorted({*heads[a], *np.linspace(0, reach, CUTS).astype(int).tolist()})
        for x in firsts:
            tail = ranges[b].up_to(ranges[b].starts(x)) + ends[c] if x < n else ends[c]
            y = int(tail.argmin())
            if fronts[a][x] + tail[y] < best[0]:
                best = (float(fronts[a][x] + tail[y]), ((a, 0, x), (b, x, y), (c, y, n)))
    if not best[1]:
        return None
    cuts, pools_used, seconds, cost = [0], [], [], 0.0
    for pool, first, last in best[1]:
        fill, at = ranges[pool], first
        while at < last:
            to = min(int(fill.next[at]), last)
            own_s = float(fill.open_s[at] + fill.done_s[to] - fill.done_s[at])
            seconds.append(own_s + fill.spare_s)
            cost += fill.kind.price * own_s
            cuts.append(to)
            pools_used.append(pool)
            at = to
    return Partition(max(seconds), cost, order, tuple(cuts), tuple(pools_used))
