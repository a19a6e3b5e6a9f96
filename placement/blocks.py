"""Sorted sequences under scenarios, in blocks that stay together: what a range of blocks takes in every scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.partition import Partition
from placement.workload import Kind, Workload

ROWS = 16_384  # sequences gathered at a time


@dataclass(frozen=True)
class Blocks:
    """edges (B + 1,): positions in the order where blocks start, and n. Per block and scenario, each (B, S): longest, the
    longest response; tokens, Σ L; context, Σ L·(p + L/2) or None if no kind asks; held, Σ (p + L) or None likewise; prompt (B, 1), Σ p."""

    edges: np.ndarray
    longest: np.ndarray
    tokens: np.ndarray
    context: np.ndarray | None
    held: np.ndarray | None
    prompt: np.ndarray

    @classmethod
    def of(cls, work: Workload, order: np.ndarray, edges: np.ndarray) -> Blocks:
        shape = (len(edges) - 1, work.lengths.shape[1])
        asks_context = any(kind.per_ctx_s > 0 for kind in work.kinds)
        asks_held = any(math.isfinite(kind.capacity) for kind in work.kinds)
        longest, tokens = np.empty(shape), np.empty(shape)
        context = np.empty(shape) if asks_context else None
        held = np.empty(shape) if asks_held else None
        prompt = np.empty((shape[0], 1))
        first = 0
        while first < shape[0]:
            # whole blocks, and no more rows at once than needed: the reordered copy of everything would double the memory
            last = max(first + 1, int(np.searchsorted(edges, edges[first] + ROWS, side="right")) - 1)
            rows = order[edges[first]: edges[last]]
            lengths, starts = work.lengths[rows], edges[first:last] - edges[first]
            longest[first:last] = np.maximum.reduceat(lengths, starts, axis=0)
            tokens[first:last] = np.add.reduceat(lengths, starts, axis=0)
            prompts = work.prompts[rows][:, None]
            prompt[first:last] = np.add.reduceat(prompts, starts, axis=0)
            if context is not None:
                context[first:last] = np.add.reduceat(lengths * (prompts + lengths / 2), starts, axis=0)
            if held is not None:
                held[first:last] = np.add.reduceat(lengths + prompts, starts, axis=0)
            first = last
        return cls(edges, longest, tokens, context, held, prompt)

    def coarser(self, edges: np.ndarray) -> Blocks:
        """Blocks joined at those of my edges that are nearest to `edges`."""
        at = np.unique(np.minimum(np.searchsorted(self.edges, edges), len(self.edges) - 1))
        if len(at) == len(self.edges):
            return self
        starts = at[:-1]

        def add(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else np.add.reduceat(values, starts, axis=0)

        return Blocks(self.edges[at], np.maximum.reduceat(self.longest, starts, axis=0), np.add.reduceat(self.tokens, starts, axis=0),
                      add(self.context), add(self.held), np.add.reduceat(self.prompt, starts, axis=0))

    def judge(self, points: Sequence[Partition], work: Workload) -> list[Partition]:
        """The same partitions, timed over all scenarios; without those that a cache does not hold. Cuts must be edges."""
        if not points:
            return []
        blocks = self.coarser(np.unique(np.concatenate([point.cuts for point in points])))
        done_s = [_sums(blocks.work_s(kind)) for kind in work.kinds]
        tokens = None if blocks.held is None else _sums(blocks.held)
        judged = []
        for point in points:
            at = np.searchsorted(blocks.edges, point.cuts)
            longest = np.maximum.reduceat(blocks.longest, at[:-1], axis=0)
            pools = np.asarray(point.pools)
            slowest, cost, fits = np.zeros(longest.shape[1]), 0.0, True
            for q, kind in enumerate(work.kinds):
                mine = np.flatnonzero(pools == q)
                if not len(mine):
                    continue
                seconds = kind.over_s + kind.base_s * longest[mine] + done_s[q][at[mine + 1]] - done_s[q][at[mine]]
                slowest = np.maximum(slowest, seconds.max(0))
                cost += kind.price * float(seconds.mean(1).sum())
                if tokens is not None and np.any(tokens[at[mine + 1]] - tokens[at[mine]] > kind.capacity):
                    fits = False
            if fits:
                judged.append(Partition(float(slowest.mean()), cost, point.order, point.cuts, point.pools))
        return judged

    def columns(self, columns: np.ndarray | slice) -> Blocks:
        def pick(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[:, columns]

        return Blocks(self.edges, self.longest[:, columns], self.tokens[:, columns], pick(self.context), pick(self.held), self.prompt)

    def work_s(self, kind: Kind) -> np.ndarray:
        """(B, S) what each block adds to its actor's time besides base · longest."""
        seconds = kind.per_seq_s * self.tokens
        if self.context is not None and kind.per_ctx_s:
            seconds = seconds + kind.per_ctx_s * self.context
        return seconds + kind.prefill_s * self.prompt if kind.prefill_s else seconds

    def reach(self, seconds: float, kinds: Sequence[Kind]) -> np.ndarray:
        """(B,) for each block the end of the longest range from it that takes at most about `seconds` on any kind, in the
        mean, and that a cache holds in the mean; at least one block."""
        count = len(self.edges) - 1
        stop = np.arange(1, count + 1)
        for kind in kinds:
            done = np.concatenate(([0.0], np.cumsum(self.work_s(kind).mean(1))))
            room = seconds - kind.over_s - kind.base_s * self.longest.mean(1)
            stop = np.maximum(stop, np.searchsorted(done, done[:-1] + room, side="right") - 1)
        if self.held is not None and math.isfinite(most := max(kind.capacity for kind in kinds)):
            tokens = _sums(self.held).mean(1)
            fits = np.searchsorted(tokens, tokens[:-1] + most, side="right") - 1
            stop = np.minimum(stop, np.maximum(fits, np.arange(1, count + 1)))
        return np.maximum.accumulate(stop)  # so that every part of a range is one too


class Ranges:
    """Every range of blocks [i, j) with j ≤ stop[i]; they lie one after the other by i, then by j.

    seconds (kinds, R, S) that an actor takes for the range, cost (kinds, R) its mean cost, fits (kinds, R) whether the cache
    holds it in every scenario.
    """

    def __init__(self, blocks: Blocks, stop: np.ndarray, kinds: Sequence[Kind], dtype: type = np.float64) -> None:
        """dtype: of `seconds`; single precision halves the memory to be moved, and ranks partitions as well."""
        self.blocks, self.stop, self.kinds = blocks, stop, kinds
        count = len(stop)
        sizes = stop - np.arange(count)
        self.first = np.concatenate(([0], np.cumsum(sizes)))
        left = np.repeat(np.arange(count), sizes)
        right = np.arange(self.first[-1]) - self.first[left] + left + 1
        longest = np.empty((self.first[-1], blocks.longest.shape[1]), dtype)
        top: np.ndarray = blocks.longest.astype(dtype)
        for i in range(count):
            np.maximum.accumulate(top[i: stop[i]], axis=0, out=longest[self.first[i]: self.first[i + 1]])
        self.seconds = np.empty((len(kinds), *longest.shape), dtype)
        held = None if blocks.held is None else _between(blocks.held, left, right).max(1)
        for q, kind in enumerate(kinds):
            np.multiply(longest, kind.base_s, out=self.seconds[q])
            self.seconds[q] += _between(blocks.work_s(kind), left, right, dtype)
            self.seconds[q] += dtype(kind.over_s)
        self.cost = np.array([kind.price * mean(each).astype(float) for kind, each in zip(kinds, self.seconds, strict=True)])
        self.fits = np.array([np.ones(len(left), bool) if held is None else held <= kind.capacity for kind in kinds])

    def index(self, i: int, j: int) -> int:
        return int(self.first[i]) + j - i - 1


def mean(values: np.ndarray) -> np.ndarray:
    """(R,) means of the rows of values (R, S), two to five times faster than ndarray.mean; no BLAS, which might start threads."""
    return np.einsum("ij->i", values) / values.shape[1]


def _between(values: np.ndarray, left: np.ndarray, right: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """(R, S) sums over blocks left to right (excluded) of values (B, S)."""
    done: np.ndarray = _sums(values).astype(dtype)
    sums = done[right]
    sums -= done[left]
    return sums


def _sums(values: np.ndarray) -> np.ndarray:
    """(B + 1, S) sums of values (B, S) before each block."""
    return np.concatenate((np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)))
