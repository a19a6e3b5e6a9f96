"""What happens to rewards before they become advantages. Pure functions on numpy arrays.

The order matters and is: overlong penalty, stop-properly penalty, baseline (`advantage.py`), clip, per-token KL.
"""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, max_new_tokens: int, buffer_tokens: float, factor: float = 1.0) -> np.ndarray:
    """To be added to the rewards: 0 up to max_new_tokens - buffer_tokens, then falling linearly to -factor at max_new_tokens,
    and no lower (Yu et al. 2025, DAPO, equation 13, arXiv 2503.14476).

    lengths of the responses in tokens, any shape. Raises ValueError when the buffer is longer than the responses may be.
    """
    if not 0 <= buffer_tokens <= max_new_tokens:
        raise ValueError(f"an overlong buffer of {buffer_tokens:g} tokens does not fit into responses of {max_new_tokens}")
    beyond = np.clip(np.asarray(lengths, np.float64) - (max_new_tokens - buffer_tokens), 0.0, buffer_tokens)
    return -factor * beyond / buffer_tokens if buffer_tokens else np.zeros_like(beyond)


def stop_properly(rewards: np.ndarray, truncated: np.ndarray, coefficient: float) -> np.ndarray:
    """Rewards of responses that were cut off at the limit: scaled by a coefficient from 0 to 1, or, where the coefficient is
    negative, replaced by it (ProRL v2; OpenRLHF from 0.9.2).

    rewards float, truncated bool, of one shape. A missing reward (NaN) stays missing. Raises ValueError above 1.
    """
    if coefficient > 1:
        raise ValueError(f"the stop-properly coefficient is {coefficient:g}, must be negative or from 0 to 1")
    rewards = np.asarray(rewards, np.float64)
    instead = rewards * coefficient if coefficient >= 0 else np.where(np.isnan(rewards), np.nan, coefficient)
    return np.where(np.asarray(truncated, bool), instead, rewards)


def clipped(rewards: np.ndarray, low: float, high: float) -> np.ndarray:
    """Rewards cut to [low, high], after the baseline; NaN stays. Raises ValueError when low > high."""
    if low > high:
        raise ValueError(f"reward clip range from {low:g} to {high:g}: the first must not be larger than the second")
    return np.clip(rewards, low, high)


def token_rewards(
    rewards: np.ndarray, lengths: np.ndarray, kl: np.ndarray | None = None, coefficient: float = 0.0, mask: np.ndarray | None = None
) -> np.ndarray:
    """Each sequence's reward on its last action token, minus coefficient · KL on every action token (Ziegler et al. 2019,
    equation 2, arXiv 1909.08593; placed per token as in Ouyang et al. 2022, arXiv 2203.02155).

    rewards (sequences,); lengths (sequences,) int; kl (Σ length,) per-token estimates; mask (Σ length,) true on action
    tokens, without it all are. Result (Σ length,) float64, 0 off the mask. A sequence without action tokens gets nothing. A
    coefficient below 0 counts as 0.
    """
    lengths = np.asarray(lengths)
    total = int(lengths.sum())
    action = np.ones(total, bool) if mask is None else np.asarray(mask, bool)
    for name, array in (("kl", kl), ("mask", action)):
        if array is not None and np.shape(array) != (total,):
            raise ValueError(f"{name} has shape {np.shape(array)}, but the lengths add up to {total}")
    if np.shape(rewards) != lengths.shape:
        raise ValueError(f"{np.shape(rewards)} rewards for {lengths.shape} sequences")
    out = np.zeros(total)
    if kl is not None and coefficient > 0:
        np.multiply(kl, -coefficient, out=out, where=action)
    where = np.flatnonzero(action)
    ends = np.cumsum(lengths)
    last = np.searchsorted(where, ends) - 1  # the last action token before each sequence's end …
    has = (last >= 0) & (lengths > 0)
    has[has] &= where[last[has]] >= (ends - lengths)[has]  # … if it is the sequence's own
    out[where[last[has]]] += np.asarray(rewards, np.float64)[has]
    return out


def token_kl(logprobs: np.ndarray, reference: np.ndarray, estimator: str, limit: float | None = 10.0) -> np.ndarray:
    """The penalty per token where the KL is taken off the reward: `kl.bounded_kl` in numpy, which needs no gradient.

    logprobs, reference (tokens,) of the policy and of the one that the run began with, float32. k1, k2 or k3 (Schulman 2020,
    "Approximating KL"), cut to [-limit, limit]; None: not cut. Raises ValueError for another estimator.
    """
    difference = logprobs - reference
    if estimator == "k1":
        found = difference
    elif estimator == "k2":
        found = np.square(difference) / 2
    elif estimator == "k3":  # beyond the limit exp would overflow, and its value is cut anyway
        difference = difference if limit is None else np.maximum(difference, -max(limit, 1.0))
        found = np.expm1(-difference) + difference
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")
    return found if limit is None else np.clip(found, -limit, limit)
