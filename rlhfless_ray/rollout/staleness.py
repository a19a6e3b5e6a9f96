"""Measure and check the age of a step's tokens in weight versions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.types import Sample


def token_lags(samples: Sequence[Sample], newest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lag and the number of tokens of each part of a response that one version drew, both (parts,) int64.

    `newest`: version that the learner has. A lag is the number of updates between the version that drew a token and this one.
    """
    parts = [part for sample in samples for part in sample.completion.versions]
    versions, tokens = np.array(parts, np.int64).reshape(-1, 2).T
    return newest - versions, tokens


def check_lag(samples: Sequence[Sample], newest: int, max_lag: int) -> dict[str, float]:
    """Return metrics of the lag by token, with the share of tokens of each lag.

    Raises RunError if a token is more than `max_lag` versions behind `newest`, or ahead of it.
    """
    lags, tokens = token_lags(samples, newest)
    drawn = tokens > 0
    lags, tokens = lags[drawn], tokens[drawn]
    if not len(lags):
        lags, tokens = np.zeros(1, np.int64), np.ones(1, np.int64)
    if lags.max() > max_lag or lags.min() < 0:
        worst = int(lags.max() if lags.max() > max_lag else lags.min())
        raise RunError(
            f"a token of weight version {newest - worst} would be trained at version {newest}, but the bound is {max_lag} versions; this "
            "is a bug of rlhfless-ray, please report it"
        )
    shares = np.bincount(lags, tokens, max_lag + 1) / tokens.sum()
    by_lag = {f"lag/share_{lag}": float(share) for lag, share in enumerate(shares)}
    return {
        "lag/mean": float(np.average(lags, weights=tokens)),
        "lag/max": float(lags.max()),
        "lag/old_share": float(1 - shares[0]),
        **by_lag,
    }
