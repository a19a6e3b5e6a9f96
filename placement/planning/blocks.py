"""Sorted sequences grouped into blocks, and what every range of blocks takes in every scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.planning.partition import Partition
from placement.planning.workload import ActorType, RolloutWorkload

ROWS = 16_384  # sequences gathered at a time


@dataclass(frozen=True)
class Blocks:
    """Sequences of an order, joined to blocks that stay together.

    edges (B + 1,): positions in the order where blocks start, and n. The other arrays are per block and scenario, (B,
    S). longest: longest response. tokens: Σ L. context: Σ L·(p + L/2), or None if no actor type needs it. held: Σ (p +
    L), or None if no actor type has a capacity. prompt (B, 1): Σ p.
    """

    edges: np.ndarray
    longest: np.ndarray
    tokens: np.ndarray
    context: np.ndarray | None
    held: np.ndarray | None
    prompt: np.ndarray

    @classmethod
    def from_workload(cls, work: RolloutWorkload, order: np.ndarray, edges: np.ndarray) -> Blocks:
        """Sum up the sequences of `order` between `edges`."""
        shape = (len(edges) - 1, work.lengths.shape[1])
        asks_context = any(kind.per_ctx_s > 0 for kind in work.kinds)
        asks_held = any(math.isfinite(kind.capacity) for kind in work.kinds)
        longest, tokens = np.empty(shape), np.empty(shape)
        context = np.empty(shape) if asks_context else None
        held = np.empty(shape) if asks_held else None
        prompt = np.empty((shape[0], 1))
        first = 0
        while first < shape[0]:
            # Whole blocks, a limited number of rows at a time: reordering everything at once would double the memory.
            last = max(first + 1, int(np.searchsorted(edges, edges[first] + ROWS, side="right")) - 1)
            rows = order[edges[first] : edges[last]]
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

    def merged(self, edges: np.ndarray) -> Blocks:
        """Merge blocks so that edges remain only at those of mine nearest to `edges`."""
        at = np.unique(np.minimum(np.searchsorted(self.edges, edges), len(self.edges) - 1))
        if len(at) == len(self.edges):
            return self
        starts = at[:-1]

        def add(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else np.add.reduceat(values, starts, axis=0)

        return Blocks(
            self.edges[at],
            np.maximum.reduceat(self.longest, starts, axis=0),
            np.add.reduceat(self.tokens, starts, axis=0),
            add(self.context),
            add(self.held),
            np.add.reduceat(self.prompt, starts, axis=0),
        )

    def retime(self, points: Sequence[Partition], work: RolloutWorkload) -> list[Partition]:
        """Recompute time and cost of partitions over all scenarios, and drop those that overflow a cache. Cuts must be edges."""
        if not points:
            return []
        blocks = self.merged(np.unique(np.concatenate([point.cuts for point in points])))
        done_s = [_prefix_sums(blocks.work_s(kind)) for kind in work.kinds]
        tokens = None if blocks.held is None else _prefix_sums(blocks.held)
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
                seconds = kind.setup_s + kind.base_s * longest[mine] + done_s[q][at[mine + 1]] - done_s[q][at[mine]]
                slowest = np.maximum(slowest, seconds.max(0))
                cost += kind.price * float(seconds.mean(1).sum())
                if tokens is not None and np.any(tokens[at[mine + 1]] - tokens[at[mine]] > kind.capacity):
                    fits = False
            if fits:
                judged.append(Partition(float(slowest.mean()), cost, point.order, point.cuts, point.pools))
        return judged

    def columns(self, columns: np.ndarray | slice) -> Blocks:
        """Return the same blocks with some of the scenarios."""

        def pick(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[:, columns]

        return Blocks(self.edges, self.longest[:, columns], self.tokens[:, columns], pick(self.context), pick(self.held), self.prompt)

    def work_s(self, kind: ActorType) -> np.ndarray:
        """Return (B, S) seconds that each block adds to its actor besides base · longest."""
        seconds = kind.per_seq_s * self.tokens
        if self.context is not None and kind.per_ctx_s:
            seconds = seconds + kind.per_ctx_s * self.context
        return seconds + kind.prefill_s * self.prompt if kind.prefill_s else seconds

    def range_stops(self, seconds: float, kinds: Sequence[ActorType]) -> np.ndarray:
        """Return (B,), for each block the end of the longest range starting there that is worth a look.

        A range takes at most about `seconds` on any actor type and fits a cache, both in the mean over scenarios. It
        has at least one block.
        """
        count = len(self.edges) - 1
        stop = np.arange(1, count + 1)
        for kind in kinds:
            done = np.concatenate(([0.0], np.cumsum(self.work_s(kind).mean(1))))
            room = seconds - kind.setup_s - kind.base_s * self.longest.mean(1)
            stop = np.maximum(stop, np.searchsorted(done, done[:-1] + room, side="right") - 1)
        if self.held is not None and math.isfinite(most := max(kind.capacity for kind in kinds)):
            tokens = _prefix_sums(self.held).mean(1)
            fits = np.searchsorted(tokens, tokens[:-1] + most, side="right") - 1
            stop = np.minimum(stop, np.maximum(fits, np.arange(1, count + 1)))
        return np.maximum.accumulate(stop)  # every part of a range must be a range too


class Ranges:
    """Every range of blocks [i, j) with j ≤ stop[i], stored one after the other by i, then by j.

    seconds (kinds, R, S): an actor's time for the range. cost (kinds, R): its mean cost. fits (kinds, R): whether the
    cache holds it in every scenario.
    """

    def __init__(self, blocks: Blocks, stop: np.ndarray, kinds: Sequence[ActorType], dtype: type = np.float64) -> None:
        """Time all ranges. dtype: of `seconds`; single precision halves the memory traffic and ranks partitions equally well."""
        self.blocks, self.stop, self.kinds = blocks, stop, kinds
        count = len(stop)
        sizes = stop - np.arange(count)
        self.first = np.concatenate(([0], np.cumsum(sizes)))
        left = np.repeat(np.arange(count), sizes)
        right = np.arange(self.first[-1]) - self.first[left] + left + 1
        longest = np.empty((self.first[-1], blocks.longest.shape[1]), dtype)
        top: np.ndarray = blocks.longest.astype(dtype)
        for i in range(count):
            np.maximum.accumulate(top[i : stop[i]], axis=0, out=longest[self.first[i] : self.first[i + 1]])
        self.seconds = np.empty((len(kinds), *longest.shape), dtype)
        held = None if blocks.held is None else _range_sums(blocks.held, left, right).max(1)
        for q, kind in enumerate(kinds):
            np.multiply(longest, kind.base_s, out=self.seconds[q])
            self.seconds[q] += _range_sums(blocks.work_s(kind), left, right, dtype)
            self.seconds[q] += dtype(kind.setup_s)
        self.cost = np.array([kind.price * mean(each).astype(float) for kind, each in zip(kinds, self.seconds, strict=True)])
        self.fits = np.array([np.ones(len(left), bool) if held is None else held <= kind.capacity for kind in kinds])


def mean(values: np.ndarray) -> np.ndarray:
    """Return the row means (R,) of values (R, S), two to five times faster than ndarray.mean. Avoids BLAS, which may start threads."""
    return np.einsum("ij->i", values) / values.shape[1]


def _range_sums(values: np.ndarray, left: np.ndarray, right: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """Return (R, S) sums of values (B, S) over the blocks from left up to, but excluding, right."""
    done: np.ndarray = _prefix_sums(values).astype(dtype)
    sums = done[right]
    sums -= done[left]
    return sums


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    """Return (B + 1, S) sums of values (B, S) before each block."""
    return np.concatenate((np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)))
