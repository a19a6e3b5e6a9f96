"""Choose how many tokens to draft, by learned acceptance rates and step times.

A drafted token is verified in the next decode step. It is kept if it is the token that the step draws at its position, and if all
drafted tokens before it were kept. A draft therefore changes the time of a step and never what is sampled.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.speed.robust_fit import nonnegative

SOURCES = ("text", "model")  # where drafts come from; `Draft.source` is an index into it
MOST_TOKENS = 16  # limit on the drafted tokens of one sequence in one step
MODEL_SEQUENCES = 16  # sequences that a drafter drafts for at once and has a KV cache for: with more, verification costs more than it saves
PRIOR_WEIGHT = 4.0  # weight of the source's estimate, in tried tokens
FORGET_AFTER = 20_000  # tried tokens after which all earlier ones count half: a policy changes while it learns
MATCH_EDGES = (2, 3, 5, 9)  # lower ends of the buckets of match lengths, after the first
POSITION_EDGES = (1, 2, 4, 8)  # lower ends of the buckets of positions in the draft (from 0), after the first
ESTIMATE_BUCKETS = 10
OUTLIER = 5.0  # multiple of the median step time from which a step is left out of a fit
PRIOR_STEPS = 0.5  # weight of the earlier terms in a fit, in steps. They alone determine a term that does not vary
ALLOWED_LOSS = 0.005  # share of the decode time that attempts may cost
FIRST_BALANCE = 2.0  # time that attempts may cost at first, in steps
LEAST_BALANCE, MOST_BALANCE = -2.0, 8.0  # bounds of the balance, in steps
TRIAL_STEPS = 16  # steps with drafts after which the cost of a drafted token counts as measured
LONGEST_REST = 64  # limit on the steps between two look-ups for a sequence whose drafts are refused


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one sequence. `estimates`: the source's probability of each, given those before. `match`: tokens of the
    sequence that the source has seen before these. `source`: index into `SOURCES`."""

    tokens: list[int]
    estimates: list[float]
    match: int
    source: int = 0


NOTHING = Draft([], [], 0)


News = tuple[np.ndarray, np.ndarray]  # cells of drafted tokens that were tried (n,), and whether each was accepted (n,) bool


class Acceptance:
    """The acceptance rate of drafted tokens, learned by source, match length, position in the draft and the source's estimate.

    A cell's probability is (4 · mean estimate + accepted) / (4 + tried): the source's own estimate until there is evidence.
    """

    SHAPE = (len(SOURCES), len(MATCH_EDGES) + 1, len(POSITION_EDGES) + 1, ESTIMATE_BUCKETS)
    POSITIONS = np.searchsorted(POSITION_EDGES, np.arange(MOST_TOKENS), side="right")

    def __init__(self) -> None:
        size = int(np.prod(self.SHAPE))
        self.tried, self.accepted = np.zeros(size), np.zeros(size)
        self.news: list[News] = []  # since the last `take_news`

    def survival(self, drafts: Sequence[Draft]) -> np.ndarray:
        """Return (drafts, MOST_TOKENS) the probability that a token and all before it are accepted, 0 behind a draft's end."""
        cells, estimates = self._cells_of(drafts)
        chance = (PRIOR_WEIGHT * estimates + self.accepted[cells]) / (PRIOR_WEIGHT + self.tried[cells])
        return np.cumprod(np.where(estimates > 0, np.minimum(chance, 1.0), 0.0), axis=1)

    def observe(self, drafts: Sequence[Draft], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step: of each draft the first `drafted` tokens were verified, and the first `accepted` of these were accepted.

        Tokens after the first refused one were not tried.
        """
        if not drafts:
            return
        hits = np.array(accepted, int)
        tried = np.minimum(hits + 1, drafted)
        column = np.arange(MOST_TOKENS)
        cells = self._cells_of(drafts)[0][column < tried[:, None]]
        news = cells, (column < hits[:, None])[column < tried[:, None]]
        self._add(*news)
        self.news.append(news)

    def _add(self, cells: np.ndarray, hits: np.ndarray) -> None:
        self.tried += np.bincount(cells, minlength=len(self.tried))
        self.accepted += np.bincount(cells[hits], minlength=len(self.tried))
        if self.tried.sum() > FORGET_AFTER:
            self.tried /= 2
            self.accepted /= 2

    def take_news(self) -> list[News]:
        """Return what was observed since the last call, for `merge`."""
        news, self.news = self.news, []
        return news

    def merge(self, news: Sequence[News]) -> None:
        """Add what another engine has observed."""
        for cells, hits in news:
            self._add(cells, hits)

    def _cells_of(self, drafts: Sequence[Draft]) -> tuple[np.ndarray, np.ndarray]:
        """Return (drafts, MOST_TOKENS) the cell of each token, and its estimate, 0 behind a draft's end."""
        counts = np.array([len(draft.tokens) for draft in drafts], int)
        estimates = np.zeros((len(drafts), MOST_TOKENS))
        estimates[np.arange(MOST_TOKENS) < counts[:, None]] = np.fromiter(
            itertools.chain.from_iterable(draft.estimates for draft in drafts), float, counts.sum()
        )
        match = np.searchsorted(MATCH_EDGES, [draft.match for draft in drafts], side="right")[:, None]
        source = np.array([draft.source for draft in drafts], int)[:, None]
        bucket = np.minimum((estimates * ESTIMATE_BUCKETS).astype(int), ESTIMATE_BUCKETS - 1)
        return ((source * self.SHAPE[1] + match) * self.SHAPE[2] + self.POSITIONS) * ESTIMATE_BUCKETS + bucket, estimates


def choose_lengths(
    survivals: np.ndarray,
    step_s: float,
    verify_s: Callable[[np.ndarray], np.ndarray],
    overhead_s: float = 0.0,
    sequences: int | None = None,
) -> list[int]:
    """Return how many tokens of each draft to verify, for the most tokens per second.

    survivals: (drafts, tokens), the probabilities of `Acceptance.survival`, which do not increase along a row. step_s: seconds of the
    step without drafts. verify_s: numbers of drafted tokens (n,) → seconds that so many add. overhead_s: seconds that verifying at all
    adds. sequences: of the step, if some have no draft.

    The expected tokens of a step are its sequences and the sum of the survivals that are chosen. The k greatest survivals are the
    best k tokens, and they are prefixes of the drafts, so the search over k is exact. Of equal rates the smallest k is taken.
    """
    rows, width = survivals.shape
    sequences = rows if sequences is None else sequences
    flat = survivals.ravel()
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    if not len(order):
        return [0] * rows
    rates = (sequences + np.cumsum(flat[order])) / (step_s + overhead_s + verify_s(np.arange(1, len(order) + 1)))
    best = int(np.argmax(rates))
    if rates[best] <= sequences / step_s:
        return [0] * rows
    return np.bincount(order[: best + 1] // width, minlength=rows).tolist()


class StepTimes:
    """The time of an engine's decode step in seconds, learned from the steps.

    It is a + b · sequences + c · context tokens + v · drafted tokens + f + Σ h · max(0, rows - knot). The term f applies to steps that
    verify or look up drafts. `rows` are sequences and drafted tokens together. A step with few rows takes as long as reading the weights;
    beyond the knots it computes longer, which the terms h add. Without them the cheap drafts of a tail would make those of full steps
    look cheap.
    """

    KNOTS = (8, 128)  # rows: about where cores and GPUs begin to compute longer than they read
    TERMS = 5 + len(KNOTS)
    FIRST, EVERY = 32, 128  # steps before the first fit, and between two later ones
    KEPT = 256  # newest steps of each kind, with and without drafts, that a fit uses

    def __init__(self) -> None:
        self.steps: tuple[deque[tuple[float, ...]], ...] = (deque(maxlen=self.KEPT), deque(maxlen=self.KEPT))
        self.terms: np.ndarray | None = None
        self.trials = 0  # steps with drafts so far
        self._until_fit = self.FIRST

    def observe(self, sequences: int, context_tokens: int, drafted: int, seconds: float, verifies: bool | None = None) -> None:
        """Add a step. seconds: without the time of looking up drafts. verifies: whether it went through the verifying path."""
        self.add(sequences, context_tokens, drafted, seconds, verifies)
        self._until_fit -= 1
        if self._until_fit <= 0:
            self._until_fit = self.EVERY if self.is_known else self.FIRST
            self.fit()

    def add(self, sequences: int, context_tokens: int, drafted: int, seconds: float, verifies: bool | None = None) -> None:
        """Add a step without a fit."""
        self.trials += drafted > 0
        path = float(drafted > 0 if verifies is None else verifies)
        self.steps[drafted > 0].append((1.0, sequences, context_tokens, drafted, path, *self._beyond(sequences + drafted), seconds))

    def _beyond(self, rows: int) -> list[float]:
        return [max(0.0, rows - knot) for knot in self.KNOTS]

    def fit(self) -> None:
        """Fit the terms to the newest steps. Without steps, leave them as they are."""
        table = np.array([*self.steps[0], *self.steps[1]])
        if not len(table):
            return
        seconds = table[:, -1]
        usual = seconds <= OUTLIER * np.median(seconds)  # a step that another process delayed does not show the time of its work
        rows, seconds = table[usual, :-1], seconds[usual]
        scale = np.maximum(rows.max(0), 1.0)
        rows = rows / scale
        gram = rows.T @ rows + PRIOR_STEPS * np.eye(rows.shape[1])
        moment = rows.T @ seconds
        if self.terms is not None:
            moment = moment + PRIOR_STEPS * self.terms * scale
        self.terms = nonnegative(gram, moment) / scale

    @property
    def is_known(self) -> bool:
        """Whether the cost of a drafted token was measured."""
        return self.terms is not None and self.trials >= TRIAL_STEPS

    def step_s(self, sequences: int, context_tokens: int) -> float | None:
        """Return the expected seconds of a step without drafts, None before the first fit."""
        if self.terms is None:
            return None
        return max(float(self.terms @ (1.0, sequences, context_tokens, 0, 0, *self._beyond(sequences))), 1e-6)

    def verify_s(self, sequences: int, drafted: np.ndarray) -> np.ndarray:
        """Return the seconds (n,) that these numbers of drafted tokens (n,) add to a step, without `path_s`."""
        drafted = np.asarray(drafted, float)
        if self.terms is None:
            return np.zeros_like(drafted)
        seconds = self.terms[3] * drafted
        for knot, term in zip(self.KNOTS, self.terms[-len(self.KNOTS) :], strict=True):
            seconds = seconds + term * (np.maximum(0, sequences + drafted - knot) - max(0, sequences - knot))
        return seconds

    @property
    def path_s(self) -> float:
        """Seconds that a step takes longer because it may verify drafts."""
        return 0.0 if self.terms is None else float(self.terms[4])

    def saved_s(self, running: int, context_tokens: int, drafted: int, accepted: int, draft_s: float) -> float:
        """Return the seconds that a step with drafts saved against steps without, by the fitted times. 0 before the first fit."""
        step_s = self.step_s(running, context_tokens)
        if step_s is None or not (drafted or draft_s):
            return 0.0
        return step_s * accepted / max(running, 1) - float(self.verify_s(running, np.array(drafted))) - self.path_s - draft_s


class Learned:
    """What a run knows about its drafts: acceptance and step times. Engines and driver exchange it, and checkpoints keep it."""

    def __init__(self) -> None:
        self.acceptance, self.times = Acceptance(), StepTimes()

    def state(self) -> dict[str, Any]:
        """Return it as JSON-serialisable values."""
        used = np.flatnonzero(self.acceptance.tried)
        return {
            "cells": used.tolist(),
            "tried": self.acceptance.tried[used].tolist(),
            "accepted": self.acceptance.accepted[used].tolist(),
            "terms": None if self.times.terms is None else self.times.terms.tolist(),
            "trials": self.times.trials,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Replace the learned values by those of a state. The steps measured here still count in later fits."""
        if not state:
            return
        self.acceptance.tried[:] = self.acceptance.accepted[:] = 0.0
        self.acceptance.tried[state["cells"]], self.acceptance.accepted[state["cells"]] = state["tried"], state["accepted"]
        if state["terms"] is not None:
            known = state["terms"]  # fewer in older checkpoints
            self.times.terms = np.array([*known, *[0.0] * (StepTimes.TERMS - len(known))])
            self.times.trials = state["trials"]


class Attempts:
    """Decides for which sequences an engine looks up drafts, so that attempts cannot lose much.

    The balance grows by the share `ALLOWED_LOSS` of each step's time. The time of look-ups and drafts is taken from it, and the time
    that they save is added. While it is used up, no drafts are looked up. A sequence whose drafts were refused, or that had none, rests
    for a number of steps that doubles each time.
    """

    def __init__(self, learned: Learned) -> None:
        self.learned = learned
        self.balance = FIRST_BALANCE  # in steps
        self.look_up_s = 0.0  # seconds to look up a draft for one sequence
        self.number = 0  # number of the current step
        self.rests: dict[str, tuple[int, int]] = {}  # by sequence: (step from which it may try again, length of its last rest)

    def begin_step(self, running: int, context_tokens: int) -> int:
        """Count a step, and return for how many sequences drafts may be looked up in it."""
        self.number += 1
        times = self.learned.times
        step_s = times.step_s(running, context_tokens)
        if step_s is None or not times.is_known:
            return max(1, running // 4) if self.number % 2 else 0
        self.balance = min(self.balance + ALLOWED_LOSS, MOST_BALANCE)
        affordable = max(self.balance * step_s - times.path_s, 0.0)
        return min(running, int(affordable / self.look_up_s)) if self.look_up_s else int(affordable > 0)

    def due(self, names: Sequence[str], most: int) -> list[int]:
        """Return the positions of at most `most` sequences that may try, those whose drafts did best first."""
        rests = [self.rests.get(name, (0, 0)) for name in names]
        rested = [i for i, (until, _) in enumerate(rests) if until <= self.number]
        return rested if len(rested) <= most else sorted(rested, key=lambda i: rests[i][1])[:most]

    def forget_all_but(self, names: Sequence[str]) -> None:
        """Forget the rests of all sequences except these."""
        gone = self.rests.keys() - set(names)
        for name in gone:
            del self.rests[name]

    def forget(self, name: str) -> None:
        """Let a sequence try again at once."""
        self.rests.pop(name, None)

    def note(self, name: str, succeeded: bool) -> None:
        """Record whether a look-up gave a draft, or a draft at least one token."""
        rest = 0 if succeeded else min(max(1, 2 * self.rests.get(name, (0, 0))[1]), LONGEST_REST)
        self.rests[name] = (self.number + rest, rest)

    def observe_look_up(self, seconds: float, sequences: int) -> None:
        """Record that looking up drafts for so many sequences took `seconds`."""
        each = seconds / sequences
        self.look_up_s += 0.1 * (each - self.look_up_s) if self.look_up_s else each

    def settle(self, running: int, context_tokens: int, drafted: int, accepted: int, draft_s: float) -> None:
        """Add what a step with drafts or look-ups has saved, which may be negative."""
        self.spend(-self.learned.times.saved_s(running, context_tokens, drafted, accepted, draft_s), running, context_tokens)

    def spend(self, seconds: float, running: int, context_tokens: int) -> None:
        """Take seconds from the balance. `running`, `context_tokens`: of a step, whose time is the balance's unit."""
        step_s = self.learned.times.step_s(running, context_tokens)
        if step_s is not None and self.learned.times.is_known:
            self.balance = min(max(self.balance - seconds / step_s, LEAST_BALANCE), MOST_BALANCE)
