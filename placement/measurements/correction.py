"""Correct a model's predictions by what they missed before, and say how far off the next one may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

KEEP = 128  # newest records
FADE = 0.93  # factor on a record's weight for each newer one
WIDTH = 0.7  # of log size: a record of twice the size counts for 0.61
OUTLIER = 3.0  # robust standard deviations from the median at which a record's ratio is clipped
MIN_SPREAD = 0.03  # log error below which no record is an outlier
SEED_WEIGHT = 0.5  # of what stands for records that are missing, in records
SEED_SPREAD = 0.3  # log error of the records that stand for what was not seen yet, one above and one below


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a quantity's newest predictions, each made before its measurement.

    bias: sum of the predictions over that of the measurements, less 1. median_error: median of |predicted / measured - 1|.
    coverage_50, coverage_90: share of measurements inside the central intervals.
    """

    records: int
    bias: float
    median_error: float
    coverage_50: float
    coverage_90: float


class Correction:
    """Corrects predictions of one quantity, which may be off by a factor that depends on their size.

    The factor is the weighted mean of measured / predicted over earlier records, so that sums are right, with outliers clipped. Newer
    records and those of a similar size count more. Intervals are quantiles of the same ratios, with a record above and one below for what
    was not seen yet (weighted conformal intervals: Barber et al. 2023, Conformal prediction beyond exchangeability).
    """

    def __init__(self) -> None:
        self.sizes, self.logs = np.empty(0), np.empty(0)  # log of the model's prediction, and log of measured / predicted
        self.made = np.empty((0, 4))  # corrected prediction, measurement, whether that is in the central 50 % and 90 %

    def factor(self, predicted: float, unseen: float = 1.0) -> float:
        """Return the factor on the model's prediction. `unseen`: the factor before the first record."""
        of_all = _middle(self._ages(), self.logs, unseen)  # stands for what was not seen of this size
        return _middle(self._weights(predicted), self.logs, of_all)

    def correct(self, predicted: float) -> float:
        """Return the corrected prediction."""
        return predicted * self.factor(predicted)

    def interval(self, predicted: float, level: float) -> tuple[float, float]:
        """Return the central interval of the measurement, from the model's prediction."""
        middle = math.log(self.factor(predicted))
        seeds = middle + np.array([-1.0, 1.0]) * max(SEED_SPREAD, float(np.abs(self.logs - middle).max(initial=0.0)))
        weights = np.append(self._weights(predicted), np.full(2, SEED_WEIGHT / 2))
        low, high = _quantiles(np.append(self.logs, seeds), weights, (1 - level) / 2, (1 + level) / 2)
        return predicted * math.exp(low), predicted * math.exp(high)

    def observe(self, predicted: float, measured: float) -> None:
        """Add a record. `predicted`: by the model alone. Ignores values that are not finite and positive."""
        if not (0 < predicted < math.inf and 0 < measured < math.inf):
            return
        narrow, wide = self.interval(predicted, 0.5), self.interval(predicted, 0.9)
        row = [self.correct(predicted), measured, narrow[0] <= measured <= narrow[1], wide[0] <= measured <= wide[1]]
        self.made = np.vstack([self.made, row])[-KEEP:]
        self.sizes = np.append(self.sizes, math.log(predicted))[-KEEP:]
        self.logs = np.append(self.logs, math.log(measured / predicted))[-KEEP:]

    def accuracy(self, newest: int = KEEP) -> Accuracy | None:
        """Return the accuracy of the `newest` predictions, or None before the first."""
        rows = self.made[-newest:]
        if not len(rows):
            return None
        errors = np.abs(rows[:, 0] / rows[:, 1] - 1)
        bias = float(rows[:, 0].sum() / rows[:, 1].sum() - 1)
        return Accuracy(len(rows), bias, float(np.median(errors)), float(rows[:, 2].mean()), float(rows[:, 3].mean()))

    def _ages(self) -> np.ndarray:
        """Return (n,) weights of the records by age."""
        return np.asarray(FADE ** np.arange(len(self.sizes) - 1, -1, -1.0))

    def _weights(self, predicted: float) -> np.ndarray:
        """Return (n,) weights of the records by age and by how close their size is to this prediction's."""
        return np.asarray(self._ages() * np.exp(-0.5 * ((self.sizes - math.log(max(predicted, 1e-12))) / WIDTH) ** 2))

    def state(self) -> dict[str, Any]:
        return {"sizes": self.sizes.tolist(), "logs": self.logs.tolist(), "made": self.made.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self.sizes, self.logs = np.array(state["sizes"], float), np.array(state["logs"], float)
        self.made = np.array([row[:4] for row in state["made"]], float).reshape(-1, 4)  # the first states had one more column


def _middle(weights: np.ndarray, logs: np.ndarray, seed: float) -> float:
    """Return the weighted mean of exp(logs) (n,), outliers clipped, with `seed` as one more record."""
    if len(logs):
        (middle,) = _quantiles(logs, weights, 0.5)
        (off,) = _quantiles(np.abs(logs - middle), weights, 0.5)
        reach = OUTLIER * max(1.4826 * off, MIN_SPREAD)
        logs = np.clip(logs, middle - reach, middle + reach)
    return float((np.exp(logs) @ weights + SEED_WEIGHT * seed) / (weights.sum() + SEED_WEIGHT))


def _quantiles(values: np.ndarray, weights: np.ndarray, *levels: float) -> np.ndarray:
    """Return the weighted quantiles of values (n,) at these levels."""
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    return np.interp(np.array(levels) * weights.sum(), np.cumsum(weights) - weights / 2, values)
