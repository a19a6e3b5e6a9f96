"""Rewards → advantages. Pure functions on numpy arrays."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6  # keeps a group of equal rewards at advantage 0 instead of 0/0


def group_advantages(rewards: np.ndarray, normalize_std: bool = True) -> np.ndarray:
    """GRPO: each response against the others to its prompt (Shao et al. 2024, DeepSeekMath, section 4.1).

    rewards (prompts, samples) float; NaN marks a sample without a reward: it takes no part in its group's mean and
    deviation, and its advantage is NaN too. With `normalize_std`, A = (r - mean) / (std + 1e-6), std with n - 1 in the
    denominator; without, A = r - mean (Liu et al. 2025, Dr. GRPO, section 3.2). A group with fewer than two rewards
    has advantage 0: there is nothing to compare with.
    """
    known = np.isfinite(rewards)
    count = known.sum(axis=1, keepdims=True)
    values = np.where(known, rewards, 0.0).astype(np.float64)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(known, values - mean, 0.0)
    if normalize_std:
        variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        centred = centred / (np.sqrt(variance) + EPSILON)
    centred = np.where(count >= 2, centred, 0.0)
    return np.where(known, centred, np.nan)
