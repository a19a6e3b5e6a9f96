"""When an engine looks up drafts, so that attempts cannot lose much."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from placement.drafting.acceptance import MOST_TOKENS, Acceptance, DraftTable, choose_lengths
from placement.drafting.step_times import StepTimes

AGE_EVERY = 50  # steps
ALLOWED_LOSS = 0.004  # share of the decode time that attempts may cost, and the same share for reading texts: not 1 % together
FIRST_BALANCE = 2.0  # time that attempts may cost at first, in steps
LEAST_BALANCE, MOST_BALANCE = -2.0, 8.0  # bounds of the balance, in steps
ENOUGH = 1.0  # steps on the balance from which it pays for reading texts too
TRIAL_TOKENS = 6  # most tokens drafted for a sequence until then. Their number varies, which tells a token's cost from a step's
LONGEST_REST = 16  # limit on the steps between two look-ups for a sequence without useful drafts
GAIN_RATE = 0.02  # weight of a look-up in the mean of what look-ups save
OPTIMISM = 1.0  # standard deviations by which unknown acceptance rates are taken to be better, while the balance pays for trials


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

    The balance grows by the share `ALLOWED_LOSS` of each step's time. The time of decisions, look-ups and drafts is taken from it, and
    the time that they save is added. Until it pays for looking up all sequences at once, nothing is looked up: one decision for many
    sequences costs little more than for one. Reading texts has an account of its own with the same income, because it would leave nothing
    for look-ups; a rich balance pays for it too. Unless look-ups save more than they take on average, a sequence without useful drafts
    rests for a number of steps that doubles each time.

    Steps before the next look-up that can be paid for are a pause, and so are `LONGEST_REST` steps of a batch too large to gain anything.
    They are only counted, because deciding and learning in each of them takes 2 % of a step of 3 ms.
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
        self.all_rest = False  # whether the pause is only because all sequences rest, so that one that begins ends it
        self.skipped = 0  # steps of a pause that were not added yet
        self.rests: dict[str, tuple[int, int]] = {}  # by sequence: (step from which it may try again, length of its last rest)

    def skip_step(self, has_begun: bool = False) -> bool:
        """Return whether a step belongs to a pause. Nothing is looked up after such a step, and nothing is learned from it.

        has_begun: whether sequences have begun since the step before.
        """
        if not self.pause or (has_begun and self.all_rest):
            return False
        self.pause -= 1
        self.skipped += 1
        return True

    def begin_step(self, running: int, context_tokens: int, most_value: float = 1.0) -> int:
        """Count a step, and return for how many of its `running` sequences drafts may be looked up after it. 0 may begin a pause.

        most_value: what a token of a sequence is worth at most, see `token_values`.
        """
        self._add_steps(1)
        self.pause, self.all_rest = 0, False
        self.looked = [0, self.looked[0]]
        times = self.learned.times
        step_s = times.step_s(running, context_tokens)
        if step_s is None or not times.is_known:
            return max(1, running // 4) if self.number % 2 else 0
        token_s = step_s / max(running, 1)
        self.worth_s = self.gain * token_s
        if running and (most_value * token_s - float(times.costs_s(running)[0])) * MOST_TOKENS <= self.look_up_s:
            self.pause = LONGEST_REST - 1  # not even a draft whose tokens are all accepted would pay
            return 0
        missing = min(self.look_up_s * running / step_s, ENOUGH) - self.balance
        if missing > 0:
            self.pause = int(missing / ALLOWED_LOSS)
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

    def choose(self, drafts: DraftTable, running: int, context_tokens: int, values: np.ndarray | None = None) -> list[int]:
        """Return how many tokens of each draft the next step verifies.

        The drafts are of some of its `running` sequences. values: what a token of each is worth, see `token_values`. While the balance pays
        for trials, rates that are little known are taken to be better than their mean.
        """
        times = self.learned.times
        step_s = times.step_s(running, context_tokens)
        if step_s is None or not times.is_known:
            return np.minimum(1 + times.trials % TRIAL_TOKENS, np.count_nonzero(drafts.estimates, axis=1)).tolist()
        survival = self.learned.acceptance.survival(drafts, OPTIMISM if self.balance > 0 else 0.0)
        return choose_lengths(survival, step_s, times.costs_s(running), times.path_s, running, values)

    def due(self, names: Sequence[str], most: int, values: np.ndarray | None = None) -> list[int]:
        """Return the positions of at most `most` sequences that may try, those whose drafts did best and that are worth most first."""
        values = np.zeros(len(names)) if values is None else values
        pays = self.worth_s > self.look_up_s
        if not self.rests or (pays and len(names) <= most):
            return sorted((-values).argsort(kind="stable")[:most].tolist())
        rests = [self.rests.get(name, (0, 0)) for name in names]
        rested = [i for i, (until, _) in enumerate(rests) if pays or until <= self.number]
        return rested if len(rested) <= most else sorted(rested, key=lambda i: (rests[i][1], -values[i]))[:most]

    def pause_until_due(self, names: Collection[str]) -> None:
        """Pause until one of these sequences, which all rest, may try again."""
        self.pause = min((self.rests[name][0] for name in names), default=self.number + 1) - self.number - 1
        self.all_rest = True

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

    def settle(self, running: int, context_tokens: int, drafted: int, accepted: float, draft_s: float) -> None:
        """Add what a step with drafts or look-ups has saved, which may be negative. accepted: tokens, each counted by its value."""
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
