"""Search for partitions of blocks under scenarios: shortest paths against deadlines, then local search."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from placement.planning.blocks import Ranges, mean

Grouping = tuple[tuple[int, ...], tuple[int, ...]]  # blocks where groups start, and the end; actor type of each group

RATES = (0.003, 0.02, 0.1, 0.5)  # seconds of lateness worth one actor-second of the most expensive type
ROUNDS = 6  # rounds of raising the price of actors when a partition takes more than there are
EXTRA = 0.02  # surcharge per actor in the first of these rounds, as a share of the deadline
SHIFTS = (1, -1, 2, -2, 4, -4)  # blocks by which local search moves a cut
SHIFTS_AND_JOIN = np.array((*SHIFTS, 0))


class ScenarioSearch:
    """Collects partitions of the blocks of `ranges` with their (time_s, cost) over the scenarios of `ranges`."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.kinds = ranges.kinds
        self.limits = np.array([kind.max_actors for kind in self.kinds])
        self.cost = np.where(ranges.fits, ranges.cost, np.inf)
        self.found: dict[Grouping, tuple[float, float]] = {}
        self.tried: set[Grouping] = set()

    def at(self, path: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return (k,) rows of the ranges between the blocks of `path` (k + 1,)."""
        cuts = np.asarray(path)
        return self.ranges.first[cuts[:-1]] + np.diff(cuts) - 1

    def best(self) -> list[tuple[float, float, Grouping]]:
        """Return the undominated partitions found, by time."""
        best: list[tuple[float, float, Grouping]] = []
        for choice, (time_s, cost) in sorted(self.found.items(), key=lambda item: item[1]):
            if not best or cost < best[-1][1]:
                best.append((time_s, cost, choice))
        return best

    def by_deadlines(self, deadlines: np.ndarray) -> None:
        """Search shortest paths against deadlines (D, S), one row per search.

        The mean over scenarios of the slowest actor is not a sum over actors, so no shortest path minimises it. For any
        deadlines D_s it is at most mean D_s + Σ over actors of mean (t_s - D_s)⁺, and close to that if two actors are
        rarely late at once. That bound is a sum. Each row is minimised for several rates between lateness and cost.
        Where a path takes more actors than there are, every actor of that type gets a surcharge, in a few rounds.
        """
        late = [np.stack([_mean_late(seconds, row) for row in deadlines]) for seconds in self.ranges.seconds]
        rate = np.tile(np.asarray(RATES) / max(kind.price for kind in self.kinds), len(deadlines))
        row_of = np.repeat(np.arange(len(deadlines)), len(RATES))
        extra = np.zeros((len(rate), len(self.kinds)))
        first_extra = EXTRA * deadlines.mean(1)
        for _ in range(ROUNDS):
            each = [late[q][row_of] for q in range(len(self.kinds))]
            for q, value in enumerate(each):
                value += rate[:, None] * self.cost[q]
                if extra[:, q].any():
                    value += extra[:, q : q + 1]
            kind_of = None if len(each) == 1 else np.argmin(each, axis=0)
            again = []
            for row, path in enumerate(_shortest(each[0] if kind_of is None else np.minimum.reduce(each), self.ranges)):
                if path is None:
                    continue
                at = self.at(path)
                kinds = np.zeros(len(at), int) if kind_of is None else kind_of[row, at]
                over = np.bincount(kinds, minlength=len(self.kinds)) > self.limits
                if over.any():
                    extra[row, over] = np.maximum(2 * extra[row, over], first_extra[row_of[row]])
                    again.append(row)
                elif (choice := (tuple(path), tuple(kinds.tolist()))) not in self.found:
                    slowest = self.ranges.seconds[kinds, at].max(0)
                    self.found[choice] = float(slowest.mean()), float(self.cost[kinds, at].sum())
            if not again:
                break
            rate, row_of, extra = rate[again], row_of[again], extra[again]

    def by_neighbours(self, rounds: int, widest: int) -> None:
        """Improve undominated partitions by local search.

        A neighbour moves a cut, drops one, adds one, or changes a group's actor type. Neighbours that nothing dominates
        are added with their exact figures. One round starts from at most `widest` partitions, spread evenly over their
        times.
        """
        for _ in range(rounds):
            front = self.best()
            new = [i for i, (_, _, choice) in enumerate(front) if choice not in self.tried]
            if not new:
                return
            times, costs = np.array([p[0] for p in front]), np.array([p[1] for p in front])
            if len(new) > widest:
                new = [new[i] for i in np.linspace(0, len(new) - 1, widest).astype(int)]
            for i in new:
                self.tried.add(front[i][2])
                self._step(front[i][2], times, costs)

    def _step(self, choice: Grouping, times: np.ndarray, costs: np.ndarray) -> None:
        cuts, pools, ranges = np.array(choice[0]), np.array(choice[1]), self.ranges
        at = self.at(cuts)
        moves = self._moves(cuts, pools)
        g, h, of, start, cut, of_rest, end = moves
        seconds = ranges.seconds[pools, at]
        own = np.concatenate(([0.0], self.cost[pools, at].cumsum()))
        none = np.zeros((1, seconds.shape[1]), seconds.dtype)
        before = np.concatenate((none, np.maximum.accumulate(seconds, axis=0)))
        after = np.concatenate((np.maximum.accumulate(seconds[::-1], axis=0)[::-1], none))
        left = ranges.first[start] + cut - start - 1
        two = end > cut
        # for a move that leaves a single range, `right` repeats it
        right = np.where(two, ranges.first[np.where(two, cut, 0)] + end - cut - 1, left)
        cost = self.cost[of, left] + np.where(two, self.cost[of_rest, right], 0.0)
        cost -= own[h] - own[g]
        # A more expensive neighbour can only be faster if it changes an actor that is the slowest in some scenario.
        slow = np.concatenate(([0], (np.bincount(seconds.argmax(0), minlength=len(at)) > 0).cumsum()))
        worth = ((cost < 0) | (slow[h] > slow[g])).nonzero()[0]
        moves, left, right, two, cost = moves[:, worth], left[worth], right[worth], two[worth], own[-1] + cost[worth]
        g, h, of, _, _, of_rest, _ = moves
        slowest = np.maximum(before[g], after[h])
        np.maximum(slowest, ranges.seconds[of, left], out=slowest)
        np.maximum(slowest, ranges.seconds[of_rest, right], out=slowest)
        time_s = mean(slowest).astype(float)
        place = np.searchsorted(times, time_s, side="right") - 1
        better = np.isfinite(cost) & (cost < np.where(place < 0, np.inf, costs[place]))
        least = np.inf
        for m in better.nonzero()[0][np.lexsort((cost[better], time_s[better]))]:
            if cost[m] >= least:
                continue  # another neighbour is at least as fast and costs less
            least = cost[m]
            a, b = int(g[m]), int(h[m])
            inner = moves[[3, 4], m] if two[m] else moves[[3], m]
            kinds = moves[[2, 5], m] if two[m] else moves[[2], m]
            moved = (*choice[0][:a], *inner.tolist(), *choice[0][b:]), (*choice[1][:a], *kinds.tolist(), *choice[1][b:])
            self.found.setdefault(moved, (float(time_s[m]), float(least)))

    def _moves(self, cuts: np.ndarray, pools: np.ndarray) -> np.ndarray:
        """Return (7, M) moves, with the rows g, h, q, i, cut, p and end.

        Groups g … h - 1 become [i, cut) on actor type q and [cut, end) on type p. Where cut = end there is only the
        first.
        """
        stop, k = self.ranges.stop, len(pools)
        every, i, j = np.arange(k), cuts[:-1], cuts[1:]
        parts = []
        if k > 1:
            # the last column of shifts stands for joining two groups: its cut is their common end
            g = every[:-1].repeat(len(SHIFTS) + 1)
            end = cuts[2:][g]
            cut = j[:-1, None] + SHIFTS_AND_JOIN
            cut[:, -1] = cuts[2:]
            cut = cut.ravel()
            join, start = np.arange(len(g)) % (len(SHIFTS) + 1) == len(SHIFTS), i[g]
            inside = np.minimum(np.maximum(cut, 0), end)
            ok = (start < cut) & (cut <= stop[start]) & (join | (cut < end) & (end <= stop[np.minimum(inside, len(stop) - 1)]))
            parts.append(np.array((g, g + 2, pools[g], start, cut, pools[g + 1], end))[:, ok])
        cut = np.array((i + 1, (2 * i + j) // 3, (i + j) // 2)).T.ravel()
        g = every.repeat(3)
        start, end = i[g], j[g]
        ok = (start < cut) & (cut < end)
        for p in (np.bincount(pools, minlength=len(self.kinds)) < self.limits).nonzero()[0]:
            parts.append(np.array((g, g + 1, pools[g], start, cut, np.full(len(g), p), end))[:, ok])
            if len(self.kinds) > 1:
                kind = np.full(k, p)
                parts.append(np.array((every, every + 1, kind, i, j, kind, j))[:, pools != p])
        return np.concatenate(parts, axis=1) if parts else np.zeros((7, 0), int)


def _mean_late(seconds: np.ndarray, deadlines: np.ndarray) -> np.ndarray:
    """Return (R,) means over scenarios of the lateness of seconds (R, S) against deadlines (S,)."""
    deadlines = deadlines.astype(seconds.dtype)
    return np.maximum(mean(np.maximum(seconds, deadlines)).astype(float) - float(deadlines.mean(dtype=float)), 0.0)


def _shortest(value: np.ndarray, ranges: Ranges) -> list[list[int] | None]:
    """For each row of value (C, R), return the block starts of the cheapest path from the first block to the end."""
    rows, count = len(value), len(ranges.stop)
    best = np.zeros((rows, count + 1))
    to = np.zeros((rows, count), int)
    every = np.arange(rows)
    for i in range(count - 1, -1, -1):
        ways = value[:, ranges.first[i] : ranges.first[i + 1]] + best[:, i + 1 : ranges.stop[i] + 1]
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
