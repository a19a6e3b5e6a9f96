"""How many tokens to draft: what is learned about drafts, and which of them are worth their verification.

A drafted token is verified in the next decode step. It is kept if it is the token that the step draws at its position, and if all
drafted tokens before it were kept. A draft therefore changes the time of a step and never what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.speed.robust_fit import nonnegative

MOST_TOKENS = 16  # drafted for one sequence in one step
PRIOR_WEIGHT = 4.0  # tokens whose acceptance was seen weigh as much as the source's estimate
FORGET_AFTER = 20_000  # drafted tokens, after which older ones count half: a policy changes while it learns
MATCH_EDGES = (2, 3, 5, 9, 17)  # lower ends of the buckets of match lengths, after the first
POSITION_EDGES = (1, 2, 4, 8)  # of the position in the draft, from 0
ESTIMATE_BUCKETS = 10
OUTLIER = 5.0  # times the median step
RIDGE = 1e-6  # of a term at its greatest value: decides between terms that never varied apart


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one sequence. `estimates`: the source's probability of each, given those before. `match`: tokens of the
    sequence that the source has seen before these."""

    tokens: list[int]
    estimates: list[float]
    match: int


class Acceptance:
    """Learns how often drafted tokens are accepted, by match length, position in the draft and the source's estimate.

    A cell's probability is (4 · mean estimate + accepted) / (4 + tried): the source's own estimate until there is evidence.
    """

    def __init__(self) -> None:
        shape = (len(MATCH_EDGES) + 1, len(POSITION_EDGES) + 1, ESTIMATE_BUCKETS)
        self.tried, self.accepted = np.zeros(shape), np.zeros(shape)

    def survival(self, draft: Draft) -> np.ndarray:
        """Return for each drafted token the probability that it and all before it are accepted."""
        estimates, cells = np.asarray(draft.estimates, np.float64), self._cells(draft, len(draft.tokens))
        chance = (PRIOR_WEIGHT * estimates + self.accepted[cells]) / (PRIOR_WEIGHT + self.tried[cells])
        return np.cumprod(np.minimum(chance, 1.0))

    def observe(self, draft: Draft, drafted: int, accepted: int) -> None:
        """Learn from the first `drafted` tokens of a draft, of which the first `accepted` were accepted.

        Tokens after the first refused one were not tried.
        """
        tried = min(accepted + 1, drafted)
        cells = self._cells(draft, tried)
        np.add.at(self.tried, cells, 1.0)
        np.add.at(self.accepted, tuple(axis[:accepted] for axis in cells), 1.0)
        if self.tried.sum() > FORGET_AFTER:
            self.tried /= 2
            self.accepted /= 2

    @staticmethod
    def _cells(draft: Draft, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        match = np.full(count, np.searchsorted(MATCH_EDGES, draft.match, side="right"))
        position = np.searchsorted(POSITION_EDGES, np.arange(count), side="right")
        estimate = np.minimum((np.asarray(draft.estimates[:count]) * ESTIMATE_BUCKETS).astype(int), ESTIMATE_BUCKETS - 1)
        return match, position, estimate


def choose_lengths(survivals: Sequence[np.ndarray], step_s: float, verify_s: float, overhead_s: float = 0.0) -> list[int]:
    """Return how many tokens of each sequence's draft to verify, for the most tokens per second.

    survivals: for each sequence, the probabilities of `Acceptance.survival`, which do not increase. step_s: seconds of the step
    without drafts. verify_s: seconds that each drafted token adds. overhead_s: seconds that drafting at all adds.

    The expected tokens of a step are its sequences and the sum of the survivals that are chosen. The k greatest survivals are the
    best k tokens, and they are prefixes of the drafts, so the search over k is exact. Of equal rates the smallest k is taken.
    """
    sequences = len(survivals)
    flat = np.concatenate([np.asarray(part, np.float64) for part in survivals]) if sequences else np.zeros(0)
    if not len(flat):
        return [0] * sequences
    owner = np.repeat(np.arange(sequences), [len(part) for part in survivals])
    order = np.argsort(-flat, kind="stable")
    counts = np.arange(1, len(flat) + 1)
    rates = (sequences + np.cumsum(flat[order])) / (step_s + overhead_s + verify_s * counts)
    best = int(np.argmax(rates))
    if rates[best] <= sequences / step_s:
        return [0] * sequences
    return np.bincount(owner[order[: best + 1]], minlength=sequences).tolist()


class StepTimes:
    """Learns the time of an engine's decode step: a + b · sequences + c · context tokens + v · drafted tokens, in seconds."""

    EVERY = 32  # steps between two fits
    KEPT = 512  # newest steps that a fit is made of

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, float]] = []
        self.seconds: list[float] = []
        self.terms: np.ndarray | None = None
        self._unfitted = 0

    def observe(self, sequences: int, context_tokens: int, drafted: int, seconds: float) -> None:
        self.rows.append((1.0, sequences, context_tokens, drafted))
        self.seconds.append(seconds)
        self._unfitted += 1
        if self._unfitted >= self.EVERY:
            self._unfitted = 0
            del self.rows[: -self.KEPT], self.seconds[: -self.KEPT]
            self._fit()

    def _fit(self) -> None:
        seconds = np.array(self.seconds)
        usual = seconds <= OUTLIER * np.median(seconds)  # a step that another process delayed says nothing of its work
        rows = np.array(self.rows)[usual]
        scale = np.maximum(rows.max(0), 1.0)
        rows = rows / scale
        gram = rows.T @ rows + RIDGE * len(rows) * np.eye(rows.shape[1])
        self.terms = nonnegative(gram, rows.T @ seconds[usual]) / scale

    def step_s(self, sequences: int, context_tokens: int) -> float | None:
        """Return the expected seconds of a step without drafts, None before the first fit."""
        return None if self.terms is None else max(float(self.terms[:3] @ (1.0, sequences, context_tokens)), 1e-6)

    @property
    def verify_s(self) -> float:
        """Seconds that each drafted token adds to a step."""
        return 0.0 if self.terms is None else float(self.terms[3])
