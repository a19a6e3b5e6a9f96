"""Robust non-negative regression with few terms, the core of the online fits."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

HUBER = 1.345  # 95 % efficiency on normal errors (Huber 1964; Holland and Welsch 1977)
PRIOR_SD = 1.0  # relative: a seed may be wrong by its own size
PRIOR_SHARE = 0.5  # any term may be wrong by this share of a typical record
ROUNDS = 8
MIN_S = 1e-12  # a smaller seed carries no information
MIN_NOISE = 0.01  # relative noise of a record
MOST_SUBSETS = 5  # terms up to which every subset is tried
REJECT = 6.0  # standard deviations from the middle beyond which a record is a hiccup, not noise


def nonnegative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Return the β ≥ 0 (k,) that minimises β'Gβ - 2β'm for a positive definite G (k, k).

    Solves on every subset of terms and keeps the best. For two or three terms this is faster than an active-set search, which more
    than `MOST_SUBSETS` terms take.
    """
    k = len(moment)
    if k > MOST_SUBSETS:
        return _active_set(gram, moment)
    best, least = np.zeros(k), 0.0
    for subsets in _subsets(k):
        systems = gram[subsets[:, :, None], subsets[:, None]]
        for at, found in zip(subsets, np.linalg.solve(systems, moment[subsets][:, :, None])[:, :, 0], strict=True):
            value = -float(found @ moment[at])  # of the objective, at a stationary point
            if value < least and (found >= 0).all():
                least = value
                best = np.zeros(k)
                best[at] = found
    return best


@cache
def _subsets(k: int) -> list[np.ndarray]:
    """Return for each size 1 … k the subsets of k terms, (subsets, size)."""
    return [np.array([*itertools.combinations(range(k), size)]) for size in range(1, k + 1)]


def _active_set(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Solve `nonnegative` by Lawson and Hanson's algorithm."""
    k = len(moment)
    beta, free = np.zeros(k), np.zeros(k, bool)
    tolerance = 1e-10 * max(float(np.abs(moment).max()), 1e-300)
    for _ in range(3 * k):
        slope = np.where(free, -np.inf, moment - gram @ beta)
        new = int(np.argmax(slope))
        if slope[new] <= tolerance:
            break
        free[new] = True
        while True:
            at = np.flatnonzero(free)
            found = np.zeros(k)
            found[at] = np.linalg.solve(gram[at[:, None], at], moment[at])
            if (found[at] > 0).all():
                beta = found
                break
            low = at[found[at] <= 0]
            steps = beta[low] / np.maximum(beta[low] - found[low], 1e-300)
            beta = beta + steps.min() * (found - beta)
            free[low[steps == steps.min()]] = False
            beta[~free] = 0.0
    return beta


def median(values: np.ndarray) -> float:
    """Return the median of finite values (n,), n ≥ 1. `np.median` takes ten times as long for few of them."""
    middle = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1]
    return float((low + high) / 2)


def robust_sd(residuals: np.ndarray) -> float:
    """Return the standard deviation estimated from the median absolute deviation from zero."""
    return 1.4826 * median(np.abs(residuals)) if len(residuals) else 0.0


def huber_weights(residuals: np.ndarray, sd: float) -> np.ndarray:
    """Return the weights (n,) of an IRLS step: 1 near zero, falling as 1/|r|, 0 beyond six standard deviations."""
    size = np.abs(residuals) / max(sd, 1e-12)
    return np.where(size > REJECT, 0.0, 1 / np.maximum(size / HUBER, 1.0))


def scaled_seed(seed: np.ndarray, rows: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return reference and target (k,) for `fit_shares`: the seed scaled to the level of the records.

    A term that the seed lacks is measured in twentieths of a typical record and drawn to zero.
    """
    predicted = rows @ seed
    level = median(y / predicted) if predicted.min() > MIN_S else 0.0
    small = 0.05 * median(y) / np.maximum(rows.mean(0), 1e-12)
    has = (seed > 0) & (level > 0)
    return np.where(has, seed * level, small), has.astype(float)


def fit_shares(
    rows: np.ndarray,
    y: np.ndarray,
    reference: np.ndarray,
    target: np.ndarray,
    old: tuple[np.ndarray, np.ndarray] | None = None,
    counts: np.ndarray | float = 1.0,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Fit y ≈ rows·β, β ≥ 0, robustly by relative errors (a step twice as long may err by twice as much).

    rows (n, k), y (n,) > 0. θ = β / reference has a normal prior around `target` (k,). Its standard deviation is 1, or
    half of a typical record if that is more. The prior's weight fades as records come in. Where the rows do not
    separate the terms, the split is the prior's. old: gram (k, k) and moment (k,) of earlier records in units of β.
    counts (n,): weight of each record.

    Returns β, the weights (n,), and this batch's own gram and moment for the caller to keep.
    """
    beta = reference * target
    least = 1e-6 * median(y)
    predicted = np.maximum(rows @ beta, least)
    predicted = predicted * median(y / predicted)  # level first: else all records of a changed machine are outliers
    share = reference * np.mean(rows / predicted[:, None], axis=0)
    prior_sd = np.maximum(PRIOR_SD, PRIOR_SHARE / np.maximum(share, 1e-12))
    gram, moment = np.zeros((len(beta),) * 2), np.zeros(len(beta))
    weights = np.ones(len(y))
    for turn in range(2 * ROUNDS):
        residuals = np.log(y / predicted)
        sd = robust_sd(residuals)
        if turn < ROUNDS:  # least absolute deviations: outliers cannot move this start
            weights = counts / np.maximum(np.abs(residuals) / MIN_NOISE, 1.0)
        else:
            weights = counts * huber_weights(residuals, max(sd, 1e-4))
        relative = rows / predicted[:, None]
        gram = (relative * weights[:, None]).T @ relative
        moment = relative.T @ (weights * (y / predicted))
        whole, right = (gram, moment) if old is None else (gram + old[0], moment + old[1])
        strength = (max(sd, MIN_NOISE) / prior_sd) ** 2  # Bayes: the variance of the records over that of the prior
        theta = nonnegative(whole * np.outer(reference, reference) + np.diag(strength), right * reference + strength * target)
        beta = reference * theta
        predicted = np.maximum(rows @ beta, least)
    return beta, weights, (gram, moment)
