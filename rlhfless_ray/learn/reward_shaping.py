"""Shape rewards before they become advantages. Pure functions on numpy arrays.

They are applied in this order: overlong penalty, stop-properly penalty, baseline (`advantage.py`), clip, per-token KL.
"""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, max_new_tokens: int, buffer_tokens: float, factor: float = 1.0) -> np.ndarray:
    """Return the overlong penalty, to be added to the rewards (Yu et al. 2025, DAPO, equation 13, arXiv 2503.14476).

    It is 0 up to max_new_tokens - buffer_tokens, then falls linearly to -factor at max_new_tokens, and no lower. `lengths` of the
    responses in tokens, any shape.
    """
    beyond = np.clip(np.asarray(lengths, np.float64) - (max_new_tokens - buffer_tokens), 0.0, buffer_tokens)
    return -factor * beyond / buffer_tokens


def stop_properly(rewards: np.ndarray, truncated: np.ndarray, coefficient: float) -> np.ndarray:
    """Penalise responses that were cut off at the limit (ProRL v2; OpenRLHF from 0.9.2).

    Their rewards are scaled by a coefficient from 0 to 1, or replaced by a negative coefficient. `rewards` float and `truncated` bool
    have the same shape. A missing reward (NaN) stays missing.
    """
    rewards = np.asarray(rewards, np.float64)
    instead = rewards * coefficient if coefficient >= 0 else np.where(np.isnan(rewards), np.nan, coefficient)
    return np.where(np.asarray(truncated, bool), instead, rewards)


def token_rewards(
    rewards: np.ndarray, lengths: np.ndarray, kl: np.ndarray | None = None, coefficient: float = 0.0, mask: np.ndarray | None = None
) -> np.ndarray:
    """Place each sequence's reward on its last action token, and subtract coefficient · KL on every action token.

    See Ziegler et al. 2019, equation 2, arXiv 1909.08593; per token as in Ouyang et al. 2022, arXiv 2203.02155. `rewards` (sequences,);
    `lengths` (sequences,) int; `kl` (Σ length,) estimates per token; `mask` (Σ length,) True on action tokens, None: all are. Returns
    (Σ length,) float64, 0 outside the mask. A sequence without action tokens gets no reward. A coefficient below 0 counts as 0.
    """
    lengths = np.asarray(lengths)
    total = int(lengths.sum())
    action = np.ones(total, bool) if mask is None else np.asarray(mask, bool)
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
