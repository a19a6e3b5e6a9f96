"""Decode speed of an engine. One step with b sequences holding c tokens takes base + per_seq·b + per_ctx·c seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.plain_data import JsonObject
from placement.speed.robust_fit import fit_shares, robust_sd, scaled_seed


@dataclass(frozen=True)
class Speed:
    """Seconds of one decode step: base_s + per_seq_s · sequences + per_ctx_s · context tokens.

    Parameters
    ----------
    base_s : float
        Seconds per step, whatever its size.
    per_seq_s : float
        Seconds per running sequence.
    per_ctx_s : float
        Seconds per token in the running sequences' contexts.
    prefill_s : float
        Seconds per prompt token, before the first step.

    Examples
    --------
    >>> speed = Speed(base_s=0.01, per_seq_s=1e-4)
    >>> round(speed.step_s(running=64), 4)
    0.0164
    """

    base_s: float
    per_seq_s: float
    per_ctx_s: float = 0.0
    prefill_s: float = 0.0

    def step_s(self, running: float, context_tokens: float = 0.0) -> float:
        """Return the seconds of one decode step with `running` sequences that hold `context_tokens` tokens together."""
        return self.base_s + self.per_seq_s * running + self.per_ctx_s * context_tokens

    def rollout_s(self, lengths: np.ndarray, prompts: np.ndarray | float = 0.0) -> float:
        """Return the seconds in which one engine decodes `lengths` (n,) together, all admitted at once.

        The time is base·max L + Σ (per_seq·L + per_ctx·(prompt·L + L²/2) + prefill·prompt). `prompts` is (n,) tokens or
        one number. With scenarios (n, S), the result is the mean over them.
        """
        if len(lengths) == 0:
            return 0.0
        tokens = np.asarray(prompts, float)
        tokens = tokens[:, None] if lengths.ndim == 2 and tokens.ndim else tokens
        each = self.per_seq_s * lengths + self.per_ctx_s * (tokens * lengths + np.square(lengths) / 2) + self.prefill_s * tokens
        return float(np.mean(self.base_s * np.max(lengths, axis=0) + np.sum(each, axis=0)))


MIN_RECORDS = 8
FADE = 0.8  # weight of earlier records, for each call of `SpeedFit.observe`
SEED_SPREAD = 0.5  # expected relative error of the seed


class SpeedFit:
    """Fits `Speed` to engines' step records online, with fading sums, so that it follows the machine.

    Errors are relative. Outliers are down-weighted (Huber) or left out. No term is negative. Where records do not
    separate the terms (all steps alike), the split is the seed's, scaled to the measured times. The seed's own level
    counts only until the first records.
    """

    def __init__(self, first_guess: Speed) -> None:
        """first_guess: the seed, for instance from a roofline."""
        self.seed = self.speed = first_guess
        self.gram, self.moment = np.zeros((3, 3)), np.zeros(3)
        self.step_spread = 0.0  # relative standard deviation of single steps around the fit
        self.overhead = 0.0  # relative: time that hiccups and left-out steps add to the sum of fitted times
        self.records = 0  # records used so far
        # [weighted squares, weight] of the relative error of whole calls, predicted before they were observed
        self.errors = np.array([SEED_SPREAD**2 * 0.5, 0.5])

    @property
    def spread(self) -> float:
        """Return the relative standard error of a predicted rollout time.

        This is the root mean square error of predicted sums of later steps, hiccups included. Newer ones count more.
        """
        return float(np.sqrt(self.errors[0] / self.errors[1]))

    def observe(
        self, running: np.ndarray, seconds: np.ndarray, context_tokens: np.ndarray | None = None, new_tokens: np.ndarray | None = None
    ) -> None:
        """Add records of decode steps (n,): running sequences, seconds, context tokens, and tokens computed.

        Without `context_tokens`, per_ctx_s is 0 and its time is part of the other terms. With `new_tokens`, steps that
        computed more tokens than they have sequences count as prefill and are left out. Fewer than 8 records change
        nothing.

        Raises ValueError if the arrays differ in length.
        """
        running, seconds = np.asarray(running, float), np.asarray(seconds, float)
        context = np.zeros(len(running)) if context_tokens is None else np.asarray(context_tokens, float)
        more = running if new_tokens is None else np.asarray(new_tokens, float)
        if not running.shape == seconds.shape == context.shape == more.shape:
            raise ValueError("running, seconds, context_tokens and new_tokens must have one length")
        good = np.isfinite(seconds) & (seconds > 0) & (running > 0) & (more <= running)
        rows, y = np.column_stack([np.ones(len(running)), running, context])[good], seconds[good]
        if len(y) < MIN_RECORDS:
            return
        before = np.array([self.speed.base_s, self.speed.per_seq_s, self.speed.per_ctx_s])
        self._learn_error(rows @ before * (1 + self.overhead), y)
        seed = np.array([self.seed.base_s, self.seed.per_seq_s, self.seed.per_ctx_s])
        reference, target = scaled_seed(seed, rows, y)
        for with_context in (context_tokens is not None, False):
            used = np.array([True, True, with_context])
            picked = np.ix_(used, used)
            old = (FADE * self.gram[picked], FADE * self.moment[used])
            beta, weights, (gram, moment) = fit_shares(rows[:, used], y, reference[used], target[used], old)
            if beta[:2].any():  # a few noisy records may give all time to contexts, as if a step without any took none
                break
        self.gram, self.moment = FADE * self.gram, FADE * self.moment
        self.gram[picked] += gram
        self.moment[used] += moment
        full = np.zeros(3)
        full[used] = beta
        fitted = np.maximum(rows @ full, 1e-12)
        kept = weights > 0
        share = 1.0 if self.records == 0 else 1 - FADE
        self.step_spread += share * (robust_sd(y[kept] / fitted[kept] - 1) - self.step_spread)
        self.overhead += share * (float(y.sum() / fitted.sum()) - 1 - self.overhead)
        self.records += len(y)
        self.speed = Speed(*(float(x) for x in full))

    def _learn_error(self, predicted: np.ndarray, y: np.ndarray) -> None:
        off = float(np.log(y.sum()) - np.log(max(predicted.sum(), 1e-300)))
        self.errors = FADE * self.errors + np.array([min(off**2, 1.0), 1.0])

    def state(self) -> JsonObject:
        """Return the fit as JSON-serialisable values."""
        speed = self.speed
        return {
            "gram": self.gram.tolist(),
            "moment": self.moment.tolist(),
            "errors": self.errors.tolist(),
            "speed": [speed.base_s, speed.per_seq_s, speed.per_ctx_s],
            "step_spread": self.step_spread,
            "overhead": self.overhead,
            "records": self.records,
        }

    def restore(self, state: JsonObject) -> None:
        """Restore a state. The seed stays the constructor's. Raises ValueError for a state of another version."""
        if "gram" not in state:
            raise ValueError("the checkpoint's speed fit is of an older version; start a new run")
        self.gram, self.moment, self.errors = (np.array(state[name]) for name in ("gram", "moment", "errors"))
        self.speed = Speed(*state["speed"])
        self.step_spread, self.overhead, self.records = state["step_spread"], state["overhead"], state["records"]
