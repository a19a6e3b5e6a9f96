"""Correct a model's predictions by what they missed before, and say how far off the next one may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from placement.plain_data import JsonObject

KEEP = 128  # newest records
FADE = 0.93  # factor on a record's weight for each newer one
WIDTH = 0.7  # of log size: a record of twice the size counts for 0.61
OUTLIER = 3.0  # robust standard deviations from the median at which a record's ratio is clipped
MIN_SPREAD = 0.03  # log error below which no record is an outlier
SEED_WEIGHT = 0.5  # of what stands for records that are missing, in records
SEED_SPREAD = 0.3  # log error of the records that stand for what was not seen yet, one above and one below


FAR = 2.0  # widths of its 90 % interval from which a prediction is far off
FAR_IN_A_ROW = 10  # such predictions in a row of which the user is told


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a quantity's newest predictions, each made before its measurement.

    bias: sum of the predictions over that of the measurements, less 1. median_error: median of |predicted / measured - 1|.
    coverage_50, coverage_90: share of measurements inside the central intervals. deciles (10,): share of measurements in each tenth of
    their predicted distributions, all 0.1 if calibrated.
    """

    records: int
    bias: float
    median_error: float
    coverage_50: float
    coverage_90: float
    deciles: tuple[float, ...]


class FarOff:
    """Counts how many predictions in a row were far off, and says once if they are many."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.low = self.high = 0.0  # interval of the error before the first of them, which later ones may have widened
        self.is_told = False

    def observe(self, error: float, low: float, high: float) -> None:
        """Add a prediction's error and the 90 % interval in which it was expected."""
        if not self.in_a_row:
            self.low, self.high = min(low, 0.0), max(high, 0.0)
        self.count(not FAR * self.low <= error <= FAR * self.high)

    def count(self, is_far: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if is_far else 0
        self.is_told = self.is_told and is_far

    def take(self) -> bool:
        """Return whether many in a row were far off and nothing has said so yet."""
        is_new = self.in_a_row >= FAR_IN_A_ROW and not self.is_told
        self.is_told = self.is_told or is_new
        return is_new


class Correction:
    """Corrects predictions of one quantity, which may be off by a factor that depends on their size.

    The factor is the weighted mean of measured / predicted over earlier records, so that sums are right, with outliers clipped. Newer
    records and those of a similar size count more. Intervals are quantiles of the same ratios, with a record above and one below for what
    was not seen yet (weighted conformal intervals: Barber et al. 2023, Conformal prediction beyond exchangeability).
    """

    def __init__(self, *, is_applied: bool = True) -> None:
        """`is_applied`: whether the prediction that is used is the corrected one. A fit corrects itself, so only its errors count."""
        self.is_applied = is_applied
        self.sizes, self.logs = np.empty(0), np.empty(0)  # log of the model's prediction, and log of measured / predicted
        self.made = np.empty((0, 3))  # prediction that was used, measurement, and its quantile level in the predicted distribution
        self.far = FarOff()

    def factor(self, predicted: float) -> float:
        """Return the factor on the model's prediction."""
        of_all = _middle(self._ages(), self.logs, 1.0)  # stands for what was not seen of this size
        return _middle(self._weights(predicted), self.logs, of_all)

    def correct(self, predicted: float) -> float:
        """Return the corrected prediction."""
        return predicted * self.factor(predicted)

    def interval(self, predicted: float, level: float) -> tuple[float, float]:
        """Return the central interval of the measurement, from the model's prediction."""
        low, high = _quantiles(*self._ratios(predicted), (1 - level) / 2, (1 + level) / 2)
        return predicted * math.exp(low), predicted * math.exp(high)

    def _ratios(self, predicted: float) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) logs of measured / predicted that are expected for this prediction, and their weights."""
        middle = math.log(self.factor(predicted))
        seeds = middle + np.array([-1.0, 1.0]) * max(SEED_SPREAD, float(np.abs(self.logs - middle).max(initial=0.0)))
        return np.append(self.logs, seeds), np.append(self._weights(predicted), np.full(2, SEED_WEIGHT / 2))

    def observe(self, predicted: float, measured: float) -> None:
        """Add a record. `predicted`: by the model alone. Ignores values that are not finite and positive."""
        if not (0 < predicted < math.inf and 0 < measured < math.inf):
            return
        used, log, ratios = (
            self.correct(predicted) if self.is_applied else predicted,
            math.log(measured / predicted),
            self._ratios(predicted),
        )
        off = math.log(used / predicted)
        low, high = _quantiles(*ratios, 0.05, 0.95)
        self.far.observe(log - off, low - off, high - off)
        self.made = np.vstack([self.made, [used, measured, _level(log, *ratios)]])[-KEEP:]
        self.sizes = np.append(self.sizes, math.log(predicted))[-KEEP:]
        self.logs = np.append(self.logs, log)[-KEEP:]

    def accuracy(self, newest: int = KEEP) -> Accuracy | None:
        """Return the accuracy of the `newest` predictions, or None before the first."""
        rows = self.made[-newest:]
        if not len(rows):
            return None
        used, measured, levels = rows.T
        narrow, wide = (float((np.abs(levels - 0.5) <= share / 2).mean()) for share in (0.5, 0.9))
        deciles = np.histogram(levels, bins=10, range=(0, 1))[0] / len(rows)
        error = float(np.median(np.abs(used / measured - 1)))
        return Accuracy(len(rows), float(used.sum() / measured.sum() - 1), error, narrow, wide, tuple(deciles.tolist()))

    def _ages(self) -> np.ndarray:
        """Return (n,) weights of the records by age."""
        return np.asarray(FADE ** np.arange(len(self.sizes) - 1, -1, -1.0))

    def _weights(self, predicted: float) -> np.ndarray:
        """Return (n,) weights of the records by age and by how close their size is to this prediction's."""
        return np.asarray(self._ages() * np.exp(-0.5 * ((self.sizes - math.log(max(predicted, 1e-12))) / WIDTH) ** 2))

    def state(self) -> JsonObject:
        return {"sizes": self.sizes.tolist(), "logs": self.logs.tolist(), "made": self.made.tolist()}

    def restore(self, state: JsonObject) -> None:
        self.sizes, self.logs = np.array(state["sizes"], float), np.array(state["logs"], float)
        # the first states had coverage in place of levels: what they predicted stays, how good it was is counted anew
        self.made = np.array([row for row in state["made"] if len(row) == 3], float).reshape(-1, 3)


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
    values, places = _distribution(values, weights)
    return np.interp(np.array(levels), places, values)


def _level(value: float, values: np.ndarray, weights: np.ndarray) -> float:
    """Return the quantile level of a value in the distribution of values (n,) with these weights: 0 below all, 1 above all."""
    return float(np.interp(value, *_distribution(values, weights), left=0.0, right=1.0))


def _distribution(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values (n,) in ascending order, and the quantile level of each."""
    order = np.argsort(values, kind="stable")
    ordered = weights[order]
    return values[order], (np.cumsum(ordered) - ordered / 2) / max(ordered.sum(), 1e-300)
