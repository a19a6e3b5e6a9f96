"""Joint draws of a step's response lengths, and their revision while the step runs.

log length of a response = centre of its prompt + drift (common to the step) + prompt effect (common to its group) +
sampling effect (its own). Draws keep these parts, so that live progress conditions each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from placement.forecast.quality import rankdata
from placement.forecast.residuals import Shape

GRID = np.linspace(-3.6, 3.6, 33)  # locations of a prompt, in standard deviations of its prior
MIN_SPREAD = 0.02  # even "known" lengths keep some spread: what outlives its forecast must still end some time
POINT_SPREAD = 0.3  # of log length, for a forecast that is a single number
SHAPE_SAMPLE = 8192
FEW_ENDED = 8  # ended responses from which their order can be judged
MIN_DEVIATIONS = 2.0  # standard deviations above chance from which forecasts are in the right order


@dataclass(frozen=True)
class LengthForecast:
    """Distribution of n responses to P prompts, in log tokens.

    center, spread (n,): centre and sampling standard deviation of each response. group (n,) in 0 … P-1: its prompt.
    prompt_sd (P,), drift_sd: standard deviations of what siblings share and of what all share. prompt_shape,
    sampling_shape: distributions of the standardised effects. No length exceeds max_tokens.
    """

    center: np.ndarray
    spread: np.ndarray
    group: np.ndarray
    prompt_sd: np.ndarray
    drift_sd: float
    prompt_shape: Shape
    sampling_shape: Shape
    max_tokens: float = np.inf

    def __len__(self) -> int:
        return len(self.center)

    def quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Return (n, k) tokens: each response's own quantiles at `levels` (k,), from 2,048 evenly spread draws."""
        first, inverse = self._distinct()
        log = self.center[first, None] + self._deviations(first, 2048)
        found = np.quantile(np.minimum(np.exp(log), self.max_tokens), levels, axis=1).T
        return found[inverse]

    def mean_tokens(self) -> np.ndarray:
        """Return (n,) expected tokens of each response."""
        first, inverse = self._distinct()
        log = self.center[first, None] + self._deviations(first, 512)
        return np.minimum(np.exp(log), self.max_tokens).mean(1)[inverse]

    def _distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first response of each distinct distribution (siblings share one), and the index of each response's own."""
        same = np.column_stack([self.group, self.center, self.spread])
        _, first, inverse = np.unique(same, axis=0, return_index=True, return_inverse=True)
        return first, inverse.reshape(-1)

    def _deviations(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Return (rows, count) log tokens around the centre: a lattice over the levels of shared and own effect."""
        level = (np.arange(count) + 0.5) / count
        other = (np.arange(count) * 0.6180339887498949 + 0.5 / count) % 1  # golden-ratio lattice: even in both levels
        shared_sd = np.sqrt(self.prompt_sd[self.group[rows]] ** 2 + self.drift_sd**2)
        shared = self.prompt_shape.quantile(level) - self.prompt_shape.mean
        own = self.sampling_shape.quantile(np.clip(other, 1e-6, 1 - 1e-6))
        return shared_sd[:, None] * shared + self.spread[rows, None] * own

    def draw(self, count: int, seed: int) -> Scenarios:
        """Draw `count` joint scenarios.

        Every row is stratified (one draw in each of `count` equal slices of probability). So a row's mean is close to
        that of its distribution even where `count` is small.
        """
        if count < 1:
            raise ValueError(f"need at least one scenario, got {count}")
        rng = np.random.default_rng(seed)
        drift = self.drift_sd * ndtri(_levels(rng, 1, count)[0].astype(float))
        effects = self.prompt_shape.quantile(_levels(rng, len(self.prompt_sd), count)) - np.float32(self.prompt_shape.mean)
        hazards = -np.log1p(-_levels(rng, len(self), count))
        return Scenarios(self, drift.astype(np.float32), effects.astype(np.float32), hazards)


class Scenarios:
    """Joint draws of n responses in S scenarios, kept in parts.

    drift (S,). effects (P, S): prompt effects in units of `prompt_sd`. hazards (n, S): -log of the survival level of
    each response's own effect.
    """

    def __init__(self, forecast: LengthForecast, drift: np.ndarray, effects: np.ndarray, hazards: np.ndarray) -> None:
        self.forecast, self.drift, self.effects, self.hazards = forecast, drift, effects, hazards

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n, S) tokens, float32."""
        f = self.forecast
        location = self._shared(self.drift, f.prompt_sd)[f.group]
        location += f.center.astype(np.float32)[:, None]
        return self._tokens(location, f.spread.astype(np.float32)[:, None], self.hazards)

    def _shared(self, drift: np.ndarray, sd: np.ndarray) -> np.ndarray:
        return sd.astype(np.float32)[:, None] * self.effects + drift

    def _tokens(self, location: np.ndarray, spread: np.ndarray, hazards: np.ndarray) -> np.ndarray:
        """Convert to tokens. Reuses the memory of `location` (n, S)."""
        own = self.forecast.sampling_shape.inverse(hazards)
        own *= spread
        location += own
        np.exp(location, out=location)
        np.rint(location, out=location)
        return np.clip(location, 1.0, np.float32(self.forecast.max_tokens), out=location)

    def revise(self, generated: np.ndarray, finished_lengths: np.ndarray | None = None) -> np.ndarray:
        """Return (n, S) tokens, conditioned on progress while the step runs.

        generated (n,): tokens so far. finished_lengths (n,): tokens of ended responses, NaN for the others (None: none
        ended).

        Ended responses become constant rows. A running one exceeds what it generated. Its own effect is conditioned on
        survival exactly, which is an addition in the hazard. Siblings and the whole batch move prompt effects and
        drift: for each prompt the likelihood of its responses, ended and running, is evaluated on 33 locations, matched
        by a normal one, and combined with the prior in closed form. Nothing is drawn again, so revisions of one draw
        differ only by what was learned.
        """
        f = self.forecast
        generated = np.asarray(generated, float)
        ended = np.full(len(f), np.nan) if finished_lengths is None else np.asarray(finished_lengths, float)
        if generated.shape != (len(f),) or ended.shape != (len(f),):
            raise ValueError(f"generated and finished_lengths need shape ({len(f)},), got {generated.shape} and {ended.shape}")
        is_done = ~np.isnan(ended)
        if not is_done.any() and not (generated > 0).any():
            return self.lengths.copy()
        precision, value = self._evidence(generated, ended, is_done)
        known = precision / (1 + f.prompt_sd**2 * precision)  # precision for the drift: the prompt's effect is unknown
        drift, drift_sd = self.drift, f.drift_sd
        if drift_sd > 0:
            total = 1 / drift_sd**2 + known.sum()
            drift = (known @ value / total + self.drift / (drift_sd * np.sqrt(total))).astype(np.float32)
        gain = (f.prompt_sd**2 * known).astype(np.float32)[:, None]
        sd = f.prompt_sd / np.sqrt(1 + f.prompt_sd**2 * precision)
        shared = self._shared(drift, sd) + gain * (value.astype(np.float32)[:, None] - drift)
        out = np.empty(self.hazards.shape, np.float32)
        out[is_done] = ended[is_done, None]
        live = np.flatnonzero(~is_done)
        so_far = generated[live, None].astype(np.float32)
        location = shared[f.group[live]]
        location += f.center[live].astype(np.float32)[:, None]
        spread = f.spread[live].astype(np.float32)[:, None]
        z = np.log(np.maximum(so_far, np.float32(1e-6))) - location
        z /= spread
        hazards = f.sampling_shape.hazard(z)
        hazards += self.hazards[live]
        tokens = self._tokens(location, spread, hazards)
        np.maximum(tokens, so_far + 1, out=tokens)
        out[live] = np.minimum(tokens, np.maximum(so_far, np.float32(f.max_tokens)), out=tokens)
        return out

    def left(self, generated: np.ndarray, finished: np.ndarray, limit: float = np.inf) -> np.ndarray:
        """Return (n, S) tokens that responses still get, at least 1. No response exceeds `limit` tokens.

        generated (n,): tokens so far. finished (n,). Until those that have ended are seen to be the ones that were forecast to be short,
        the forecasts are pooled: each response is taken to be as long as any other. Forecasts may know less than they say.
        """
        forecast = self if self._is_ordered(finished) else self._pooled
        revised = forecast.revise(generated, np.where(finished, generated, np.nan))
        return np.maximum(np.minimum(revised, limit) - np.asarray(generated)[:, None], 1.0)

    def _is_ordered(self, finished: np.ndarray) -> bool:
        """Return whether running responses were forecast longer than ended ones beyond chance (Mann-Whitney). False if few have ended."""
        ended, n = int(finished.sum()), len(finished)
        running = n - ended
        if ended < FEW_ENDED or not running:
            return not running
        above = self._ranks[~finished].sum() - running * (running + 1) / 2
        return bool(above / (ended * running) - 0.5 > MIN_DEVIATIONS * np.sqrt((n + 1) / (12 * ended * running)))

    @cached_property
    def _ranks(self) -> np.ndarray:
        return rankdata(self.lengths.mean(1))

    @cached_property
    def _pooled(self) -> Scenarios:
        return Scenarios.from_matrix(np.random.default_rng(0).permuted(self.lengths, axis=0))

    def _evidence(self, generated: np.ndarray, ended: np.ndarray, is_done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return precision and value (P,) of the normal observation of (drift + prompt effect) equivalent to a prompt's responses."""
        f = self.forecast
        scale = np.sqrt(f.prompt_sd**2 + f.drift_sd**2)
        precision, value = np.zeros(len(scale)), np.zeros(len(scale))
        rows = np.flatnonzero((is_done | (generated > 1)) & (scale[f.group] > 1e-6))
        if not len(rows):
            return precision, value
        rows = rows[np.argsort(f.group[rows], kind="stable")]
        group, done = f.group[rows], is_done[rows]
        seen = np.where(done, ended[rows], generated[rows])
        open_end = ~done | (seen >= f.max_tokens)  # a response cut at the limit would have gone on
        z0 = ((np.log(np.maximum(seen, 1e-6)) - f.center[rows]) / f.spread[rows]).astype(np.float32)
        per_step = (scale[group] / f.spread[rows]).astype(np.float32)
        z = z0[:, None] - per_step[:, None] * GRID.astype(np.float32)
        each = -f.sampling_shape.hazard(z)
        each[~open_end] = f.sampling_shape.log_density(z[~open_end])
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        log_posterior = np.add.reduceat(each, starts, axis=0).astype(float) - GRID**2 / 2
        mass = np.exp(log_posterior - log_posterior.max(1, keepdims=True))
        mass /= mass.sum(1, keepdims=True)
        mean = mass @ GRID
        variance = np.maximum(mass @ GRID**2 - mean**2, 1e-3)
        # Subtract what the prior alone gives on this grid. Evidence never widens the posterior.
        alone = np.exp(-(GRID**2) / 2)
        known = np.maximum(1 / variance - alone.sum() / (alone @ GRID**2), 1e-6)
        owner = group[starts]
        precision[owner] = known / scale[owner] ** 2
        value[owner] = mean / variance / known * scale[owner]
        return precision, value

    @classmethod
    def from_matrix(cls, scenarios: np.ndarray) -> Scenarios:
        """Split draws given as a matrix (n, S) into what a column has in common and what is a response's own.

        With S = 1 a standard deviation of 0.3 of log length is assumed. Raises ValueError for empty, non-finite or
        non-positive lengths.
        """
        scenarios = np.asarray(scenarios, float)
        if scenarios.ndim != 2 or not scenarios.size:
            raise ValueError(f"scenarios need shape (n, S), got {scenarios.shape}")
        if not np.isfinite(scenarios).all() or (scenarios <= 0).any():
            raise ValueError("scenarios must be finite and positive")
        n, count = scenarios.shape
        y = np.log(scenarios)
        center = y.mean(1)
        normal, drift, drift_sd = Shape(np.empty(0), 64), np.zeros(count), 0.0
        if count == 1:
            shape, spread, hazards = normal, np.full(n, POINT_SPREAD), np.full((n, 1), np.log(2), np.float32)
        else:
            free = count / (count - 1)
            rest = y - center[:, None]
            drift = rest.mean(0)
            noise = ((rest - drift) ** 2).mean() * free / n  # upper bound on the column means' variance without a drift
            total = drift.var() * free
            drift = drift * np.sqrt(max(0.0, 1 - noise / total) if total > 1e-12 else 0.0)
            drift_sd = float(np.sqrt(drift.var() * free))
            rest = rest - drift
            spread = np.maximum(np.sqrt((rest**2).sum(1) / (count - 1)), MIN_SPREAD)
            z = (rest / spread[:, None]).astype(np.float32)
            sample = z.reshape(-1)[:: max(1, z.size // SHAPE_SAMPLE)]
            shape = Shape(sample, 8 if len(sample) < 64 else 0)
            hazards = shape.hazard(z)
        forecast = LengthForecast(center, spread, np.arange(n), np.zeros(n), drift_sd, normal, shape)
        found = cls(forecast, drift.astype(np.float32), np.zeros((n, count), np.float32), hazards)
        found.__dict__["lengths"] = scenarios.astype(np.float32)
        return found


PERMUTATIONS = 256


def _levels(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Return (rows, count) probabilities, one in each of `count` equal slices of every row; float32 in (0, 1).

    Their order is nearly independent between rows: one of 256 random permutations, rotated at random.
    """
    tables = rng.permuted(np.tile(np.arange(count, dtype=np.float32), (min(PERMUTATIONS, rows), 1)), axis=1)
    which, turn = rng.integers(0, len(tables), rows), rng.integers(0, count, rows)
    turned = np.lib.stride_tricks.sliding_window_view(np.concatenate([tables, tables], axis=1), count, axis=1)
    levels = rng.random((rows, count), np.float32)
    levels += turned[which, turn]
    levels /= np.float32(count)
    return np.clip(levels, np.float32(1e-6), np.float32(1 - 1e-6), out=levels)
