"""Advantages by the pure functions alone, without a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfless_ray.learn.estimators import advantages_of, shaped_rewards


def estimate(
    name: str, rewards: np.ndarray, lengths: np.ndarray, *, mask: np.ndarray | None = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages before whitening, and returns. Arguments: those of `shaped_rewards` and `advantages_of`."""
    discounting = {key: options.pop(key) for key in ("values", "gamma", "lambd") if key in options}
    by_token = shaped_rewards(name, rewards, lengths, mask=mask, **options)
    return advantages_of(name, by_token, lengths, mask=mask, **discounting)
