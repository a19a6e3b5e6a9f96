"""Divide a batch into the share of each rank: its sequences, their micro-batches, and the lengths of all others for the loss.

Pure functions on numpy arrays, which the driver calls. So a rank gets only the part of the batch that it computes with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlhfless_ray.learn.batch import Batch, optimizer_steps
from rlhfless_ray.learn.micro_batches import MicroBatch, PromptSharing, dealt

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig


@dataclass(frozen=True)
class ShareStep:
    """One optimizer step. `indices`: its sequences in the whole batch, of all ranks. `cuts`: the rank's micro-batches, as indices
    into its share."""

    indices: np.ndarray
    cuts: list[MicroBatch]


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch.

    Attributes:
        batch: its sequences.
        indices: (sequences of the share,) their places in the whole batch, ascending.
        response_lengths: tokens of the policy in every sequence of the whole batch.
        passes: micro-batches of a pass over the whole batch, as indices into the share; empty if no pass is needed.
        steps: optimizer steps of an update.
        needs_old: whether a pass with the current weights comes before the steps.
    """

    batch: Batch
    indices: np.ndarray
    response_lengths: np.ndarray
    passes: list[MicroBatch] = field(default_factory=list)
    steps: list[ShareStep] = field(default_factory=list)
    needs_old: bool = False

    def __len__(self) -> int:
        """Number of sequences of the whole batch."""
        return len(self.response_lengths)

    @property
    def spans(self) -> np.ndarray:
        """(sequences of the share, 2): each one's first response token in the whole batch, and the token after its last."""
        ends = np.cumsum(self.response_lengths)[self.indices]
        return np.stack([ends - self.response_lengths[self.indices], ends], axis=1)

    @property
    def tokens(self) -> np.ndarray:
        """(response tokens of the share,): their places in the whole batch."""
        return positions_of(self.spans)


@dataclass(frozen=True)
class Cutter:
    """Rules for dividing a worker group's batches.

    Attributes:
        ranks: number of ranks that share a batch.
        max_tokens: padded tokens of a micro-batch.
        algorithm, seed, optimizer_steps: determine the sequences of each optimizer step; `optimizer_steps` is the number of steps
            done. `algorithm` None: the ranks make no steps.
        drops: whether a step's passes use dropout, so that they differ from those of the sampling policy.
    """

    ranks: int = 1
    max_tokens: int = 1
    sharing: PromptSharing | None = None
    algorithm: AlgorithmConfig | None = None
    seed: int = 0
    optimizer_steps: int = 0
    drops: bool = False

    def of_pass(self, batch: Batch) -> list[Share]:
        """Cut a forward pass over the batch."""
        return self._shares(batch, [], needs_old=True)

    def of_update(self, batch: Batch) -> list[Share]:
        """Cut an update into its optimizer steps."""
        assert self.algorithm is not None
        steps = optimizer_steps(batch, self.algorithm, [self.seed, self.optimizer_steps]) if len(batch) else []
        # With one optimizer step the old policy is the current one: its log-probabilities need no pass of their own.
        # Carried samples have another old policy than the current one.
        other = len(steps) > 1 or self.drops or batch.steps is not None
        return self._shares(batch, steps, needs_old=other and batch.old is None)

    def _shares(self, batch: Batch, steps: list[np.ndarray], needs_old: bool = False) -> list[Share]:
        everything = [np.arange(len(batch))] if needs_old and len(batch) else []
        by_rank = zip(*(dealt(batch, part, self.max_tokens, self.sharing, self.ranks) for part in (*everything, *steps)), strict=True)
        shares = [self._share(batch, list(cuts), steps, needs_old) for cuts in by_rank]
        return shares or [Share(batch, np.arange(len(batch)), batch.response_lengths)] * self.ranks

    def _share(self, batch: Batch, cuts: list[list[MicroBatch]], steps: list[np.ndarray], needs_old: bool) -> Share:
        """Return the share of a rank that computes `cuts`: of the pass, if one is needed, and of every step."""
        lengths, members, part = batch.response_lengths, np.arange(len(batch)), batch
        if self.ranks > 1:
            rows = [row for one in cuts for rows in one for row in rows]
            # a rank without work still joins the collectives, with a sequence at weight 0
            members = np.unique(np.concatenate(rows)) if rows else members[:1]
            part = batch.take(members)
            place = np.zeros(len(batch), np.int64)
            place[members] = np.arange(len(members))
            cuts = [[[place[row] for row in rows] for rows in one] for one in cuts]
        passes = cuts.pop(0) if needs_old else []
        return Share(part, members, lengths, passes, [ShareStep(*one) for one in zip(steps, cuts, strict=True)], needs_old)


def positions_of(spans: np.ndarray) -> np.ndarray:
    """Return all positions in these half-open spans (n, 2), one span after the other."""
    lengths = spans[:, 1] - spans[:, 0]
    return np.repeat(spans[:, 0] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def joined(replies: list[tuple[dict[str, np.ndarray], np.ndarray]]) -> dict[str, np.ndarray]:
    """Join the values of all ranks: {name: values of every response token of the batch}. A rank's values of other shares are 0.

    `replies`: (values of the share's tokens by name, the share's `spans`) of every rank.
    """
    total = max(int(spans[-1, 1]) if len(spans) else 0 for _, spans in replies)
    whole = {name: np.zeros(total, np.float32) for name in replies[0][0]}
    for values, spans in replies:
        places = positions_of(spans)
        for name, part in values.items():
            whole[name][places] += part
    return whole
