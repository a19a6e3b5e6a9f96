"""Drafts, the rates at which their tokens are accepted, and the choice of how many to verify."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

SOURCES = ("text", "model")  # where drafts come from; `Draft.source` is an index into it
MOST_TOKENS = 16  # limit on the drafted tokens of one sequence in one step
MODEL_SEQUENCES = 16  # sequences that a drafter drafts for at once and has a KV cache for: with more, verification costs more than it saves
PRIOR_WEIGHT = 4.0  # weight of the source's estimate, in tried tokens
FORGET_AFTER = 20_000  # tried tokens after which all earlier ones count half: a policy changes while it learns
HALF_LIFE = 1000  # steps after which a tried token counts half, so that what was refused for long is tried again
MATCH_EDGES = (2, 3, 5, 9)  # lower ends of the buckets of match lengths, after the first
POSITION_EDGES = (1, 2, 4, 8)  # lower ends of the buckets of positions in the draft (from 0), after the first
ESTIMATE_BUCKETS = 10


class Draft(NamedTuple):
    """Drafted tokens of one sequence. `estimates`: the source's probability of each, given those before. `match`: tokens of the
    sequence that the source has seen before these. `source`: index into `SOURCES`."""

    tokens: list[int]
    estimates: list[float]
    match: int
    source: int = 0


class Drafts(NamedTuple):
    """The drafts of several sequences, by column. See `Draft`."""

    tokens: list[list[int]]
    estimates: list[list[float]]
    matches: list[int]
    sources: list[int]

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> Drafts:
        return cls(*map(list, zip(*drafts, strict=True))) if drafts else cls([], [], [], [])

    def replace(self, row: int, draft: Draft) -> None:
        self.tokens[row], self.estimates[row], self.matches[row], self.sources[row] = draft


class DraftTable(NamedTuple):
    """Drafted tokens as arrays (drafts, tokens of the longest): the cell of each in `Acceptance`, and its estimate, 0 behind an end."""

    cells: np.ndarray
    estimates: np.ndarray


News = tuple[np.ndarray, np.ndarray]  # cells of drafted tokens that were tried (n,), and whether each was accepted (n,) bool


class Acceptance:
    """The acceptance rate of drafted tokens, learned by source, match length, position in the draft and the source's estimate.

    A cell's probability has a Beta distribution with the mean (4 · estimate + accepted) / (4 + tried): the source's own estimate until
    there is evidence.
    """

    SHAPE = (len(SOURCES), len(MATCH_EDGES) + 1, len(POSITION_EDGES) + 1, ESTIMATE_BUCKETS)
    COLUMNS = np.arange(MOST_TOKENS)
    POSITIONS = ESTIMATE_BUCKETS * np.searchsorted(POSITION_EDGES, COLUMNS, side="right")  # first cell of each position
    # The first cell of each source and match length, (sources, match lengths). Longer matches share the last one.
    FIRST_CELLS = np.arange(math.prod(SHAPE)).reshape(SHAPE)[
        :, np.searchsorted(MATCH_EDGES, np.arange(MATCH_EDGES[-1] + 1), side="right"), 0, 0
    ]

    def __init__(self) -> None:
        size = int(np.prod(self.SHAPE))
        self.tried, self.accepted = np.zeros(size), np.zeros(size)
        self.news: list[News] = []  # since the last `take_news`

    def survival(self, drafts: DraftTable, deviations: float = 0.0) -> np.ndarray:
        """Return (drafts, tokens of the longest) the probability that a token and all before it are accepted, 0 behind a draft's end.

        deviations: standard deviations of the distribution that are added to its mean.
        """
        cells, estimates = drafts
        weight = PRIOR_WEIGHT + self.tried[cells]
        chance = (PRIOR_WEIGHT * estimates + self.accepted[cells]) / weight
        if deviations:
            chance = chance + deviations * np.sqrt(chance * np.maximum(1.0 - chance, 0.0) / (weight + 1.0))
        return np.multiply.accumulate(np.minimum(chance, 1.0) * (estimates > 0), axis=1)

    def observe(self, cells: np.ndarray, drafted: ArrayLike, accepted: ArrayLike) -> None:
        """Learn from a step: of each draft the first `drafted` tokens were verified, and the first `accepted` of these were accepted.

        cells: (drafts, tokens), as in `DraftTable`. Tokens after the first refused one were not tried.
        """
        hits = np.asarray(accepted)[:, None]
        columns = self.COLUMNS[: cells.shape[1]]
        tried = columns < np.minimum(hits + 1, np.asarray(drafted)[:, None])
        news = cells[tried], (columns < hits)[tried]
        self._add(*news)
        self.news.append(news)

    def _add(self, cells: np.ndarray, hits: np.ndarray) -> None:
        self.tried += np.bincount(cells, minlength=len(self.tried))
        self.accepted += np.bincount(cells[hits], minlength=len(self.tried))
        if self.tried.sum() > FORGET_AFTER:
            self.tried /= 2
            self.accepted /= 2

    def age(self, steps: float) -> None:
        """Let what was tried before these steps of an engine count less."""
        left = 0.5 ** (steps / HALF_LIFE)
        self.tried *= left
        self.accepted *= left

    def take_news(self) -> list[News]:
        """Return what was observed since the last call, for `merge`."""
        news, self.news = self.news, []
        return news

    def merge(self, news: Sequence[News]) -> None:
        """Add what another engine has observed."""
        for cells, hits in news:
            self._add(cells, hits)

    @classmethod
    def tabulate(cls, drafts: Drafts) -> DraftTable:
        """Return the drafts as arrays."""
        if not drafts.tokens:
            return DraftTable(np.zeros((0, 0), int), np.zeros((0, 0)))
        counts = [*map(len, drafts.tokens)]
        columns = cls.COLUMNS[: max(counts)]
        estimates = np.zeros((len(counts), len(columns)))
        inside = columns < np.array(counts)[:, None]
        estimates[inside] = np.fromiter(itertools.chain.from_iterable(drafts.estimates), float, sum(counts))
        cells = (estimates * ESTIMATE_BUCKETS).astype(int)  # for now only the bucket of the estimate
        np.minimum(cells, ESTIMATE_BUCKETS - 1, out=cells)
        cells += cls.POSITIONS[: len(columns)]
        cells += cls.FIRST_CELLS[drafts.sources, np.minimum(drafts.matches, MATCH_EDGES[-1])][:, None]
        return DraftTable(cells, estimates)


def choose_lengths(
    survivals: np.ndarray,
    step_s: float,
    verify_s: np.ndarray,
    overhead_s: float = 0.0,
    sequences: float | None = None,
    values: np.ndarray | None = None,
) -> list[int]:
    """Return how many tokens of each draft to verify, for the most value of tokens per second.

    survivals: (drafts, tokens), the probabilities of `Acceptance.survival`, which do not increase along a row. step_s: seconds of the
    step without drafts. verify_s: seconds that 1, 2, … drafted tokens add, as many as there are. A further token never adds less than
    the one before. overhead_s: seconds that verifying at all adds. values: (drafts,) what a token of each draft is worth, see
    `token_values`; 1 by default. sequences: value of one token of each sequence of the step, if some have no draft.

    The expected value of a step is that of its sequences and of the survivals that are chosen. The k greatest survivals times values are
    the best k tokens, and they are prefixes of the drafts, so the search over k is exact. Of equal rates the smallest k is taken.
    """
    rows, width = survivals.shape
    sequences = (rows if values is None else float(values.sum())) if sequences is None else sequences
    flat = (survivals if values is None else survivals * values[:, None]).ravel()
    rate = sequences / step_s  # without drafts
    # A token that brings less than this rate for the least that it adds is not among the best.
    order = (flat > rate * verify_s[0] * (1 - 1e-9) if len(verify_s) else flat).nonzero()[0]
    if not len(order):
        return [0] * rows
    found = flat[order]
    best_first = (-found).argsort(kind="stable")
    rates = (sequences + found[best_first].cumsum()) / (step_s + overhead_s + verify_s[: len(order)])
    best = int(rates.argmax())
    if rates[best] <= rate:
        return [0] * rows
    return np.bincount(order[best_first[: best + 1]] // width, minlength=rows).tolist()
