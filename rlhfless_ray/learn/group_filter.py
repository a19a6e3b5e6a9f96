"""Dynamic sampling: choose the prompts whose groups are trained on."""

from __future__ import annotations

import numpy as np


def kept_groups(scores: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Return whether each group's mean score is strictly between the bounds (Yu et al. 2025, DAPO, equation 11, arXiv 2503.14476).

    `scores` (prompts, samples), NaN if missing. The mean is over existing scores, and a group without any is not kept.
    Returns (prompts,) bool.
    """
    known = np.isfinite(scores)
    count = known.sum(axis=1)
    total = np.where(known, scores, 0.0).astype(np.float64).sum(axis=1)
    mean = total / np.maximum(count, 1)
    # exact at the bounds whatever the rounding of the mean: equal scores have the score itself as their mean
    lowest = np.where(known, scores, np.inf).min(axis=1, initial=np.inf)
    highest = np.where(known, scores, -np.inf).max(axis=1, initial=-np.inf)
    mean = np.clip(mean, np.minimum(lowest, highest), np.maximum(lowest, highest))
    return (count > 0) & (mean > low) & (mean < high)
