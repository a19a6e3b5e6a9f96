"""Compute advantages from rewards. Pure functions on numpy arrays.

There are two layouts. Arrays per sample have shape (prompts, samples). A missing reward is NaN: it takes no part in its group's
statistics, and its advantage is NaN too. Arrays per token have the tokens of all sequences end to end, (Σ length,), with `lengths`
(sequences,) int. A length of 0 is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

EPSILON = 1e-6  # keeps a group of equal rewards at advantage 0 instead of 0/0
ROUNDING = 1e-12  # of sums in float64, as a share of their largest number: a smaller difference is none


def group_advantages(rewards: np.ndarray, normalize_std: bool = True, epsilon: float = EPSILON) -> np.ndarray:
    """Compare each response with the others to its prompt, as GRPO does (Shao et al. 2024, section 4.1, arXiv 2402.03300).

    `rewards` (prompts, samples) float. With `normalize_std`, A = (r - mean) / (std + epsilon), std with n - 1 in the denominator.
    Without it, A = r - mean (Liu et al. 2025, Dr. GRPO, section 3.2, arXiv 2503.20783; also the baseline of REINFORCE++-baseline,
    Hu 2025, arXiv 2501.03262). A group with fewer than two rewards has advantage 0.
    """
    known = np.isfinite(rewards)
    count = known.sum(axis=1, keepdims=True)
    values = np.where(known, rewards, 0.0).astype(np.float64)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(known, values - mean, 0.0)
    if normalize_std:
        variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        centred = centred / (np.sqrt(variance) + epsilon)
    # equal rewards are 0 exactly: a small deviation would make advantages of the rounding of their mean, or of their own sums
    highest, lowest = np.where(known, values, -np.inf).max(axis=1), np.where(known, values, np.inf).min(axis=1)
    centred = np.where(differ(highest, lowest)[:, None], centred, 0.0)
    return np.where(known, centred, np.nan)


def differ(highest: np.ndarray, lowest: np.ndarray) -> np.ndarray:
    """Return whether rewards are higher than others by more than rounding: 0.1 + 0.2 is no better than 0.3."""
    return highest - lowest > ROUNDING * np.maximum(np.abs(highest), np.abs(lowest))


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Subtract from each reward the mean of the others in its group, as RLOO does (Ahmadian et al. 2024, arXiv 2402.14740).

    `rewards` and result (prompts, samples). This is n / (n - 1) times the centred reward. A group of one has advantage 0.
    """
    known = np.isfinite(rewards)
    count = known.sum(axis=1, keepdims=True)
    values = np.where(known, rewards, 0.0).astype(np.float64)
    others = (values.sum(axis=1, keepdims=True) - values) / np.maximum(count - 1, 1)
    return np.where(known, np.where(count >= 2, values - others, 0.0), np.nan)


def batch_centred(rewards: np.ndarray) -> np.ndarray:
    """Subtract the mean of the whole rollout batch from each reward, as FlashREINFORCE does (OpenRLHF 0.11.2).

    `rewards` may have any shape.
    """
    known = np.isfinite(rewards)
    values = np.where(known, rewards, 0.0).astype(np.float64)
    return np.where(known, values - values.sum() / max(int(known.sum()), 1), np.nan)


def uncentred(rewards: np.ndarray) -> np.ndarray:
    """Return the rewards as float64, for estimators whose baseline is a critic or comes from whitening."""
    return np.asarray(rewards, np.float64)


def discounted_returns(rewards: np.ndarray, lengths: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """Return the returns-to-go G_t = r_t + γ·G_{t+1} within each sequence (Sutton & Barto 2018, equation 3.9).

    `rewards` and result (Σ length,), `lengths` (sequences,), gamma in [0, 1]. The result is at least float32.
    """
    return _recur(np.asarray(rewards), lengths, gamma)


def gae(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float = 1.0, lambd: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Compute generalised advantage estimates (Schulman et al. 2016, equation 16, arXiv 1506.02438).

    δ_t = r_t + γ·V_{t+1} - V_t with V = 0 after the last token, A_t = δ_t + γλ·A_{t+1}, return = A + V.
    `rewards` and `values` (Σ length,), `lengths` (sequences,), gamma and lambd in [0, 1]. Returns advantages and returns,
    (Σ length,), at least float32. Each token in the arrays is one time step. Tokens of an environment between two actions may be
    left out. If they are kept, with reward and value 0, they count as time steps of the discount.
    """
    kind = _kind(rewards, values)
    following = np.zeros(len(values), kind)
    following[:-1] = values[1:]
    ends = np.cumsum(lengths)[np.asarray(lengths) > 0]
    following[ends - 1] = 0.0
    advantages = _recur(rewards + gamma * following - values, lengths, gamma * lambd)
    return advantages.astype(kind, copy=False), (advantages + values).astype(kind, copy=False)


def spans(lengths: np.ndarray | Sequence[int]) -> Iterator[slice]:
    """Yield the slice of each sequence in the flat layout."""
    ends = np.cumsum(lengths).tolist()
    return (slice(end - int(length), end) for end, length in zip(ends, lengths, strict=True))


def _recur(x: np.ndarray, lengths: np.ndarray, factor: float) -> np.ndarray:
    """Compute y_t = x_t + factor·y_{t+1} within each sequence, accumulated in float64.

    Each sequence is computed separately, so its result does not depend on the rest of the batch, not even in its last bit.
    """
    out = np.empty(len(x), _kind(x))
    if factor == 1:
        counts = np.asarray(lengths, np.int64)
        counts = counts[counts > 0]
        last = x[np.cumsum(counts) - 1]
        if np.count_nonzero(x) == np.count_nonzero(last):  # only whole responses have rewards: every token gets its response's
            return np.repeat(last, counts).astype(out.dtype, copy=False)
        for span in spans(lengths):
            out[span] = np.cumsum(x[span][::-1], dtype=np.float64)[::-1]
        return out
    from scipy.signal import lfilter  # here, because it takes half a second to import and most runs do not discount

    above, below = np.array([1.0]), np.array([1.0, -factor])
    for span in spans(lengths):
        if span.stop > span.start:
            out[span] = lfilter(above, below, x[span][::-1].astype(np.float64))[::-1]
    return out


def _kind(*arrays: np.ndarray) -> np.dtype:
    return np.result_type(np.float32, *(np.asarray(a).dtype for a in arrays))
