"""Regression of log response length on cheap features of the prompt."""

from __future__ import annotations

import numpy as np

from placement.plain_data import JsonObject

RIDGE = 1.0  # strength of the ridge, in prompts


class FeatureLine:
    """Least squares over fading sums, with a little ridge on standardised features. Constant outside the range of features seen."""

    def __init__(self, fade: float) -> None:
        """fade: factor per step on what is known."""
        self.fade = fade
        self.sums = np.zeros((0, 0))  # outer products of (1, features, y)
        self.low, self.high = np.empty(0), np.empty(0)

    def __bool__(self) -> bool:
        return self.sums.size > 0

    def add(self, features: np.ndarray, y: np.ndarray) -> None:
        """Add features (n, k) and y (n,). k is the same in every step."""
        rows = np.column_stack([np.ones(len(y)), features, y])
        new = rows.T @ rows
        self.sums = self.fade * self.sums + new if self.sums.size else new
        low, high = features.min(0), features.max(0)
        self.low = np.minimum(self.low, low) if len(self.low) else low
        self.high = np.maximum(self.high, high) if len(self.high) else high
        self.__dict__.pop("_solved", None)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return (n,) expected y."""
        center, slope, mean, _ = self._solve()
        return mean + (np.clip(features, self.low, self.high) - center) @ slope

    def variance(self) -> float:
        """Return the variance around the line by the remaining degrees of freedom (infinite if there are none)."""
        return self._solve()[3]

    def _solve(self) -> tuple[np.ndarray, np.ndarray, float, float]:
        if "_solved" not in self.__dict__:
            count, mean = self.sums[0, 0], self.sums[0] / self.sums[0, 0]
            cov = self.sums / count - np.outer(mean, mean)
            x, xy = cov[1:-1, 1:-1], cov[1:-1, -1]
            sd = np.sqrt(np.maximum(np.diag(x), 0))
            used = sd > 1e-6 * (np.abs(mean[1:-1]) + 1e-9)
            slope = np.zeros(len(sd))
            if used.any():
                scale = sd[used]
                matrix = x[np.ix_(used, used)] / np.outer(scale, scale) + RIDGE / count * np.eye(used.sum())
                slope[used] = np.linalg.solve(matrix, xy[used] / scale) / scale
            left = max(0.0, float(cov[-1, -1] - 2 * slope @ xy + slope @ x @ slope))
            freedom = count - 1 - used.sum()
            self._solved = (mean[1:-1], slope, float(mean[-1]), left * count / freedom if freedom > 0 else np.inf)
        return self._solved

    def state(self) -> JsonObject:
        return {"sums": self.sums.tolist(), "low": self.low.tolist(), "high": self.high.tolist()}

    def restore(self, state: JsonObject) -> None:
        self.sums = np.array(state["sums"], float).reshape(len(state["sums"]), -1) if state["sums"] else np.zeros((0, 0))
        self.low, self.high = np.array(state["low"], float), np.array(state["high"], float)
        self.__dict__.pop("_solved", None)
