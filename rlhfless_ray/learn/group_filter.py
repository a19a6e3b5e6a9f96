"""Dynamic sampling: choose the prompts whose groups are trained on."""

from __future__ import annotations

import numpy as np

from rlhfless_ray.learn.advantage import ROUNDING


def kept_groups(scores: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Return whether each group's mean score is strictly between the bounds (Yu et al. 2025, DAPO, equation 11, arXiv 2503.14476).

    `scores` (prompts, samples), NaN if missing. The mean is over existing scores, and a group without any is not kept. A mean that
    equals a bound up to rounding is not inside: that of 0.1, 0.1 and 0.4 is 0.2. Returns (prompts,) bool.
    """
    known = np.isfinite(scores)
    count = known.sum(axis=1)
    total = np.where(known, scores, 0.0).astype(np.float64).sum(axis=1)
    mean = total / np.maximum(count, 1)
    near = ROUNDING * np.where(known, np.abs(scores), 0.0).max(axis=1, initial=0.0)
    return (count > 0) & (mean > low + near) & (mean < high - near)
