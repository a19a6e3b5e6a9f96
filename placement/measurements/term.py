"""A time that is fitted to its measurements, affine in its units, and what predictions of it missed."""

from __future__ import annotations

import numpy as np

from placement.measurements.correction import Correction
from placement.plain_data import JsonObject
from placement.speed.robust_fit import fit_shares, scaled_seed

KEEP = 64  # newest records that a term is fitted to
MIN_UNITS = 1e-9
FADE = 0.97  # factor on a record's weight for each newer one
JUDGED = 8  # newest records of a fit that judge the predictions before it


class Term:
    """An affine time, fitted robustly: seconds ≈ fixed_s + per_unit_s · units, neither negative.

    It is fitted to the newest 64 records. Without records it is the seed. With records, the seed only settles what they
    leave open, such as the split between the two parts if all records have one size. Records are fitted when a time is
    needed. So `observe` costs next to nothing, and many records cost one fit.
    """

    def __init__(self, fixed_s: float, per_unit_s: float = 0.0) -> None:
        """Set the seed. Raises ValueError for negative or non-finite values."""
        if not (np.isfinite([fixed_s, per_unit_s]).all() and min(fixed_s, per_unit_s) >= 0):
            raise ValueError(f"a term needs finite times of at least 0, got {fixed_s} and {per_unit_s}")
        self.seed = np.array([fixed_s, per_unit_s], float)
        self._beta = self.seed.copy()
        self.units, self.seconds = np.empty(0), np.empty(0)
        self.missed = Correction(is_applied=False)  # how far predictions were off; the fit is what corrects them
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
    def fixed_s(self) -> float:
        return float(self.beta[0])

    @property
    def per_unit_s(self) -> float:
        return float(self.beta[1])

    def predict(self, units: float = 0.0) -> float:
        """Return the seconds for this many units."""
        beta = self.beta
        return float(beta[0] + beta[1] * units)

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
        if len(self.seconds):  # the seed's error is no measure of the fit's error
            for before, measured in zip(predicted[-JUDGED:].tolist(), new_seconds[-JUDGED:].tolist(), strict=True):
                self.missed.observe(before, measured)
        self.units = np.concatenate([self.units, new_units])[-KEEP:]
        self.seconds = np.concatenate([self.seconds, new_seconds])[-KEEP:]
        used = np.array([True, bool(self.units.max() > MIN_UNITS)])  # without units the seed's per_unit_s stands
        rows = np.column_stack([np.ones(len(self.units)), self.units])[:, used]
        counts = FADE ** np.arange(len(self.seconds) - 1, -1, -1.0)
        reference, target = scaled_seed(self.seed[used], rows, self.seconds)
        self._beta = self.seed.copy()
        self._beta[used], _, _ = fit_shares(rows, self.seconds, reference, target, counts=counts)

    def state(self) -> JsonObject:
        self.settle()
        return {
            **{name: getattr(self, name).tolist() for name in ("units", "seconds")},
            "beta": self._beta.tolist(),
            "missed": self.missed.state(),
        }

    def restore(self, state: JsonObject) -> None:
        """Restore a state. The seed stays the constructor's."""
        self.unfitted = []
        self._beta, self.units, self.seconds = (np.array(state[name], float) for name in ("beta", "units", "seconds"))
        if "missed" in state:  # not in the first states
            self.missed.restore(state["missed"])
