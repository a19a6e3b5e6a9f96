"""Advantages by the pure functions alone, without a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfless_ray.learn.estimators import advantages_of, shaped_rewards


def estimate(
    name: str,
    rewards: np.ndarray,
    lengths: np.ndarray,
    *,
    values: np.ndarray | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    mask: np.ndarray | None = None,
    **shaping: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages before whitening, and returns. Arguments: those of `shaped_rewards` and `advantages_of`."""
    by_token = shaped_rewards(name, rewards, lengths, mask=mask, **shaping)
    return advantages_of(name, by_token, lengths, values=values, gamma=gamma, lambd=lambd, mask=mask)
