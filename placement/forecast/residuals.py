"""The shape of forecast errors: a smoothed empirical distribution with a tail beyond what was seen."""

from __future__ import annotations

from copy import copy
from functools import cached_property

import numpy as np
from scipy.special import ndtri

LIMIT, PER_UNIT = 10.0, 64  # the density covers ±10 standard deviations in steps of 1/64
DEEPEST = 16.0  # the inverse table reaches down to a survival of exp(-16)
CELLS = 1 << 16  # per table: fine enough for nearest-cell lookup, small enough for the second-level cache
NARROWEST = 0.05  # least kernel width in standard deviations
TAIL = 0.03  # share of the residuals in the tail, where the hazard is constant
PRIOR_COUNT = 32
STEADY = 256  # with this many real residuals the prior is dropped


class Shape:
    """Distribution of a residual z, as tables: `hazard` H(z) = -log P(Z > z), its inverse, and log density.

    Drawing given survival is an addition in H: Z | Z > z₀ is `inverse(H(z₀) + E)` with E standard exponential. The body
    is a kernel estimate (Gaussian, Silverman's width, data shrunk so that the variance is kept). Beyond the upper 3 %
    the hazard is constant at one over the mean excess there. For log lengths that is a Pareto tail with Hill's (1975)
    index: a response that has outlived everything seen is expected to continue in proportion to its length.
    """

    def __init__(self, residuals: np.ndarray, prior_count: int = 0) -> None:
        """residuals (n,): finite. prior_count: standard normal quantiles mixed in. Raises ValueError without any residual."""
        z = np.clip(np.asarray(residuals, float), 1 - LIMIT, LIMIT - 1)
        if prior_count:
            z = np.concatenate([z, ndtri((np.arange(prior_count) + 0.5) / prior_count)])
        if not len(z):
            raise ValueError("a residual distribution needs at least one residual")
        self.mean, self.sd = float(z.mean()), float(z.std())
        middle = float(np.subtract(*np.quantile(z, [0.75, 0.25]))) / 1.349
        width = max(0.9 * min(self.sd, middle) * len(z) ** -0.2, NARROWEST * self.sd, 1 / PER_UNIT)
        z = self.mean + (z - self.mean) * np.sqrt(max(0.0, 1 - (width / max(self.sd, 1e-9)) ** 2))
        bins = int(2 * LIMIT * PER_UNIT)
        # Share each residual between its two neighbouring bins: a grid point is the left edge of its bin's interval.
        at = (z + LIMIT) * PER_UNIT
        low = at.astype(int)
        mass = np.bincount(low, 1 - (at - low), bins + 1) + np.bincount(low + 1, at - low, bins + 1)
        reach = int(np.ceil(4 * width * PER_UNIT))
        kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (width * PER_UNIT)) ** 2)
        density = np.convolve(mass / len(z), kernel / kernel.sum(), mode="same") * PER_UNIT + 1e-9
        step = (density[1:] + density[:-1]) / (2 * PER_UNIT)
        survival = np.concatenate([[1.0], 1 - np.cumsum(step) / step.sum()])
        grid = np.linspace(-LIMIT, LIMIT, bins + 1)
        knee = max(1, int(np.searchsorted(-survival, -TAIL)))
        beyond = z[z > grid[knee]]
        excess = max(float(beyond.mean() - grid[knee]) if len(beyond) else 0.0, width)
        hazard = np.empty(bins + 1)
        hazard[: knee + 1] = -np.log(np.maximum(survival[: knee + 1], 1e-300))
        hazard[knee:] = hazard[knee] + (grid[knee:] - grid[knee]) / excess
        log_density = np.log(density)
        log_density[knee:] = -hazard[knee:] - np.log(excess)
        self.tail = excess
        self._grid, self._coarse_hazard, self._coarse_log_density = grid, hazard, log_density

    def recalibrated(self, levels: np.ndarray, shares: np.ndarray) -> Shape:
        """Return the distribution of which a share `shares` (k,) lies below this one's quantiles at `levels` (k,).

        Both ascend strictly from 0 to 1. The tail beyond the last level but one keeps its hazard.
        """
        found = copy(self)
        found.__dict__ = {name: value for name, value in vars(self).items() if name not in ("_hazard", "_log_density", "_inverse")}
        below = -np.expm1(-self._coarse_hazard)
        slopes = np.diff(shares) / np.diff(levels)
        at = np.minimum(np.searchsorted(levels, below, side="right") - 1, len(slopes) - 1)
        above = np.interp(1 - below, 1 - levels[::-1], 1 - shares[::-1])
        in_tail = below >= levels[-2]  # where 1 - below would lose its digits
        hazard = -np.log(np.maximum(above, 1e-300))
        found._coarse_hazard = np.where(in_tail, self._coarse_hazard - np.log(slopes[-1]), hazard)
        found._coarse_log_density = self._coarse_log_density + np.log(slopes[at])
        return found

    # The tables take longer than all before, and most shapes are asked for one or two of them.

    @cached_property
    def _hazard(self) -> np.ndarray:
        return np.interp(np.linspace(-LIMIT, LIMIT, CELLS), self._grid, self._coarse_hazard).astype(np.float32)

    @cached_property
    def _log_density(self) -> np.ndarray:
        return np.interp(np.linspace(-LIMIT, LIMIT, CELLS), self._grid, self._coarse_log_density).astype(np.float32)

    @cached_property
    def _inverse(self) -> np.ndarray:
        levels, deepest = np.linspace(0, DEEPEST, CELLS), self._coarse_hazard[-1]
        inverse = np.interp(levels, self._coarse_hazard, self._grid)
        over = levels > deepest
        inverse[over] = LIMIT + (levels[over] - deepest) * self.tail
        inverse[0] = inverse[1]  # instead of the edge of the grid
        return inverse.astype(np.float32)

    def hazard(self, z: np.ndarray) -> np.ndarray:
        """Return -log P(Z > z), elementwise; float32."""
        return _lookup(self._hazard, np.asarray(z, np.float32), -LIMIT, LIMIT, 1 / self.tail)

    def log_density(self, z: np.ndarray) -> np.ndarray:
        """Return the log density at z, elementwise; float32."""
        return _lookup(self._log_density, np.asarray(z, np.float32), -LIMIT, LIMIT, -1 / self.tail)

    def inverse(self, hazard: np.ndarray) -> np.ndarray:
        """Return the z with P(Z > z) = exp(-hazard), elementwise; float32."""
        return _lookup(self._inverse, np.asarray(hazard, np.float32), 0.0, DEEPEST, self.tail)

    def quantile(self, level: np.ndarray | float) -> np.ndarray:
        """Return the z with P(Z ≤ z) = level."""
        return self.inverse(-np.log1p(-np.asarray(level, np.float32)))


def _lookup(table: np.ndarray, at: np.ndarray, low: float, high: float, slope: float) -> np.ndarray:
    """Return the table's nearest value over [low, high]. Constant below, continued with `slope` above."""
    cells = np.float32((len(table) - 1) / (high - low))
    place = at * cells
    place += np.float32(0.5) - np.float32(low) * cells
    np.clip(place, 0, len(table) - 1, out=place)
    found = table.take(place.astype(np.int32))
    if at.size and at.max() > high:
        found += np.maximum(at - np.float32(high), 0) * np.float32(slope)
    return found


class Residuals:
    """The newest residuals, at most `keep`, and their shape. Until 256 were seen, a few normal quantiles are mixed in."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.values = np.empty(0, np.float32)

    def add(self, residuals: np.ndarray) -> None:
        new = np.asarray(residuals, np.float32)
        new = new[np.isfinite(new)]
        if len(new):
            self.values = np.concatenate([self.values, new])[-self.keep :]
            self.__dict__.pop("shape", None)

    def clear(self) -> None:
        self.values = np.empty(0, np.float32)
        self.__dict__.pop("shape", None)

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.values, PRIOR_COUNT if len(self.values) < STEADY else 0)
