"""Choose how many tokens to draft, by learned acceptance rates and step times.

A drafted token is verified in the next decode step. It is kept if it is the token that the step draws at its position, and if all
drafted tokens before it were kept. A draft therefore changes the time of a step and never what is sampled.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from placement.speed.robust_fit import MIN_NOISE, huber_weights, nonnegative, robust_sd

SOURCES = ("text", "model")  # where drafts come from; `Draft.source` is an index into it
MOST_TOKENS = 16  # limit on the drafted tokens of one sequence in one step
MODEL_SEQUENCES = 16  # sequences that a drafter drafts for at once and has a KV cache for: with more, verification costs more than it saves
PRIOR_WEIGHT = 4.0  # weight of the source's estimate, in tried tokens
FORGET_AFTER = 20_000  # tried tokens after which all earlier ones count half: a policy changes while it learns
AGE_EVERY = 50  # steps
HALF_LIFE = 1000  # steps after which a tried token counts half, so that what was refused for long is tried again
MATCH_EDGES = (2, 3, 5, 9)  # lower ends of the buckets of match lengths, after the first
POSITION_EDGES = (1, 2, 4, 8)  # lower ends of the buckets of positions in the draft (from 0), after the first
ESTIMATE_BUCKETS = 10
FIT_ROUNDS = 4  # of reweighting in a fit
PRIOR_STEPS = 0.5  # weight of the earlier terms in a fit, in steps. They alone determine a term that does not vary
SCARCE_PRIOR_STEPS = 8.0  # the same where fewer than `TRIAL_STEPS` steps with drafts could disprove terms that were measured before
BASE_PRIOR_STEPS = 0.01  # weight of 0 in a first fit for the constant term, which explains what no other term needs to
ALLOWED_LOSS = 0.005  # share of the decode time that attempts may cost, and the same share for reading texts
FIRST_BALANCE = 2.0  # time that attempts may cost at first, in steps
LEAST_BALANCE, MOST_BALANCE = -2.0, 8.0  # bounds of the balance, in steps
ENOUGH = 1.0  # steps on the balance from which it pays for reading texts too
TRIAL_STEPS = 16  # steps with drafts after which the cost of a drafted token counts as measured
TRIAL_TOKENS = 6  # most tokens drafted for a sequence until then. Their number varies, which tells a token's cost from a step's
LONGEST_REST = 16  # limit on the steps between two look-ups for a sequence without useful drafts
GAIN_RATE = 0.02  # weight of a look-up in the mean of what look-ups save
OPTIMISM = 1.0  # standard deviations by which unknown acceptance rates are taken to be better, while the balance pays for trials


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
    survivals: np.ndarray, step_s: float, verify_s: np.ndarray, overhead_s: float = 0.0, sequences: int | None = None
) -> list[int]:
    """Return how many tokens of each draft to verify, for the most tokens per second.

    survivals: (drafts, tokens), the probabilities of `Acceptance.survival`, which do not increase along a row. step_s: seconds of the
    step without drafts. verify_s: seconds that 1, 2, … drafted tokens add, as many as there are. A further token never adds less than
    the one before. overhead_s: seconds that verifying at all adds. sequences: of the step, if some have no draft.

    The expected tokens of a step are its sequences and the sum of the survivals that are chosen. The k greatest survivals are the
    best k tokens, and they are prefixes of the drafts, so the search over k is exact. Of equal rates the smallest k is taken.
    """
    rows, width = survivals.shape
    sequences = rows if sequences is None else sequences
    flat = survivals.ravel()
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


class StepTimes:
    """The time of an engine's decode step in seconds, learned from the steps.

    It is a + b · sequences + c · context tokens + v · drafted tokens + f + Σ h · max(0, rows - knot). The term f applies to steps that
    verify drafts. `rows` are sequences and drafted tokens together. A step with few rows takes as long as reading the weights;
    beyond the knots it computes longer, which the terms h add. Without them the cheap drafts of a tail would make those of full steps
    look cheap.
    """

    KNOTS = (8, 128)  # rows: about where cores and GPUs begin to compute longer than they read
    TERMS = 5 + len(KNOTS)
    FIRST, EVERY = 32, 128  # steps before the first fit, and between two later ones
    KEPT = 256  # newest steps of each kind, with and without drafts, that a fit uses

    def __init__(self) -> None:
        self.steps: tuple[deque[tuple[float, ...]], ...] = (deque(maxlen=self.KEPT), deque(maxlen=self.KEPT))
        self.terms = None
        self.trials = 0  # steps with drafts so far
        self.count = 0  # steps so far
        self.was_known = False  # whether the cost of a drafted token was measured before the last fit
        self._until_fit = self.FIRST

    @property
    def terms(self) -> np.ndarray | None:
        """The fitted terms, None before the first fit. They are replaced, and never changed in place."""
        return self._terms

    @terms.setter
    def terms(self, terms: np.ndarray | None) -> None:
        self._terms = terms
        self._numbers: list[float] = [] if terms is None else terms.tolist()
        self._costs = 0, np.zeros(0)  # sequences, and what `costs_s` returns for them

    def observe(self, sequences: int, context_tokens: int, drafted: int, seconds: float) -> None:
        """Add a step. seconds: without the time of looking up drafts."""
        self.add(sequences, context_tokens, drafted, seconds)
        self._until_fit -= 1
        if self._until_fit <= 0 or (self.trials == TRIAL_STEPS and drafted):
            self._until_fit = self.EVERY if self.is_known else self.FIRST
            self.fit()

    def add(self, sequences: int, context_tokens: int, drafted: int, seconds: float) -> None:
        """Add a step without a fit."""
        self.count += 1
        self.trials += drafted > 0
        terms = (1.0, sequences, context_tokens, drafted, float(drafted > 0), *self._beyond(sequences + drafted))
        self.steps[drafted > 0].append((self.count, *terms, seconds))

    def skip(self, steps: int) -> None:
        """Count steps that were not observed. With fits rarer for them, a drafter that became good was found later in simulations."""
        self._until_fit -= steps

    def _beyond(self, rows: int) -> list[float]:
        return [max(0.0, rows - knot) for knot in self.KNOTS]

    def fit(self) -> None:
        """Fit the terms to the newest steps, by relative errors and robustly. Without steps, leave them as they are.

        A machine may become slower or faster. So steps of one kind that are older than all kept ones of the other kind are left out, and
        earlier terms are scaled to the level of the steps.
        """
        oldest = max((kind[0][0] for kind in self.steps if kind), default=0)
        newest = [step for kind in self.steps for step in kind if step[0] >= oldest]
        if not newest:
            return
        table = np.array(newest)
        rows, seconds = table[:, 1:-1], table[:, -1]
        typical, scale = float(np.median(seconds)), np.maximum(rows.max(0), 1.0)
        prior = np.zeros(self.TERMS)
        predicted = np.full(len(seconds), typical)
        if self.terms is not None:
            plain = rows[:, 4] == 0
            plain = plain if plain.any() else ~plain
            expected = np.maximum(rows @ self.terms, 1e-9)
            level = float(np.median(seconds[plain] / expected[plain]))
            prior, predicted = self.terms * level * scale / typical, expected * level
        rows = rows / scale
        is_scarce = self.was_known and np.count_nonzero(rows[:, 4]) < TRIAL_STEPS
        strength = np.full(self.TERMS, SCARCE_PRIOR_STEPS if is_scarce else PRIOR_STEPS)
        if self.terms is None:
            strength[0] = BASE_PRIOR_STEPS
        self.was_known = self.is_known
        for _ in range(FIT_ROUNDS):
            residuals = np.log(seconds / predicted)
            residuals -= np.median(residuals)
            weights = huber_weights(residuals, max(robust_sd(residuals), MIN_NOISE))
            relative = rows * (typical / predicted)[:, None]
            gram = (relative * weights[:, None]).T @ relative + np.diag(strength)
            moment = relative.T @ (weights * seconds / predicted) + strength * prior
            terms = nonnegative(gram, moment) * typical
            predicted = np.maximum(rows @ terms, 0.1 * typical)
        self.terms = terms / scale

    @property
    def is_known(self) -> bool:
        """Whether the cost of a drafted token was measured."""
        return self.terms is not None and self.trials >= TRIAL_STEPS

    def step_s(self, sequences: int, context_tokens: int) -> float | None:
        """Return the expected seconds of a step without drafts, None before the first fit."""
        if self.terms is None:
            return None
        a, b, c, _, _, *beyond = self._numbers
        beyond_s = 0.0
        for knot, term in zip(self.KNOTS, beyond, strict=True):
            beyond_s += term * max(0.0, sequences - knot)
        return max(a + b * sequences + c * context_tokens + beyond_s, 1e-6)

    def verify_s(self, sequences: int, drafted: np.ndarray) -> np.ndarray:
        """Return the seconds (n,) that these numbers of drafted tokens (n,) add to a step, without `path_s`."""
        drafted = np.asarray(drafted, float)
        if self.terms is None:
            return np.zeros_like(drafted)
        seconds = self.terms[3] * drafted
        for knot, term in zip(self.KNOTS, self.terms[-len(self.KNOTS) :], strict=True):
            if term:
                seconds = seconds + term * (np.maximum(0, sequences + drafted - knot) - max(0, sequences - knot))
        return seconds

    def costs_s(self, sequences: int) -> np.ndarray:
        """Return `verify_s` of 1, 2, … tokens, up to the most that the drafts of a step with so many sequences may have."""
        if self._costs[0] != sequences:
            self._costs = sequences, self.verify_s(sequences, np.arange(1, sequences * MOST_TOKENS + 1))
        return self._costs[1]

    @property
    def path_s(self) -> float:
        """Seconds that a step takes longer because it verifies drafts."""
        return 0.0 if self.terms is None else self._numbers[4]

    def saved_s(self, running: int, context_tokens: int, drafted: int, accepted: int) -> float:
        """Return the seconds that verifying drafts has saved in a step, by the fitted times, without those of look-ups."""
        step_s = self.step_s(running, context_tokens)
        if step_s is None or not drafted:
            return 0.0
        known, costs_s = self._costs
        verify_s = costs_s[drafted - 1] if known == running and drafted <= len(costs_s) else self.verify_s(running, np.array(drafted))
        return step_s * accepted / max(running, 1) - float(verify_s) - self.path_s


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
            self.times.was_known = self.times.is_known


class Attempts:
    """Decides for which sequences an engine looks up drafts and how much is verified, so that attempts cannot lose much.

    The balance grows by the share `ALLOWED_LOSS` of each step's time. The time of look-ups and drafts is taken from it, and the time
    that they save is added. While it is used up, no drafts are looked up. Reading texts has an account of its own with the same income,
    because it would leave nothing for look-ups; a rich balance pays for it too. Unless look-ups save more than they take on average, a
    sequence without useful drafts rests for a number of steps that doubles each time.

    Steps before the next look-up that can be paid for are a pause. They are only counted, because deciding and learning in each of them
    takes 2 % of a step of 3 ms.
    """

    def __init__(self, learned: Learned) -> None:
        self.learned = learned
        self.balance = FIRST_BALANCE  # in steps
        self.reading = FIRST_BALANCE  # of the account for reading, in steps
        self.look_up_s = 0.0  # seconds to look up a draft for one sequence
        self.gain = 0.0  # tokens that verifying what a look-up found has gained, on average, less those that its time would make
        self.worth_s = 0.0  # seconds that a look-up is expected to save after this step
        self.looked = [0, 0]  # sequences that were looked up after this step, and after the one before
        self.number = 0  # number of the current step, without skipped steps that were not added yet
        self.pause = 0  # steps that are left of a pause
        self.skipped = 0  # steps of a pause that were not added yet
        self.rests: dict[str, tuple[int, int]] = {}  # by sequence: (step from which it may try again, length of its last rest)

    def skip_step(self) -> bool:
        """Return whether a step belongs to a pause. Nothing is looked up after such a step, and nothing is learned from it."""
        if not self.pause:
            return False
        self.pause -= 1
        self.skipped += 1
        return True

    def begin_step(self, running: int, context_tokens: int) -> int:
        """Count a step, and return for how many of its `running` sequences drafts may be looked up after it. 0 may begin a pause."""
        self._add_steps(1)
        self.pause = 0
        self.looked = [0, self.looked[0]]
        times = self.learned.times
        step_s = times.step_s(running, context_tokens)
        if step_s is None or not times.is_known:
            return max(1, running // 4) if self.number % 2 else 0
        self.worth_s = self.gain * step_s / max(running, 1)
        if self.balance <= 0:
            self.pause = int(-self.balance / ALLOWED_LOSS)
            return 0
        return min(running, max(1, int(self.balance * step_s / self.look_up_s))) if self.look_up_s else running

    def _add_steps(self, steps: int) -> None:
        """Count these steps and the skipped ones."""
        self.learned.times.skip(self.skipped)
        steps, self.skipped, before = steps + self.skipped, 0, self.number
        self.number += steps
        if periods := self.number // AGE_EVERY - before // AGE_EVERY:
            self.learned.acceptance.age(AGE_EVERY * periods)
        if self.learned.times.is_known:
            self.balance = min(self.balance + ALLOWED_LOSS * steps, MOST_BALANCE)
            self.reading = min(self.reading + ALLOWED_LOSS * steps, FIRST_BALANCE)

    def choose(self, drafts: DraftTable, running: int, context_tokens: int) -> list[int]:
        """Return how many tokens of each draft the next step verifies.

        The drafts are of some of its `running` sequences. While the balance pays for trials, rates that are little known are taken to be
        better than their mean.
        """
        times = self.learned.times
        step_s = times.step_s(running, context_tokens)
        if step_s is None or not times.is_known:
            return np.minimum(1 + times.trials % TRIAL_TOKENS, np.count_nonzero(drafts.estimates, axis=1)).tolist()
        survival = self.learned.acceptance.survival(drafts, OPTIMISM if self.balance > 0 else 0.0)
        return choose_lengths(survival, step_s, times.costs_s(running), times.path_s, running)

    def due(self, names: Sequence[str], most: int) -> list[int]:
        """Return the positions of at most `most` sequences that may try, those whose drafts did best first."""
        pays = self.worth_s > self.look_up_s
        if not self.rests or (pays and len(names) <= most):
            return list(range(min(len(names), most)))
        rests = [self.rests.get(name, (0, 0)) for name in names]
        rested = [i for i, (until, _) in enumerate(rests) if pays or until <= self.number]
        return rested if len(rested) <= most else sorted(rested, key=lambda i: rests[i][1])[:most]

    def pause_until_due(self, names: Collection[str]) -> None:
        """Pause until one of these sequences, which all rest, may try again."""
        self.pause = min((self.rests[name][0] for name in names), default=self.number + 1) - self.number - 1

    def forget_all_but(self, names: Sequence[str]) -> None:
        """Forget the rests of all sequences except these."""
        for name in self.rests.keys() - set(names) if self.rests else ():
            del self.rests[name]

    def forget(self, name: str) -> None:
        """Let a sequence try again at once."""
        self.rests.pop(name, None)

    def note(self, names: Sequence[str], succeeded: Collection[str]) -> None:
        """Record which look-ups gave drafts that are worth being verified."""
        rests = self.rests
        for name in rests.keys() & succeeded:
            del rests[name]
        for name in names:
            if name not in succeeded:
                rest = min(max(1, 2 * rests.get(name, (0, 0))[1]), LONGEST_REST)
                rests[name] = self.number + rest, rest

    def observe_look_up(self, seconds: float, sequences: int) -> None:
        """Record that looking up drafts for so many sequences took `seconds`."""
        self.looked[0] = sequences
        each = seconds / sequences
        self.look_up_s += 0.1 * (each - self.look_up_s) if self.look_up_s else each

    def settle(self, running: int, context_tokens: int, drafted: int, accepted: int, draft_s: float) -> None:
        """Add what a step with drafts or look-ups has saved, which may be negative."""
        times = self.learned.times
        saved_s, step_s = times.saved_s(running, context_tokens, drafted, accepted), times.step_s(running, context_tokens)
        if step_s is not None and (looked := self.looked[1]):
            self.gain += (1 - (1 - GAIN_RATE) ** looked) * (saved_s * running / (step_s * looked) - self.gain)
        self.balance = self._after(self.balance, draft_s - saved_s, running, context_tokens)

    @property
    def may_read(self) -> bool:
        """Whether there is time to add a text to those that drafts come from."""
        if self.skipped:
            self._add_steps(0)
        return self.reading > 0 or self.balance > ENOUGH

    def pay_reading(self, seconds: float, running: int, context_tokens: int) -> None:
        """Take the seconds of reading a text from an account. `running`, `context_tokens`: of a step, whose time is the unit."""
        if self.balance > ENOUGH:
            self.balance = self._after(self.balance, seconds, running, context_tokens)
        else:
            self.reading = self._after(self.reading, seconds, running, context_tokens)

    def _after(self, account: float, seconds: float, running: int, context_tokens: int) -> float:
        step_s = self.learned.times.step_s(running, context_tokens)
        if step_s is None or not self.learned.times.is_known:
            return account
        return min(max(account - seconds / step_s, LEAST_BALANCE), MOST_BALANCE)
