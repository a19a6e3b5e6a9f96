"""What a second of a slot costs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIELDS = ("cpu_per_hour", "gpu_per_hour", "devices_per_hour", "preemptible_factor", "currency")


@dataclass(frozen=True)
class PriceTable:
    """Prices per slot-hour in `currency`: of CPU slots, of GPU slots, and of named devices. Without any price every
    slot-second costs 1.0, so that a cost is a number of slot-seconds. A preemptible slot costs `preemptible_factor` of the
    same."""

    cpu_per_hour: float | None = None
    gpu_per_hour: float | None = None
    devices_per_hour: Mapping[str, float] = field(default_factory=dict)
    preemptible_factor: float = 1.0
    currency: str = ""

    def __post_init__(self) -> None:
        prices = {"cpu_per_hour": self.cpu_per_hour, "gpu_per_hour": self.gpu_per_hour}
        prices |= {f"devices_per_hour.{name}": price for name, price in self.devices_per_hour.items()}
        for name, price in prices.items():
            if price is not None and not (_is_number(price) and price >= 0):
                raise ValueError(f"price `{name}` must be a number per hour, at least 0, got {price!r}")
        if not (_is_number(self.preemptible_factor) and 0 < self.preemptible_factor <= 1):
            raise ValueError(f"price `preemptible_factor` must be in (0, 1], got {self.preemptible_factor!r}")

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> PriceTable:
        """From a mapping with the fields of this class. Raises ValueError for an unknown key, naming the nearest one, and
        for prices that are not numbers or negative."""
        for key in table:
            if key not in FIELDS:
                raise ValueError(f"unknown price `{key}`{_nearest(key, FIELDS)}")
        devices = table.get("devices_per_hour", {})
        if not isinstance(devices, Mapping):
            raise ValueError(f"price `devices_per_hour` must map device names to prices per hour, got {devices!r}")
        return cls(**{**table, "devices_per_hour": dict(devices)})

    @property
    def is_neutral(self) -> bool:
        """Whether costs are slot-seconds rather than money."""
        return self.cpu_per_hour is None and self.gpu_per_hour is None and not self.devices_per_hour

    def per_slot_s(self, resource: str, *, preemptible: bool = False) -> float:
        """Price of one slot-second of "cpu", "gpu" or a named device (which costs what a GPU does where it has no price of
        its own).

        Raises ValueError, naming the nearest known one, for a resource without a price in a table that has prices.
        """
        factor = self.preemptible_factor if preemptible else 1.0
        if self.is_neutral:
            return factor
        general = {"cpu": self.cpu_per_hour, "gpu": self.gpu_per_hour}
        price = self.devices_per_hour.get(resource, general.get(resource))
        if price is None and resource not in general:
            price = self.gpu_per_hour
        if price is None:
            known = [*self.devices_per_hour, *(name for name, value in general.items() if value is not None)]
            raise ValueError(f"no price for `{resource}`{_nearest(resource, known)}")
        return price / 3600 * factor


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nearest(key: str, known: Any) -> str:
    lower = {str(name).lower(): name for name in known}
    close = difflib.get_close_matches(str(key).lower(), list(lower), n=1, cutoff=0.4)
    return f"; did you mean `{lower[close[0]]}`?" if close else f"; known are {', '.join(map(str, known))}" if known else ""
