"""Length forecasts for a step's prompts, from their earlier responses and those of other prompts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtri

from placement.forecast.history import LengthHistory
from placement.forecast.quality import ForecastQuality, LengthRanks, forecast_quality
from placement.forecast.regression import FeatureLine
from placement.forecast.residuals import Residuals
from placement.forecast.scenarios import LengthForecast, Scenarios
from placement.plain_data import JsonObject

__all__ = ["ForecastQuality", "LengthForecast", "LengthForecaster", "Scenarios", "VarianceShares", "forecast_quality"]

VISIT_WEIGHT = 0.5  # of the newest visit in a prompt's history
MOST_PROMPTS = 65_536  # prompts remembered
FADE = 0.95  # factor per step on what is known about variances and features
MIN_VARIANCE = 1e-4  # of log length: no policy's lengths are taken to be constant
LEVELS = np.append(np.linspace(0, 0.95, 31), 1.0)  # of the forecast at which it is calibrated
CALIBRATION_RATE = 0.2  # part of a step's miscalibration that is corrected at once
LEAST_SHARE = 0.05  # of a slice's probability that calibration leaves to it
SPREAD_PRIOR = 16.0  # weight of the common spread in a prompt's own, in degrees of freedom


@dataclass(frozen=True)
class VarianceShares:
    """Variances of log length by source.

    prompt: between prompts, after their features. sampling: among one prompt's responses. wander: of one prompt between
    visits, beyond the common drift. drift: of the common drift from step to step.
    """

    prompt: float
    sampling: float
    wander: float
    drift: float


class LengthForecaster:
    """Forecasts response lengths as distributions: log length = level of the policy + prompt effect + sampling effect.

    A prompt's effect combines its history (exponentially weighted mean of its responses) and a regression on all
    prompts' features, weighted by their precisions. Without history it is the regression alone. The level follows a
    random walk (a one-dimensional Kalman filter), so that a prompt seen long ago is forecast at today's level. The four
    variances are estimated online by moments. The shapes around the centres are the newest standardised residuals
    themselves, which correct a wrong variance. Lengths at `max_tokens` are lower bounds: they are replaced by their
    conditional expectation under the forecast (an EM step, Dempster et al. 1977). So a prompt that is often cut is
    forecast beyond the limit and then clipped.

    Parameters
    ----------
    default_tokens : float
        Forecast before any response was observed.
    max_tokens : float, optional
        Length at which responses are cut.

    Raises
    ------
    ValueError
        If `default_tokens` is not positive.

    Examples
    --------
    >>> forecaster = LengthForecaster(default_tokens=200.0, max_tokens=512)
    >>> forecaster.observe([0, 1], [12, 30], [np.array([100, 110]), np.array([300, 320])])
    >>> scenarios = forecaster.scenarios([0, 1], [12, 30], samples_per_prompt=4, count=16, seed=0)
    >>> scenarios.shape
    (8, 16)
    """

    def __init__(self, default_tokens: float, *, max_tokens: float | None = None) -> None:
        if not default_tokens > 0:
            raise ValueError(f"default_tokens must be positive, got {default_tokens}")
        self.default_tokens = float(default_tokens)
        self.max_tokens = float("inf") if max_tokens is None else float(max_tokens)
        self.history = LengthHistory(VISIT_WEIGHT, MOST_PROMPTS)
        self.line = FeatureLine(FADE)
        self.level, self.level_variance = 0.0, 0.0
        # [weighted sum, weight]: priors that fade with the steps
        self.sampling = np.array([0.25 * 4, 4.0])
        self.wander = np.array([0.02 * 4, 4.0])
        self.drift = np.array([0.02**2 * 2, 2.0])
        self.siblings_seen = 0.0
        self.prompt_residuals, self.sampling_residuals = Residuals(1024), Residuals(2048)
        self.calibration = LEVELS.copy()  # share of responses below their forecasts' quantiles at `LEVELS`, before it was corrected

    # ---- forecasts ----------------------------------------------------------------------------------------------

    def shares(self) -> VarianceShares:
        """Return the variances as estimated so far."""
        sampling = float(self.sampling[0] / self.sampling[1])
        around = float(self.line.variance()) if self.line else 0.5
        around = max(around, 4 * MIN_VARIANCE) if np.isfinite(around) else 0.5
        if self.siblings_seen == 0:  # with one response per prompt only the sum is identified
            sampling = min(sampling, around / 2)
        per_group = self.mean_inverse_count * sampling if self.line else 0.0
        return VarianceShares(
            max(around - per_group, 0.02 * around),
            max(sampling, MIN_VARIANCE),
            max(float(self.wander[0] / self.wander[1]), 1e-5),
            max(float(self.drift[0] / self.drift[1]), 0.0),
        )

    def predict(self, prompts: Sequence[int], prompt_tokens: Sequence[int], samples_per_prompt: int = 1) -> LengthForecast:
        """Forecast `samples_per_prompt` responses to each of P prompts, given by data-set row and tokens (P,).

        Row i·samples + j of the result is response j of prompt i. Raises ValueError if shapes disagree.
        """
        table = _features(prompts, prompt_tokens)
        center, sd, spread = self._prior(prompts, table)
        shares = self.shares()
        drift = np.sqrt(shares.drift + self.level_variance) if self.line else 0.3
        own_shape = self.sampling_residuals.shape
        if samples_per_prompt == 1 and self.line and not self.siblings_seen:
            # The split was never observed: residuals are whole ones, so draw from their shape as a whole.
            spread, sd = np.sqrt(spread**2 + sd**2), np.zeros(len(sd))
            own_shape = self.prompt_residuals.shape
        return LengthForecast(
            np.repeat(center, samples_per_prompt),
            np.repeat(spread, samples_per_prompt),
            np.repeat(np.arange(len(center)), samples_per_prompt),
            sd,
            float(drift),
            self.prompt_residuals.shape,
            own_shape.recalibrated(LEVELS, self.calibration),
            self.max_tokens,
        )

    def scenarios(self, prompts: Sequence[int], prompt_tokens: Sequence[int], samples_per_prompt: int, count: int, seed: int) -> np.ndarray:
        """Draw (P · samples_per_prompt, count) joint lengths in tokens, one column per draw.

        `predict(…).draw(count, seed)` draws the same, and can be revised while the step runs.
        """
        return self.predict(prompts, prompt_tokens, samples_per_prompt).draw(count, seed).lengths

    def forecast(self, prompts: Sequence[int], prompt_tokens: Sequence[int]) -> np.ndarray:
        """Return the expected response tokens (P,)."""
        return self.predict(prompts, prompt_tokens).mean_tokens()

    def _prior(self, prompts: Sequence[int], table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return centre, standard deviation of the prompt effect and of the sampling effect of log length, each (P,)."""
        shares = self.shares()
        seen = self.history.get(prompts)
        known = ~np.isnan(seen[:, 0])
        if self.line:
            line = self.level + self.line.predict(table)
        else:  # chosen so that the expected length is the default
            line = np.full(len(table), np.log(self.default_tokens) - (shares.prompt + shares.sampling + 0.3**2) / 2)
        of_history = shares.sampling / np.where(known, seen[:, 1], 1.0) + shares.wander
        gain = np.where(known, shares.prompt / (shares.prompt + of_history), 0.0)
        center = line + gain * np.where(known, self.level + seen[:, 0] - line, 0.0)
        variance = np.where(known, gain * of_history, shares.prompt)
        freedom = np.where(known, seen[:, 3], 0.0)
        own = np.where(known, seen[:, 2], 0.0)
        spread = np.sqrt((SPREAD_PRIOR * shares.sampling + freedom * own) / (SPREAD_PRIOR + freedom))
        return center, np.sqrt(variance), spread

    # ---- learning -----------------------------------------------------------------------------------------------

    mean_inverse_count = 1.0  # mean of 1 / responses per group, over the data of the regression

    def observe(self, prompts: Sequence[int], prompt_tokens: Sequence[int], lengths: Sequence[np.ndarray]) -> None:
        """Learn from a step's responses: `lengths[i]` (samples,) tokens for `prompts[i]`.

        Prompts without a response are skipped.

        Raises:
            ValueError: If shapes disagree, or lengths are negative or not finite.
        """
        groups = [np.asarray(group, float) for group in lengths]
        table = _features(prompts, prompt_tokens)
        if len(groups) != len(table):
            raise ValueError(f"{len(table)} prompts, but {len(groups)} groups of lengths")
        keep = [i for i, group in enumerate(groups) if len(group)]
        if not keep:
            return
        prompts, table, groups = [prompts[i] for i in keep], table[keep], [groups[i] for i in keep]
        counts = np.array([len(group) for group in groups])
        tokens = np.concatenate(groups)
        if not np.isfinite(tokens).all() or (tokens < 0).any():
            raise ValueError("response lengths must be finite and not negative")
        first = not self.line
        center, sd, spread = self._prior(prompts, table)
        seen = self.history.get(prompts)
        y = np.log(np.maximum(tokens, 1.0))
        owner = np.repeat(np.arange(len(counts)), counts)
        y = _impute_censored(y, tokens >= self.max_tokens, owner, counts, center, sd, spread)
        means = np.bincount(owner, y) / counts
        own = y - means[owner]
        squares = np.bincount(owner, own**2)
        self._learn_sampling(own, owner, counts, squares, spread)
        off = means - center
        if not first:
            noise = sd**2 + spread**2 / counts
            step = self._learn_level(off, noise)
            self.prompt_residuals.add((off - step) / np.sqrt(noise))
            self._learn_wander(means - self._level_before - step, seen, counts, spread)
        new_share = len(counts) / (self.line.sums[0, 0] * FADE + len(counts)) if self.line else 1.0
        self.mean_inverse_count += new_share * (float((1 / counts).mean()) - self.mean_inverse_count)
        self.line.add(table, means - self.level)
        self.history.visit(prompts, means - self.level, counts, squares)

    def calibrate(self, ranks: LengthRanks) -> None:
        """Learn from the ranks of a step's lengths among their scenarios how often lengths fall into each slice of their forecasts.

        Recalibration by the distribution of the forecasts' own levels (Kuleshov et al. 2018), a part of it in each step. It reshapes what
        differs among the responses to one prompt, which is the most of a length's variance.
        """
        now = ranks.curve(self.calibration)
        shares = np.diff(self.calibration + CALIBRATION_RATE * (now - self.calibration))
        shares = np.maximum(shares, LEAST_SHARE * np.diff(LEVELS))
        shares[-1] = max(shares[-1], 1 - LEVELS[-2])  # the longest responses decide a rollout's end: never make them rarer
        self.calibration = np.concatenate([[0.0], np.cumsum(shares) / shares.sum()])

    def _learn_sampling(self, own: np.ndarray, owner: np.ndarray, counts: np.ndarray, squares: np.ndarray, spread: np.ndarray) -> None:
        freedom = counts - 1
        before = self.shares().sampling
        if freedom.any():  # without siblings nothing fades: with one response per prompt it would end at 0 / 0
            self.sampling = FADE * self.sampling + np.array([squares.sum(), freedom.sum()])
        self.siblings_seen += float(freedom.sum())
        # Standardise by the updated variance, which also scales the draws. Otherwise the first step's residuals would
        # correct an initial guess that has just been corrected.
        spread = spread * np.sqrt(self.shares().sampling / before)
        several = counts[owner] > 1
        wide = spread * np.sqrt(np.maximum(freedom, 1) / counts)  # a deviation from the group's own mean is smaller
        self.sampling_residuals.add(own[several] / wide[owner][several])

    def _learn_level(self, off: np.ndarray, noise: np.ndarray) -> float:
        """Update the level. Returns how far the whole step was off."""
        weight = 1 / noise
        step, variance = float(off @ weight / weight.sum()), float(1 / weight.sum())
        self.drift = FADE * self.drift + np.array([step**2 - variance - self.level_variance, 1.0])
        self.drift[0] = max(self.drift[0], 0.0)
        expected = self.level_variance + float(self.drift[0] / self.drift[1])
        gain = expected / (expected + variance)
        self._level_before = self.level
        self.level += gain * step
        self.level_variance = (1 - gain) * expected
        return step

    _level_before = 0.0

    def _learn_wander(self, found: np.ndarray, seen: np.ndarray, counts: np.ndarray, spread: np.ndarray) -> None:
        known = ~np.isnan(seen[:, 0])
        if known.any():
            off = found[known] - seen[known, 0]
            extra = off**2 - spread[known] ** 2 * (1 / counts[known] + 1 / seen[known, 1])
            self.wander = FADE * self.wander + np.array([extra.sum(), known.sum()])
            self.wander[0] = max(self.wander[0], 0.0)

    # ---- state --------------------------------------------------------------------------------------------------

    def state(self) -> JsonObject:
        """Return the state as JSON-serialisable values: about 35 bytes per remembered prompt and 17 kB for the rest."""
        return {
            "history": self.history.state(),
            "line": self.line.state(),
            "level": [self.level, self.level_variance],
            "sampling": self.sampling.tolist(),
            "wander": self.wander.tolist(),
            "drift": self.drift.tolist(),
            "siblings_seen": self.siblings_seen,
            "mean_inverse_count": self.mean_inverse_count,
            "calibration": self.calibration.tolist(),
            "prompt_residuals": _encode(self.prompt_residuals.values),
            "sampling_residuals": _encode(self.sampling_residuals.values),
        }

    def restore(self, state: JsonObject) -> None:
        """Restore a state. Raises ValueError for a state of another version."""
        if "line" not in state:
            raise ValueError("the checkpoint's length forecasts are of an older version; start a new run")
        self.history.restore(state["history"])
        self.line.restore(state["line"])
        self.level, self.level_variance = state["level"]
        self.sampling, self.wander, self.drift = (np.array(state[name]) for name in ("sampling", "wander", "drift"))
        self.siblings_seen, self.mean_inverse_count = state["siblings_seen"], state["mean_inverse_count"]
        self.calibration = np.array(state.get("calibration", LEVELS), float)  # of runs before 2026-11-29 there is none
        for name in ("prompt_residuals", "sampling_residuals"):
            residuals: Residuals = getattr(self, name)
            residuals.clear()
            residuals.add(np.frombuffer(base64.b64decode(state[name]), "<f4"))


def _features(prompts: Sequence[int], prompt_tokens: Sequence[int]) -> np.ndarray:
    """Return what the regression reads of each prompt, (P, 2)."""
    tokens = np.asarray(prompt_tokens, float)
    if tokens.shape != (len(prompts),):
        raise ValueError(f"{len(prompts)} prompts, but prompt_tokens of shape {tokens.shape}")
    return np.column_stack([tokens, np.log(np.maximum(tokens, 1.0))])


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _impute_censored(
    y: np.ndarray, cut: np.ndarray, owner: np.ndarray, counts: np.ndarray, center: np.ndarray, sd: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """Return log lengths (n,) with those that were `cut` replaced by plausible full lengths.

    These are evenly spread quantiles of a normal distribution beyond the cut. Its location is the prompt's, given all
    its responses (three EM steps).
    """
    if not cut.any():
        return y
    limit, filled = y.copy(), y.copy()
    for _ in range(3):
        means = np.bincount(owner, filled) / counts
        precision = counts / spread**2
        location = (center / np.maximum(sd, 1e-3) ** 2 + means * precision) / (1 / np.maximum(sd, 1e-3) ** 2 + precision)
        at = (limit - location[owner])[cut] / spread[owner][cut]
        # mean of a normal tail, in logarithms because the cut may lie far above the location
        mills = np.exp(-0.5 * at**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-at))
        filled[cut] = np.maximum(limit[cut], location[owner][cut] + spread[owner][cut] * mills)
        # otherwise the location of a prompt that is always cut would diverge
        filled[cut] = np.minimum(filled[cut], limit[cut] + 2 * spread[owner][cut])
    place = np.flatnonzero(cut)
    order = np.concatenate([np.arange(c) for c in np.unique(owner[place], return_counts=True)[1]])
    many = np.bincount(owner[place], minlength=len(counts))[owner[place]]
    survival = np.exp(log_ndtr(-at)) * (1 - (order + 0.5) / many)
    values = location[owner[place]] - spread[owner[place]] * ndtri(np.maximum(survival, 1e-300))
    filled[place] = np.clip(values, limit[place], limit[place] + 3 * spread[owner[place]])
    return filled
