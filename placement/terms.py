"""What else a step takes, besides decoding: fitted affine times with the spread of their errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from placement.robust import fit_shares, scale, scaled_seed

KEEP = 64  # records of a term
LEAST_UNITS = 1e-9
FADE = 0.97  # of a record's weight, for each newer one
SPREAD_RECORDS = 3.0  # what the seed's spread weighs


class Term:
    """seconds ≈ fixed_s + per_unit_s · units, neither negative, fitted robustly to the newest 64 records.

    Until there are records it is the seed; afterwards the seed decides what the records leave
    open only (all of one size: the split between fixed and per unit). Records are fitted when somebody asks for a time: to
    observe costs next to nothing, wherever in a step it happens, and many records cost one fit.
    """

    def __init__(self, fixed_s: float, per_unit_s: float = 0.0, spread: float = 0.5) -> None:
        """The seed and the relative error expected of it. Raises ValueError for negative or non-finite values."""
        if not (np.isfinite([fixed_s, per_unit_s, spread]).all() and min(fixed_s, per_unit_s) >= 0 and spread > 0):
            raise ValueError(
                f"a term needs finite times of at least 0 and a positive spread, got {fixed_s}, {per_unit_s}, {spread}"
            )
        self.seed = np.array([fixed_s, per_unit_s], float)
        self._beta = self.seed.copy()
        self.seed_spread = float(spread)
        self.units, self.seconds, self._errors = np.empty(0), np.empty(0), np.empty(0)
        self.unfitted: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def records(self) -> int:
        """How many it is fitted to; at 0 it is the seed."""
        return len(self.units) + sum(len(units) for units, _ in self.unfitted)

    @property
    def beta(self) -> np.ndarray:
        """(2,) fixed_s and per_unit_s, fitted to all records so far."""
        self.settle()
        return self._beta

    @property
    def errors(self) -> np.ndarray:
        """Log errors of predictions made before their records came."""
        self.settle()
        return self._errors

    @property
    def fixed_s(self) -> float:
        return float(self.beta[0])

    @property
    def per_unit_s(self) -> float:
        return float(self.beta[1])

    def predict(self, units: float = 0.0) -> float:
        """Seconds for so many units."""
        beta = self.beta
        return float(beta[0] + beta[1] * units)

    @property
    def spread(self) -> float:
        """Relative standard error of a prediction: robust scale of the errors of predictions made before their records came,
        and the seed's as three records of its own."""
        errors = self.errors
        if not len(errors):
            return self.seed_spread
        n = len(errors)
        return float(np.sqrt((SPREAD_RECORDS * self.seed_spread**2 + n * scale(errors) ** 2) / (SPREAD_RECORDS + n)))

    def observe(self, units: float | np.ndarray, seconds: float | np.ndarray) -> None:
        """Records: units (n,) or one, seconds (n,) or one. Those that are not finite or not positive are ignored."""
        new_units, new_seconds = np.broadcast_arrays(np.array(units, float, ndmin=1), np.array(seconds, float, ndmin=1))
        good = np.isfinite(new_units) & np.isfinite(new_seconds) & (new_seconds > 0) & (new_units >= 0)
        if good.any():
            self.unfitted.append((new_units[good], new_seconds[good]))

    def settle(self) -> None:
        """Fit what was observed, so that whoever asks next does not wait for it."""
        if self.unfitted:
            units, seconds = (np.concatenate(parts) for parts in zip(*self.unfitted, strict=True))
            self.unfitted = []
            self._fit(units, seconds)

    def _fit(self, new_units: np.ndarray, new_seconds: np.ndarray) -> None:
        predicted = self._beta[0] + self._beta[1] * new_units
        off = np.log(new_seconds / np.maximum(predicted, 1e-9)).clip(-2, 2)
        if len(self.seconds):  # the seed's own error says nothing about the fit's
            self._errors = np.concatenate([self._errors, off])[-KEEP:]
        self.units = np.concatenate([self.units, new_units])[-KEEP:]
        self.seconds = np.concatenate([self.seconds, new_seconds])[-KEEP:]
        used = np.array([True, bool(self.units.max() > LEAST_UNITS)])  # without units the seed's price per unit stands
        rows = np.column_stack([np.ones(len(self.units)), self.units])[:, used]
        counts = FADE ** np.arange(len(self.seconds) - 1, -1, -1.0)
        reference, target = scaled_seed(self.seed[used], rows, self.seconds)
        self._beta = self.seed.copy()
        self._beta[used], _, _ = fit_shares(rows, self.seconds, reference, target, counts=counts)

    def state(self) -> dict[str, Any]:
        self.settle()
        return {name: getattr(self, name).tolist() for name in ("beta", "units", "seconds", "errors")}

    def restore(self, state: dict[str, Any]) -> None:
        """The seed stays what the constructor was given."""
        self.unfitted = []
        self._beta, self.units, self.seconds, self._errors = (
            np.array(state[name], float) for name in ("beta", "units", "seconds", "errors")
        )


@dataclass
class Terms:
    """The fitted times around decoding. The defaults are seeds of the right order only: a process of a vLLM engine on CPU
    takes 15 s from nothing, a parked one a tenth of a second."""

    cold_start: Term = field(default_factory=lambda: Term(15.0))  # from lease to ready, nothing running
    warm_start: Term = field(default_factory=lambda: Term(0.1))  # from lease to ready, instance parked
    transfer: Term = field(default_factory=lambda: Term(0.02, 1e-9))  # of weights, per byte, on the learner's node
    transfer_away: Term = field(default_factory=lambda: Term(0.03, 2e-9))  # to another one
    prefill: Term = field(default_factory=lambda: Term(0.005, 1e-5))  # per token
    learn: Term = field(default_factory=lambda: Term(0.1, 1e-5))  # per token
    passes: Term = field(default_factory=lambda: Term(0.1, 1e-5))  # per token: of others than the learner's update, before it
    score: Term = field(default_factory=lambda: Term(0.01, 1e-4))  # per sequence

    def state(self) -> dict[str, Any]:
        return {name: term.state() for name, term in vars(self).items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Terms that the state does not have keep their seeds."""
        for name, term in vars(self).items():
            if name in state:
                term.restore(state[name])
