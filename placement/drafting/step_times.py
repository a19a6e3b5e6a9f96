"""What a decode step takes with and without drafts."""

from __future__ import annotations

from collections import deque

import numpy as np

from placement.drafting.acceptance import MOST_TOKENS
from placement.speed.robust_fit import MIN_NOISE, huber_weights, nonnegative, robust_sd

FIT_ROUNDS = 4  # of reweighting in a fit
PRIOR_STEPS = 0.5  # weight of the earlier terms in a fit, in steps. They alone determine a term that does not vary
SCARCE_PRIOR_STEPS = 8.0  # the same where fewer than `TRIAL_STEPS` steps with drafts could disprove terms that were measured before
BASE_PRIOR_STEPS = 0.01  # weight of 0 in a first fit for the constant term, which explains what no other term needs to
TRIAL_STEPS = 16  # steps with drafts after which the cost of a drafted token counts as measured


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

    def rates(self, sequences: int, context_tokens: int) -> tuple[float, float] | None:
        """Return the seconds of a step that its rows do not change, and those that a further row adds. None before the first fit."""
        step_s = self.step_s(sequences, context_tokens)
        if step_s is None:
            return None
        row_s = float(self.costs_s(sequences)[sequences - 1]) / sequences
        return max(step_s - row_s * sequences, 0.1 * step_s), row_s

    @property
    def path_s(self) -> float:
        """Seconds that a step takes longer because it verifies drafts."""
        return 0.0 if self.terms is None else self._numbers[4]

    def saved_s(self, running: int, context_tokens: int, drafted: int, accepted: float) -> float:
        """Return the seconds that verifying drafts has saved in a step, by the fitted times, without those of look-ups."""
        step_s = self.step_s(running, context_tokens)
        if step_s is None or not drafted:
            return 0.0
        known, costs_s = self._costs
        verify_s = costs_s[drafted - 1] if known == running and drafted <= len(costs_s) else self.verify_s(running, np.array(drafted))
        return step_s * accepted / max(running, 1) - float(verify_s) - self.path_s
