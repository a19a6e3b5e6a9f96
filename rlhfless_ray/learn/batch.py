"""A step's samples as flat arrays, and their cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """Sequences of prompt and response, laid end to end. All arrays are numpy, so the object store shares them.

    tokens (Σ length,) int64; prompt_lengths and lengths (n,) int64, `lengths` with the response; logprobs
    (Σ response length,) float32 of the sampler; advantages (n,) float32; groups (n,) int64, the prompt's position.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> np.ndarray:
        return self.lengths - self.prompt_lengths

    @classmethod
    def of(cls, sequences: list[tuple[tuple[int, ...], np.ndarray, np.ndarray, float, int]]) -> Batch:
        """From (prompt ids, response ids, response log-probabilities, advantage, group) per sequence."""
        parts = [piece for prompt, response, *_ in sequences for piece in (np.asarray(prompt, np.int64), response)]
        return cls(
            tokens=np.concatenate(parts or [np.empty(0)]).astype(np.int64),
            prompt_lengths=np.array([len(s[0]) for s in sequences], np.int64),
            lengths=np.array([len(s[0]) + len(s[1]) for s in sequences], np.int64),
            logprobs=np.concatenate([s[2] for s in sequences] or [np.empty(0)]).astype(np.float32),
            advantages=np.array([s[3] for s in sequences], np.float32),
            groups=np.array([s[4] for s in sequences], np.int64),
        )

    def take(self, indices: np.ndarray) -> Batch:
        """The sequences with these indices, in that order."""
        def pieces(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            ends = np.cumsum(lengths)
            return np.concatenate([values[:0], *(values[ends[i] - lengths[i] : ends[i]] for i in indices)])

        return Batch(
            pieces(self.tokens, self.lengths), self.prompt_lengths[indices], self.lengths[indices],
            pieces(self.logprobs, self.response_lengths), self.advantages[indices], self.groups[indices],
        )


def mini_batches(batch: Batch, count: int) -> list[np.ndarray]:
    """Sequence indices of each optimizer step: whole groups, dealt in order."""
    order = np.unique(batch.groups)
    return [np.flatnonzero(np.isin(batch.groups, part)) for part in np.array_split(order, count) if len(part)]


def micro_batches(lengths: np.ndarray, max_tokens: int, ranks: int) -> list[list[np.ndarray]]:
    """Cut sequences into micro-batches of at most `max_tokens` padded tokens, the same number for each rank.

    Sequences sorted by length share a micro-batch, which keeps padding low; micro-batches are dealt to the ranks so
    that their padded tokens balance (largest first). A sequence longer than the budget gets a micro-batch of its own.
    Collectives need every rank to run the same number, so short ranks get empty ones. Returns, per rank, index arrays.
    """
    order = np.argsort(-lengths, kind="stable")
    budget = max_tokens
    if ranks > 1 and len(lengths):  # at least one micro-batch per rank where there are sequences enough
        budget = min(max_tokens, max(int(lengths.max()), int(np.ceil(lengths.sum() * 1.1 / ranks))))
    cuts: list[np.ndarray] = []
    start = 0
    while start < len(order):
        size = max(1, budget // int(lengths[order[start]]))
        cuts.append(order[start : start + size])
        start += size
    loads = [0] * ranks
    dealt: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for cut in sorted(cuts, key=lambda c: -int(lengths[c[0]]) * len(c)):
        rank = min(range(ranks), key=lambda r: loads[r])
        dealt[rank].append(cut)
        loads[rank] += int(lengths[cut[0]]) * len(cut)
    most = max((len(d) for d in dealt), default=0)
    return [d + [np.empty(0, np.int64)] * (most - len(d)) for d in dealt]
