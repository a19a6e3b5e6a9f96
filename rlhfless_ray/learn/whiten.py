"""Whiten advantages over all action tokens of a rollout batch, from sums that add up over parts and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FLOOR = 1e-8  # lower bound of the variance: equal advantages become 0, not 0/0


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares. Moments of parts add up to those of the whole: `a + b`, or `Moments(*reduced)` with
    `reduced` the element-wise sum of `tuple(moments)` over ranks (three float64)."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, x: np.ndarray, mask: np.ndarray | None = None) -> Moments:
        """Return the moments of x. `mask` has the shape of x, and is True (or 1) where x counts. Values that are not finite do not."""
        x = np.asarray(x)
        chosen = np.isfinite(x) if mask is None else np.isfinite(x) & np.asarray(mask, bool)
        values = x[chosen].astype(np.float64)
        return cls(float(values.size), float(values.sum()), float(np.dot(values, values)))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def __iter__(self) -> Iterator[float]:
        return iter((self.count, self.total, self.squares))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Biased variance (count in the denominator), never negative."""
        return max(self.squares / self.count - self.mean**2, 0.0) if self.count else 0.0


def whiten(x: np.ndarray, moments: Moments, divide: bool = True) -> np.ndarray:
    """Return (x - mean) / sqrt(max(variance, 1e-8)), or x - mean without `divide`.

    `moments` are those of the global batch, as in REINFORCE++ (Hu 2025, arXiv 2501.03262). x may have any shape; the result has its
    dtype.
    """
    scale = 1.0 / np.sqrt(max(moments.variance, FLOOR)) if divide else 1.0
    return ((np.asarray(x) - moments.mean) * scale).astype(np.asarray(x).dtype, copy=False)
