"""Tokenized rows of a supervised stage, and their batches and micro-batches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batches import MicroBatch, PromptSharing
from rlhfless_ray.learn.packing import MOST_WORK, Units, end_to_end
from rlhfless_ray.learn.packing import padded as pack

TITLES = {  # of what determines the rows of a step
    "rows": "the number of training rows",
    "batch_rows": "data.batch_rows",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "drops": "data.remainder=drop",
    "carries": "data.remainder=carry",
    "checksum": "the checksum of the training rows' tokens",
    "labels": "the checksum of the training rows' labels and margins",
}


@dataclass(frozen=True)
class Example:
    """A sequence of token ids. `context_tokens`: number of tokens before the first that may be trained (at least 1)."""

    tokens: Sequence[int]
    context_tokens: int
    mask: np.ndarray | None = None  # (tokens after the context,) bool; None: all
    labels: Sequence[float] = ()  # a label for each trained token, or none


@dataclass(frozen=True)
class Examples:
    """Sequences end to end. A row has `per_row` consecutive sequences; a pair has the chosen one, then the rejected one.

    Attributes:
        tokens: (Σ length,) int32.
        context_lengths, lengths: (sequences,) int64.
        mask: (Σ length,) bool: the tokens that are trained.
        extras: (rows,) float32: margin or label of each row.
        labels: (trained tokens,) float32, or empty.
    """

    tokens: np.ndarray
    context_lengths: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    extras: np.ndarray
    labels: np.ndarray
    per_row: int = 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[Example]], extras: Sequence[float]) -> Examples:
        sequences = [sequence for row in rows for sequence in row]
        masks = []
        for sequence in sequences:
            trained = np.zeros(len(sequence.tokens), bool)
            trained[sequence.context_tokens :] = True if sequence.mask is None else sequence.mask
            masks.append(trained)
        return cls(
            tokens=np.concatenate([np.asarray(sequence.tokens, np.int32) for sequence in sequences] or [np.empty(0, np.int32)]),
            context_lengths=np.array([sequence.context_tokens for sequence in sequences], np.int64),
            lengths=np.array([len(sequence.tokens) for sequence in sequences], np.int64),
            mask=np.concatenate(masks or [np.empty(0, bool)]),
            extras=np.asarray(extras, np.float32),
            labels=np.concatenate([np.asarray(sequence.labels, np.float32) for sequence in sequences] or [np.empty(0, np.float32)]),
            per_row=len(rows[0]) if rows else 1,
        )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.extras)

    @property
    def checksum(self) -> str:
        """Checksum of the sequences and of what is trained of them."""
        found = 0
        for part in (self.tokens, self.lengths, self.context_lengths, self.mask):
            found = zlib.crc32(part.tobytes(), found)
        return f"{found:08x}"

    @property
    def label_checksum(self) -> str:
        """Checksum of the labels and margins."""
        return f"{zlib.crc32(self.labels.tobytes(), zlib.crc32(self.extras.tobytes())):08x}"

    @cached_property
    def starts(self) -> np.ndarray:
        """Place of each sequence's first token (sequences,)."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def label_ends(self) -> np.ndarray:
        """Number of trained tokens up to each sequence's end (sequences,)."""
        return np.cumsum(np.add.reduceat(self.mask, self.starts, dtype=np.int64))

    def longest_row(self, together: bool = True) -> int:
        """Return the tokens of the longest row, where a prompt counts once. `together`: its sequences are computed in one pass."""
        lengths, contexts = (x.reshape(-1, self.per_row) for x in (self.lengths, self.context_lengths))
        rows = contexts[:, 0] + (lengths - contexts).sum(axis=1) if together else lengths
        return int(rows.max(initial=0))

    def sequences_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of these rows' sequences."""
        return (np.asarray(rows)[:, None] * self.per_row + np.arange(self.per_row)).ravel()

    def labels_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the labels of these rows' trained tokens (trained tokens,), in the order of `batch`."""
        ends = self.label_ends
        return np.concatenate([self.labels[ends[i - 1] if i else 0 : ends[i]] for i in self.sequences_of(rows)])

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the sequences of these rows. `groups` are positions in `rows`. There are no log-probabilities and advantages."""
        numbers = self.sequences_of(rows)
        pieces = [slice(self.starts[i], self.starts[i] + self.lengths[i]) for i in numbers]
        contexts, lengths = self.context_lengths[numbers], self.lengths[numbers]
        masks = [self.mask[piece][context:] for piece, context in zip(pieces, contexts, strict=True)]
        mask = np.concatenate(masks or [np.empty(0, bool)])
        zeros = np.zeros(int(mask.sum()), np.float32)
        return Batch(
            tokens=np.concatenate([self.tokens[piece] for piece in pieces] or [np.empty(0)]).astype(np.int64),
            prompt_lengths=contexts,
            lengths=lengths,
            groups=np.repeat(np.arange(len(rows)), self.per_row),
            logprobs=zeros,
            advantages=zeros,
            mask=None if mask.all() else mask,
        )


class RankCut(NamedTuple):
    """A rank's micro-batches of a batch. `is_packed`: whether the rows of each lie end to end, see `micro_batch_tensors.packed`."""

    micro_batches: list[MicroBatch]
    is_packed: bool = False


def cut_rows(
    batch: Batch,
    together: np.ndarray,
    max_tokens: int,
    sharing: PromptSharing,
    rank: int = 0,
    ranks: int = 1,
    packed_tokens: int | None = None,
) -> RankCut:
    """Divide sequences of a batch into micro-batches of at most `max_tokens` padded tokens. Returns those of one rank.

    Args:
        batch: The batch.
        together: (units, sequences of each) indices of sequences. Those of a unit are always in the same micro-batch, and in the same
            row if they share enough of a prompt.
        max_tokens, sharing, rank, ranks: see `micro_batches`.
        packed_tokens: most tokens of a micro-batch of packed rows, see `end_to_end`; None: rows are not packed.
    """
    lengths, contexts = batch.lengths[together], batch.prompt_lengths[together]
    shared = contexts[:, 0] + (lengths - contexts).sum(axis=1)
    whole = lengths.sum(axis=1)
    apart = lengths.shape[1] * lengths.max(axis=1)  # padded to the longest of the unit, so at least `whole`
    fits = shared.max(initial=0) <= max_tokens and (sharing.window is None or lengths.max(initial=0) <= sharing.window)
    saves = lengths.shape[1] > 1 and shared.sum() <= MOST_WORK * apart.sum()
    shares = bool(fits and saves) and not sharing.obstacle and _have_same_contexts(batch, together)
    if packed_tokens is not None:
        shares_packed = shares and shared.sum() <= MOST_WORK * whole.sum()
        units = Units(shared, masked=True) if shares_packed else Units(whole, apart, lengths.shape[1])
        if (packed := end_to_end(units, packed_tokens, sharing.width, ranks)) is not None:
            return RankCut([_rows(together[part], shares_packed) for part in packed[rank]], True)
    parts = pack(shared if shares else apart, max_tokens, ranks)
    return RankCut([_rows(together[part], shares) for part in parts[rank]])


def _have_same_contexts(batch: Batch, together: np.ndarray) -> bool:
    """Return whether the sequences of each unit begin with the same context."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    for unit in together:
        first, *others = (batch.tokens[starts[i] : starts[i] + batch.prompt_lengths[i]] for i in unit)
        if not all(np.array_equal(first, other) for other in others):
            return False
    return True


def _rows(units: np.ndarray, shares: bool) -> MicroBatch:
    """Return the rows of a micro-batch: a row for each unit if its sequences share one, else for each sequence."""
    return list(units if shares else units.reshape(-1, 1))


@dataclass(frozen=True)
class RowOrder:
    """The rows of each optimizer step: every row once per epoch, in an order that follows from the seed.

    Examples:
        >>> order = RowOrder(rows=5, batch_rows=2, epochs=2, seed=0, shuffle=False, carries=True)
        >>> [order.step(number).tolist() for number in range(order.steps)]
        [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    """

    rows: int
    batch_rows: int
    epochs: int
    seed: int
    shuffle: bool = True
    drops: bool = False  # whether an epoch's last rows that do not fill a batch are dropped
    most_steps: int | None = None  # number of steps, instead of that of the epochs
    carries: bool = False  # whether these rows begin the next epoch's first batch instead
    checksum: str = ""  # of the rows
    labels: str = ""  # checksum of their labels and margins
    whole_batches: bool = False  # whether the schedule of the learning rate counts no batch that `carries` adds

    @property
    def steps_per_epoch(self) -> int:
        if self.carries:
            return max(1, self.rows // self.batch_rows)
        return self.rows // self.batch_rows if self.drops else -(-self.rows // self.batch_rows)

    @property
    def steps(self) -> int:
        if self.most_steps:
            return self.most_steps
        return self.epochs * self.rows // self.batch_rows if self.carries else self.epochs * self.steps_per_epoch

    @property
    def schedule_steps(self) -> int:
        """Number of steps of the learning rate's schedule."""
        is_whole = self.steps == self.epochs * self.rows // self.batch_rows  # not cut or extended by `most_steps`
        return self.epochs * self.steps_per_epoch if self.whole_batches and is_whole else self.steps

    def state(self) -> JsonObject:
        """Return what determines the rows of a step, ready for JSON."""
        return {name: getattr(self, name) for name in TITLES}

    def step(self, number: int) -> np.ndarray:
        """Return the rows of step `number`, counted from 0."""
        if self.carries:
            places = np.arange(number * self.batch_rows, (number + 1) * self.batch_rows)
            epochs = range(places[0] // self.rows, places[-1] // self.rows + 1)
            return np.concatenate([self._epoch(epoch)[places[places // self.rows == epoch] % self.rows] for epoch in epochs])
        epoch, within = divmod(number, self.steps_per_epoch)
        return self._epoch(epoch)[within * self.batch_rows : (within + 1) * self.batch_rows]

    def _epoch(self, number: int) -> np.ndarray:
        """Return the rows in the order of epoch `number`."""
        order = np.arange(self.rows)
        if self.shuffle:
            np.random.default_rng([self.seed % 2**63, 3, number]).shuffle(order)
        return order
