"""Length forecasts: what a prompt's responses will probably measure, from what its earlier ones did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata


@dataclass(frozen=True)
class ForecastError:
    """How good a step's forecasts were; tokens. `spearman` is None where lengths or forecasts are all equal."""

    mae_tokens: float
    bias_tokens: float
    spearman: float | None


class LengthForecaster:
    """Per prompt an exponentially weighted mean of its responses' lengths; without history, a line through what all
    prompts so far showed (response length against prompt length), clipped to the lengths seen."""

    def __init__(self, default_tokens: float, weight: float = 0.5) -> None:
        """`default_tokens`: forecast before anything was seen. `weight` of the newest visit in a prompt's history."""
        self.default_tokens = default_tokens
        self.weight = weight
        self.history: dict[int, float] = {}
        # sums of 1, x, y, x², xy over prompts seen, faded so that the drift of the policy is followed
        self.sums = np.zeros(5)
        self.fade = 0.9
        self.low, self.high = default_tokens, default_tokens

    def forecast(self, prompts: Sequence[int], prompt_tokens: Sequence[int]) -> np.ndarray:
        """Expected response tokens (n,) for prompts given by data-set row and prompt length in tokens."""
        x = np.asarray(prompt_tokens, float)
        count, sx, sy, sxx, sxy = self.sums
        if count == 0:
            line = np.full(len(x), self.default_tokens)
        else:
            spread = sxx - sx * sx / count
            slope = (sxy - sx * sy / count) / spread if spread > 1e-9 else 0.0
            line = np.clip(sy / count + slope * (x - sx / count), self.low, self.high)
        return np.array([self.history.get(p, float(line[i])) for i, p in enumerate(prompts)])

    def observe(self, prompts: Sequence[int], prompt_tokens: Sequence[int], lengths: Sequence[np.ndarray]) -> None:
        """What a step's responses measured: `lengths[i]` (samples,) tokens for `prompts[i]`."""
        means = np.array([float(np.mean(group)) for group in lengths])
        if not len(means):
            return
        for prompt, mean in zip(prompts, means, strict=True):
            old = self.history.get(prompt)
            self.history[prompt] = mean if old is None else (1 - self.weight) * old + self.weight * mean
        x = np.asarray(prompt_tokens, float)
        new = np.array([len(x), x.sum(), means.sum(), (x * x).sum(), (x * means).sum()])
        self.low = means.min() if self.sums[0] == 0 else min(self.low, means.min())
        self.high = means.max() if self.sums[0] == 0 else max(self.high, means.max())
        self.sums = self.fade * self.sums + new

    def state(self) -> dict[str, Any]:
        return {
            "history": {str(k): v for k, v in self.history.items()}, "sums": self.sums.tolist(),
            "low": self.low, "high": self.high,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.history = {int(k): v for k, v in state["history"].items()}
        self.sums = np.array(state["sums"])
        self.low, self.high = state["low"], state["high"]


def forecast_error(forecast: np.ndarray, lengths: np.ndarray) -> ForecastError:
    """Compare per-prompt forecasts (n,) with the mean lengths their responses had (n,)."""
    error = np.asarray(forecast, float) - np.asarray(lengths, float)
    a, b = rankdata(forecast), rankdata(lengths)
    spearman = None
    if len(a) > 1 and np.ptp(a) > 0 and np.ptp(b) > 0:
        spearman = float(np.corrcoef(a, b)[0, 1])
    return ForecastError(float(np.abs(error).mean()), float(error.mean()), spearman)
