"""How long engines take: one decode step with b running sequences takes base + per_seq·b seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Speed:
    """Seconds of one decode step: base_s + per_seq_s · sequences + per_ctx_s · context tokens."""

    base_s: float
    per_seq_s: float
    per_ctx_s: float = 0.0

    def step_s(self, running: float, context_tokens: float = 0.0) -> float:
        """Seconds of one decode step with `running` sequences that hold `context_tokens` tokens together."""
        return self.base_s + self.per_seq_s * running + self.per_ctx_s * context_tokens

    def rollout_s(self, lengths: np.ndarray, prompts: np.ndarray | float = 0.0) -> float:
        """Seconds one engine takes to decode `lengths` (n,) together, prompts (n,) tokens each:
        base·max L + Σ (per_seq·L + per_ctx·(prompt·L + L²/2)). All sequences are admitted at once."""
        if len(lengths) == 0:
            return 0.0
        each = self.per_seq_s * lengths + self.per_ctx_s * (prompts * lengths + np.square(lengths) / 2)
        return float(self.base_s * np.max(lengths) + np.sum(each))


class SpeedFit:
    """Fits `Speed` to step records online: faded sums, so it follows the machine, and least squares over them."""

    def __init__(self, first_guess: Speed, fade: float = 0.8) -> None:
        self.speed = first_guess
        self.fade = fade
        self.sums = np.zeros(5)

    def observe(self, running: np.ndarray, seconds: np.ndarray) -> None:
        """Records of decode steps: sequences in the step (n,), seconds (n,). The slowest 2 % are left out: they are
        the machine's hiccups and prefill steps, not decoding."""
        if len(seconds) < 8:
            return
        keep = seconds <= np.quantile(seconds, 0.98)
        x, y = np.asarray(running, float)[keep], np.asarray(seconds, float)[keep]
        self.sums = self.fade * self.sums + np.array([len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum()])
        count, sx, sy, sxx, sxy = self.sums
        spread = sxx - sx * sx / count
        slope = max(0.0, (sxy - sx * sy / count) / spread) if spread > 1e-9 else 0.0
        base = (sy - slope * sx) / count
        if base <= 0:  # all steps alike: the intercept is not known, charge everything to the sequences
            base, slope = 0.0, sy / sx
        self.speed = Speed(base, slope)

    def state(self) -> dict[str, object]:
        return {"sums": self.sums.tolist(), "base_s": self.speed.base_s, "per_seq_s": self.speed.per_seq_s}

    def restore(self, state: dict) -> None:
        self.sums = np.array(state["sums"])
        self.speed = Speed(state["base_s"], state["per_seq_s"])
