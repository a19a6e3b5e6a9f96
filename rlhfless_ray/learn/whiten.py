"""Whiten advantages over all action tokens of a rollout batch."""

from __future__ import annotations

import numpy as np

FLOOR = 1e-8  # lower bound of the variance: equal advantages become 0, not 0/0


def whiten(x: np.ndarray, mask: np.ndarray | None = None, divide: bool = True) -> np.ndarray:
    """Return (x - mean) / sqrt(max(variance, 1e-8)), or x - mean without `divide`, as in REINFORCE++ (Hu 2025, arXiv 2501.03262).

    Mean and biased variance are those of the finite values where `mask`, which has the shape of x, is True. Elsewhere the result is 0.
    It has x's dtype.
    """
    counts = np.isfinite(x) if mask is None else np.isfinite(x) & mask
    values = x[counts].astype(np.float64)
    mean = float(values.sum()) / values.size if values.size else 0.0
    values -= mean  # before squaring, which would cost the digits of small differences between large values
    variance = float(np.dot(values, values)) / values.size if values.size else 0.0
    scale = 1.0 / np.sqrt(max(variance, FLOOR)) if divide else 1.0
    whitened = (x - mean) * scale
    return (whitened if mask is None else np.where(mask, whitened, 0.0)).astype(x.dtype, copy=False)
