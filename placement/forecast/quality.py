"""Quality of a step's length forecasts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ForecastQuality:
    """Quality of a step's forecasts, as distributions over responses.

    mae_tokens, bias_tokens: of the mean over scenarios; bias > 0 means forecast too long. spearman: rank correlation of
    that mean with the lengths. auc_longest: probability that one of the longest 10 % was forecast longer than one of
    the others (ties count half). coverage_50, coverage_90: share of lengths inside the central intervals, 0.5 and 0.9
    if calibrated. pit_deciles (10,): share of lengths in each tenth of their own forecast, all 0.1 if calibrated.
    pit_error: largest distance between the distribution of those ranks and the uniform one (Kolmogorov-Smirnov).
    max_ratio: the longest response over the mean over scenarios of their maximum. spearman and auc_longest are None
    where undefined.
    """

    responses: int
    mae_tokens: float
    bias_tokens: float
    spearman: float | None
    auc_longest: float | None
    coverage_50: float
    coverage_90: float
    pit_deciles: tuple[float, ...]
    pit_error: float
    max_ratio: float


def rankdata(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, ties sharing their mean rank. Importing scipy's function of this name costs a quarter of a second."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse.reshape(-1)]


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the rank correlation of (n,) and (n,), or None if either is constant."""
    a, b = rankdata(a), rankdata(b)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def auc_longest(forecast: np.ndarray, lengths: np.ndarray, share: float = 0.1) -> float | None:
    """Return the area under the curve (Mann-Whitney) of `forecast` as a detector of the longest `share` of `lengths`.

    Lengths equal to the threshold count among the longest. Returns None if all lengths are equal.
    """
    lengths = np.asarray(lengths, float)
    n = len(lengths)
    many = max(1, round(share * n))
    if n < 2:
        return None
    threshold = np.partition(lengths, n - many)[n - many]
    longest = lengths >= threshold
    if longest.all():  # the threshold is the shortest length: only longer ones count
        longest = lengths > threshold
    positives = int(longest.sum())
    if positives in (0, n):
        return None
    ranks = rankdata(forecast)
    return float((ranks[longest].sum() - positives * (positives + 1) / 2) / (positives * (n - positives)))


@dataclass(frozen=True)
class LengthRanks:
    """The rank (n,) of each length among its scenarios, in 0 … 1, and half of the width (n,) over which ties spread it.

    Ties count half, so that lengths at the limit are not misses if that was forecast.
    """

    rank: np.ndarray
    half: np.ndarray

    @classmethod
    def of(cls, scenarios: np.ndarray, lengths: np.ndarray) -> LengthRanks:
        """Rank the true lengths (n,) among scenarios (n, S)."""
        below = (scenarios < lengths[:, None]).sum(1)
        ties = (scenarios == lengths[:, None]).sum(1)
        # n draws leave n + 1 gaps of equal probability. Ties spread over all the gaps they touch.
        gaps = scenarios.shape[1] + 1
        return cls((below + 0.5 * (ties + 1)) / gaps, 0.5 * (ties + 1) / gaps)

    def curve(self, levels: np.ndarray) -> np.ndarray:
        """Return (k,) the share of lengths below their own forecasts' quantiles at `levels` (k,): the levels if calibrated."""
        low = (self.rank - self.half)[:, None]
        return np.asarray(np.clip((levels[None, :] - low) / (2 * self.half)[:, None], 0, 1).mean(0))

    def within(self, share: float) -> float:
        """Return the share of lengths in the central interval that should hold this share."""
        low, high = (1 - share) / 2, (1 + share) / 2
        part = np.minimum(self.rank + self.half, high) - np.maximum(self.rank - self.half, low)
        return float((np.maximum(part, 0) / (2 * self.half)).mean())


def forecast_quality(scenarios: np.ndarray, lengths: np.ndarray, ranks: LengthRanks | None = None) -> ForecastQuality:
    """Compare scenarios (n, S) with the true lengths (n,), both in tokens and clipped at the same limit.

    `ranks`: of these lengths among these scenarios, where they are known. Raises ValueError for shapes that disagree or no responses.
    """
    scenarios, lengths = np.asarray(scenarios, float), np.asarray(lengths, float)
    if scenarios.ndim != 2 or lengths.shape != scenarios.shape[:1] or not scenarios.size:
        raise ValueError(f"need scenarios (n, S) and lengths (n,), got {scenarios.shape} and {lengths.shape}")
    ranks = LengthRanks.of(scenarios, lengths) if ranks is None else ranks
    mean, fine = scenarios.mean(1), np.linspace(0, 1, 101)
    error = mean - lengths
    expected_longest = float(scenarios.max(0).mean())
    return ForecastQuality(
        len(lengths),
        float(np.abs(error).mean()),
        float(error.mean()),
        spearman(mean, lengths),
        auc_longest(mean, lengths),
        ranks.within(0.5),
        ranks.within(0.9),
        tuple(np.diff(ranks.curve(np.linspace(0, 1, 11))).tolist()),
        float(np.abs(ranks.curve(fine) - fine).max()),
        float(lengths.max()) / expected_longest if expected_longest > 0 else float("nan"),
    )
