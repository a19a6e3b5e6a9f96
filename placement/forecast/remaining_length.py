"""Remaining lengths of live sequences: their forecasts, corrected by what this rollout has shown so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, log_ndtr, ndtr

MIN_SPREAD = 0.05  # least log-scale spread of a forecast
KNEE = 0.36  # share of variance explained at which half of the forecasts count as informative
SHARES = np.array([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.999])  # possible shares of uninformative forecasts
SHARE_PRIOR = np.array([1, 1, 2, 3, 4, 3, 2, 1]) / 17  # prior probability of each
STEPS = 24  # points of the grid of future tokens
GRID = np.linspace(0, 1, STEPS + 1)[1:] ** 2  # relative to the largest number of future tokens


@dataclass(frozen=True)
class Forecast:
    """Length forecasts as log-normals. mean_log, sd_log (n,): of the logarithm of response tokens."""

    mean_log: np.ndarray
    sd_log: np.ndarray

    @classmethod
    def from_scenarios(cls, scenarios: np.ndarray, least_spread: float = MIN_SPREAD) -> Forecast:
        """Fit to scenarios (n, S).

        With few draws, part of the spread's scatter is noise. Spreads are shrunk towards their common value as far as
        their scatter is explained by S draws of one spread (empirical Bayes; var(s²) = 2σ⁴ / (S - 1)).
        """
        logs = np.log(np.maximum(scenarios, 1.0))
        draws = logs.shape[1]
        if draws == 1:  # a single draw has no spread: take the least one, and learn it from the rollout
            return cls(logs[:, 0], np.full(len(logs), least_spread))
        variance = logs.var(1, ddof=1)
        common = float(variance.mean())
        scatter = float(variance.var()) / max(common * common, 1e-18)
        own = max(0.0, 1 - 2 / (draws - 1) / scatter) if scatter > 0 else 0.0
        return cls(logs.mean(1), np.sqrt(np.maximum(common + own * (variance - common), least_spread**2)))


PRIOR_WEIGHT = 5.0  # weight of the original forecast in `calibrate`, in sequences


def calibrate(forecast: Forecast, generated: np.ndarray, finished: np.ndarray, *, uninformative_share: float = 0.0) -> Forecast:
    """Correct the forecast by this rollout: log L = shift + slope·mean_log + scale·sd_log·ε, ε normal.

    generated (n,): tokens so far. finished (n,). The original forecast (shift 0, slope 1, scale 1) counts as PRIOR_WEIGHT
    sequences.

    A live sequence shows that its length is larger. This is a censored (Tobit) regression, solved by Newton's method in
    Olsen's parameters (Econometrica 46, 1978), in which the likelihood is concave. A share `uninformative_share` of the
    sequences may follow the pooled forecasts instead of their own. Each sequence is weighted by its probability of
    following its own (EM for the mixture, one step per Newton step). So a few outliers do not widen everybody's
    forecast.
    """
    seen = generated > 0
    if not seen.any():
        return forecast
    centre = float(forecast.mean_log.mean())
    mean, spread, ended = forecast.mean_log[seen] - centre, forecast.sd_log[seen], finished[seen]
    log_tokens = np.log(np.maximum(generated[seen], 0.5)) - centre
    rows = np.stack([-1 / spread, -mean / spread, log_tokens / spread], 1)
    done, running = rows[ended], rows[~ended]
    wide = float(np.sqrt(np.mean(spread**2) + forecast.mean_log.var()))
    done_pooled = np.square(log_tokens[ended] / wide) / -2 - np.log(wide)
    running_pooled = log_ndtr(-log_tokens[~ended] / wide)
    inverse = float(np.mean(1 / spread**2))
    prior = PRIOR_WEIGHT * np.diag([inverse, max(float(forecast.mean_log.var()), 1e-4) * inverse, 2.0])
    start = np.array([0.0, 1.0, 1.0])
    beta = start.copy()
    for _ in range(14):
        off, above = done @ beta, np.clip(running @ beta, -30, 30)
        log_beyond = log_ndtr(-above)
        own = _own_probability(np.square(off) / -2 + np.log(beta[2] / spread[ended]) - done_pooled, uninformative_share)
        still = _own_probability(log_beyond - running_pooled, uninformative_share)
        mills = np.exp(-above * above / 2 - 0.5 * np.log(2 * np.pi) - log_beyond)
        gradient = -(done.T @ (own * off)) - running.T @ (still * mills) - prior @ (beta - start)
        gradient[2] += own.sum() / beta[2]
        hessian = prior + (done * own[:, None]).T @ done + (running * (still * mills * (mills - above))[:, None]).T @ running
        hessian[2, 2] += own.sum() / beta[2] ** 2
        step = np.linalg.solve(hessian, gradient)
        while beta[2] + step[2] <= 0.05:
            step /= 2
        beta = beta + step
        if np.abs(step).max() < 1e-3:
            break
    shift, slope, scale = beta[0] / beta[2], beta[1] / beta[2], 1 / beta[2]
    return Forecast(centre + shift + slope * (forecast.mean_log - centre), scale * forecast.sd_log)


def _own_probability(log_odds: np.ndarray, uninformative_share: float) -> np.ndarray:
    """Return the probability that a sequence follows its own forecast, from its log-likelihood ratio over the pooled one."""
    if uninformative_share <= 0:
        return np.ones(len(log_odds))
    return np.asarray(expit(log_odds + np.log((1 - uninformative_share) / uninformative_share)))


def estimate_uninformative_share(forecast: Forecast, generated: np.ndarray, finished: np.ndarray) -> float:
    """Return the share of sequences whose forecast is treated as uninformative.

    It combines the share for a forecast of this strength (`weak_forecast_share`) with the share that this rollout shows
    among the others (`observed_uninformative_share`).
    """
    return min(0.999, 1 - (1 - weak_forecast_share(forecast)) * (1 - observed_uninformative_share(forecast, generated, finished)))


def weak_forecast_share(forecast: Forecast) -> float:
    """Return 1 / (1 + (R² / KNEE)^6), with R² the share of log-length variance that the forecast explains.

    A weak forecast has little to give. Believed, it can put a long response into a crowd. So it is ignored, which
    leaves consolidation. The form and KNEE are judgement, set on GSM8K answers (R² about 0.5), a conversation trace
    forecast weakly (0.3), and log-normals (0.6 and 0.9).
    """
    between = float(forecast.mean_log.var())
    explained = between / max(between + float(np.mean(forecast.sd_log**2)), 1e-12)
    return 1 / (1 + (explained / KNEE) ** 6)


def observed_uninformative_share(forecast: Forecast, generated: np.ndarray, finished: np.ndarray) -> float:
    """Return the posterior mean of the uninformative share, over SHARES with prior SHARE_PRIOR.

    What matters is whether forecasts order the long sequences, so only those that outlived the median forecast count.
    Each adds the likelihood of its end (or of being alive) given that it got so far, as a mixture of its own forecast
    and of the pooled ones. Forecasts of recorded answers can be right in the bulk and wrong about the longest, hence a
    doubtful prior: believed at once, they put the longest response into a crowd and took up to 17 % more time than
    consolidation.
    """
    pool_mean = float(forecast.mean_log.mean())
    pool_sd = float(np.sqrt(np.mean(forecast.sd_log**2) + forecast.mean_log.var()))
    log_tokens = np.log(np.maximum(generated, 0.5))
    long = log_tokens > pool_mean
    log_tokens, ended = log_tokens[long], finished[long]

    def log_likelihoods(mean: np.ndarray | float, sd: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Return log-likelihoods (k,): of the observation, and of having outlived the median."""
        z = (log_tokens - mean) / sd
        return np.where(ended, z * z / -2 - np.log(sd) - 0.5 * np.log(2 * np.pi), log_ndtr(-z)), log_ndtr((mean - pool_mean) / sd)

    own, own_before = log_likelihoods(forecast.mean_log[long], forecast.sd_log[long])
    pool, pool_before = log_likelihoods(pool_mean, pool_sd)
    known, dark = np.log1p(-SHARES)[:, None], np.log(SHARES)[:, None]
    given = np.logaddexp(known + own, dark + pool) - np.logaddexp(known + own_before, dark + pool_before)
    log_odds = np.log(SHARE_PRIOR) + given.sum(1)
    odds = np.exp(log_odds - log_odds.max())
    return float(SHARES @ odds / odds.sum())


@dataclass(frozen=True)
class RemainingLengths:
    """Predicted remaining lengths of live sequences.

    tokens (G,): grid of further tokens. alive (n, G): probability of running further than that. critical (n,):
    probability of ending last if all continue at the same pace (sums to 1). uninformative_share: share of sequences whose
    forecast is treated as uninformative.
    """

    tokens: np.ndarray
    alive: np.ndarray
    critical: np.ndarray
    uninformative_share: float = 0.0

    def last(self, late_tokens: float = 0.0) -> np.ndarray:
        """Return (n,) the probability that each sequence ends last if it alone pauses.

        It pauses while the others make `late_tokens` tokens. P = Σ over the grid of P(it ends here) · P(all others have
        ended by then, `late_tokens` on). If several sequences are sure to end at the same time, each is the last as
        soon as it pauses.
        """
        n = len(self.alive)
        points = np.concatenate(([0.0], self.tokens))
        ended = np.log1p(-np.minimum(self.alive, 1 - 1e-12))
        others = np.exp(np.minimum(ended.sum(0) - ended, 0.0))
        others = np.concatenate([np.full((n, 1), float(n == 1)), others, np.ones((n, 1))], 1)
        if late_tokens:
            at = np.interp(points + late_tokens, points, np.arange(len(points)), right=float(len(points)))
            below = np.minimum(at.astype(int), len(points) - 1)
            share = at - below
            others = np.c_[others[:, below] * (1 - share) + others[:, below + 1] * share, np.ones(n)]
        ends = -np.diff(self.alive, axis=1, prepend=1.0, append=0.0)
        return np.asarray(np.sum(ends * (others[:, 1:] + others[:, :-1]), axis=1) / 2)


def predict_remaining(
    forecast: Forecast, everyone: Forecast, generated: np.ndarray, uninformative_share: float, limit: float = np.inf
) -> RemainingLengths:
    """Predict the residual lengths of live sequences with `generated` (n,) tokens and calibrated `forecast`.

    With probability `uninformative_share` a sequence's length is drawn from `everyone`, the rollout's pooled forecasts.
    That probability grows by Bayes' rule as a sequence outlives its own forecast, which moves an outlier off the crowd.
    No response exceeds `limit` tokens, generated and remaining together.
    """
    pool_mean = float(everyone.mean_log.mean())
    pool_sd = float(np.sqrt(np.mean(everyone.sd_log**2) + everyone.mean_log.var()))
    mean, sd = forecast.mean_log, forecast.sd_log
    now = np.log(np.maximum(generated, 0.5))
    own_now, pool_now = log_ndtr((mean - now) / sd), log_ndtr((pool_mean - now) / pool_sd)
    own = _own_probability(own_now - pool_now, uninformative_share)
    pool = 1 - own
    top = max(np.exp(pool_mean + 3.6 * pool_sd), float(np.exp((mean + 2.5 * sd).max())), 1.3 * float(generated.max()) + 3)
    top = min(top, max(limit, float(generated.min()) + 1))
    tokens = (top - float(generated.min())) * GRID
    later = np.log(generated[:, None] + tokens + 1e-3)
    alive = own[:, None] * _ratio((mean[:, None] - later) / sd[:, None], own_now)
    if uninformative_share > 0:
        alive += pool[:, None] * _ratio((pool_mean - later) / pool_sd, pool_now)
    alive = np.where(generated[:, None] + tokens < limit, np.minimum(alive, 1.0), 0.0)
    view = RemainingLengths(tokens, alive, np.zeros(0), uninformative_share)
    critical = np.maximum(view.last(), 1e-12)
    return replace(view, critical=critical / critical.sum())


def _ratio(z: np.ndarray, log_now: np.ndarray) -> np.ndarray:
    """Return Φ(z) / exp(log_now), in logarithms where the plain ratio would underflow."""
    ratio = ndtr(z) / np.exp(np.maximum(log_now, -600.0))[:, None]
    far = log_now < -600.0
    if far.any():
        ratio[far] = np.exp(log_ndtr(z[far]) - log_now[far, None])
    return ratio
