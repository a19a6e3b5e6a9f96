"""Conditioning on siblings: the responses to one prompt inform each other's forecasts while they run."""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr

from placement.forecast.remaining_length import Forecast

MIN_SHARE = 0.02  # common share of the error below which siblings are ignored
ROUNDS = 6
FARTHEST = 3.0  # standard deviations at which an ended response's error is clipped: an outlier must not move its group


def group_error_correlation(scenarios: np.ndarray, group: np.ndarray) -> float:
    """Return the share of the forecast error that responses to one prompt have in common, 0 … 0.98.

    From joint draws (n, S) of their lengths: mean covariance of log lengths within a group over their mean variance.
    What a whole draw has in common is left out, because the rollout reveals it (see `calibrate`). Returns 0 if no group
    has two members, or with fewer than three draws.
    """
    logs = np.log(np.maximum(np.asarray(scenarios, float), 1.0))
    if logs.ndim != 2 or logs.shape[1] < 3:
        return 0.0
    index = np.unique(group, return_inverse=True)[1]
    count = np.bincount(index)
    if count.max() < 2:
        return 0.0
    error = logs - logs.mean(1, keepdims=True)
    error -= error.mean(0)
    sums, squares = np.zeros((len(count), logs.shape[1])), np.zeros((len(count), logs.shape[1]))
    np.add.at(sums, index, error)
    np.add.at(squares, index, error**2)
    pairs = float((count * (count - 1)).sum())
    variance = float((error**2).mean())
    return float(np.clip((sums**2 - squares).sum() / (pairs * logs.shape[1]) / max(variance, 1e-18), 0.0, 0.98))


def condition_on_siblings(forecast: Forecast, generated: np.ndarray, finished: np.ndarray, group: np.ndarray, share: float) -> Forecast:
    """Correct each response's forecast by its siblings.

    The model is log L = mean + u + v, where u is common to a group with a `share` of the variance, and v is the
    response's own. generated (n,): tokens so far. finished (n,), group (n,).

    An ended sibling shows u + v. A running one shows that it is larger, and contributes its expectation beyond that (an
    EM iteration). A response's own progress is left out of its own correction, because its survival is conditioned on
    afterwards. The posterior of u is that of a normal mean with known variances. A running sibling counts as far as its
    variance is below that of an unseen one.
    """
    n = len(forecast.mean_log)
    if share < MIN_SHARE or not (generated > 0).any():
        return forecast
    index = np.unique(group, return_inverse=True)[1]
    groups = int(index.max()) + 1
    sd = forecast.sd_log
    own_sd, prior = np.sqrt(1 - share) * sd, 1 / (share * sd**2)
    seen = np.log(np.maximum(generated, 0.5)) - forecast.mean_log
    ended_error = np.clip(seen, -FARTHEST * sd, FARTHEST * sd)
    shift = np.zeros(n)
    weight = np.zeros(n)
    for _ in range(ROUNDS):
        z = np.clip((seen - shift) / own_sd, -30, 30)
        mills = np.exp(-z * z / 2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-z))
        error = np.where(finished, ended_error, shift + own_sd * mills)
        information = np.where(finished, 1.0, np.clip(mills * (mills - z), 0.0, 1.0))  # 1 - variance beyond / variance
        weight = information / own_sd**2
        value = np.where(finished, error, shift + np.where(information > 1e-9, (error - shift) / np.maximum(information, 1e-9), 0.0))
        total = np.bincount(index, weight, groups)[index] - weight
        product = np.bincount(index, weight * value, groups)[index] - weight * value
        shift = product / (total + prior)
    left = 1 / (total + prior)
    return Forecast(forecast.mean_log + shift, np.sqrt(own_sd**2 + left))
