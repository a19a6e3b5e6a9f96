"""A time that is fitted to its measurements, affine in its units, with the spread of its errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from placement.speed.robust_fit import fit_shares, robust_sd, scaled_seed

KEEP = 64  # newest records that a term is fitted to
MIN_UNITS = 1e-9
FADE = 0.97  # factor on a record's weight for each newer one
SPREAD_RECORDS = 3.0  # weight of the seed's spread, in records


class Term:
    """An affine time, fitted robustly: seconds ≈ fixed_s + per_unit_s · units, neither negative.

    It is fitted to the newest 64 records. Without records it is the seed. With records, the seed only settles what they
    leave open, such as the split between the two parts if all records have one size. Records are fitted when a time is
    needed. So `observe` costs next to nothing, and many records cost one fit.
    """

    def __init__(self, fixed_s: float, per_unit_s: float = 0.0, spread: float = 0.5) -> None:
        """Set the seed and its expected relative error. Raises ValueError for negative or non-finite values."""
        if not (np.isfinite([fixed_s, per_unit_s, spread]).all() and min(fixed_s, per_unit_s) >= 0 and spread > 0):
            raise ValueError(f"a term needs finite times of at least 0 and a positive spread, got {fixed_s}, {per_unit_s}, {spread}")
        self.seed = np.array([fixed_s, per_unit_s], float)
        self._beta = self.seed.copy()
        self.seed_spread = float(spread)
        self.units, self.seconds, self._errors = np.empty(0), np.empty(0), np.empty(0)
        self.unfitted: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def records(self) -> int:
        """Return the number of records. At 0 the term is the seed."""
        return len(self.units) + sum(len(units) for units, _ in self.unfitted)

    @property
    def beta(self) -> np.ndarray:
        """Return (2,) fixed_s and per_unit_s, fitted to all records so far."""
        self.settle()
        return self._beta

    @property
    def errors(self) -> np.ndarray:
        """Return the log errors of predictions made before their records arrived."""
        self.settle()
        return self._errors

    @property
    def fixed_s(self) -> float:
        return float(self.beta[0])

    @property
    def per_unit_s(self) -> float:
        return float(self.beta[1])

    def predict(self, units: float = 0.0) -> float:
        """Return the seconds for this many units."""
        beta = self.beta
        return float(beta[0] + beta[1] * units)

    @property
    def spread(self) -> float:
        """Return the relative standard error of a prediction.

        It is the robust scale of the errors of past predictions, with the seed's spread counted as three records.
        """
        errors = self.errors
        if not len(errors):
            return self.seed_spread
        n = len(errors)
        return float(np.sqrt((SPREAD_RECORDS * self.seed_spread**2 + n * robust_sd(errors) ** 2) / (SPREAD_RECORDS + n)))

    def observe(self, units: float | np.ndarray, seconds: float | np.ndarray) -> None:
        """Add records: units (n,) or one, seconds (n,) or one. Values that are not finite or not positive are ignored."""
        new_units, new_seconds = np.broadcast_arrays(np.array(units, float, ndmin=1), np.array(seconds, float, ndmin=1))
        good = np.isfinite(new_units) & np.isfinite(new_seconds) & (new_seconds > 0) & (new_units >= 0)
        if good.any():
            self.unfitted.append((new_units[good], new_seconds[good]))

    def settle(self) -> None:
        """Fit the pending records now, so that the next reader does not wait for it."""
        if self.unfitted:
            units, seconds = (np.concatenate(parts) for parts in zip(*self.unfitted, strict=True))
            self.unfitted = []
            self._fit(units, seconds)

    def _fit(self, new_units: np.ndarray, new_seconds: np.ndarray) -> None:
        predicted = self._beta[0] + self._beta[1] * new_units
        off = np.log(new_seconds / np.maximum(predicted, 1e-9)).clip(-2, 2)
        if len(self.seconds):  # the seed's error is no measure of the fit's error
            self._errors = np.concatenate([self._errors, off])[-KEEP:]
        self.units = np.concatenate([self.units, new_units])[-KEEP:]
        self.seconds = np.concatenate([self.seconds, new_seconds])[-KEEP:]
        used = np.array([True, bool(self.units.max() > MIN_UNITS)])  # without units the seed's per_unit_s stands
        rows = np.column_stack([np.ones(len(self.units)), self.units])[:, used]
        counts = FADE ** np.arange(len(self.seconds) - 1, -1, -1.0)
        reference, target = scaled_seed(self.seed[used], rows, self.seconds)
        self._beta = self.seed.copy()
        self._beta[used], _, _ = fit_shares(rows, self.seconds, reference, target, counts=counts)

    def state(self) -> dict[str, Any]:
        self.settle()
        return {name: getattr(self, name).tolist() for name in ("beta", "units", "seconds", "errors")}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state. The seed stays the constructor's."""
        self.unfitted = []
        self._beta, self.units, self.seconds, self._errors = (
            np.array(state[name], float) for name in ("beta", "units", "seconds", "errors")
        )
