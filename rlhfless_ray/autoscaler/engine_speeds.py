"""How fast an engine decodes and what it holds, by its width in slots."""

from __future__ import annotations

import math

from placement.scaling.engine_width import scale_speed
from placement.speed.decode_speed import Speed, SpeedFit
from rlhfless_ray.autoscaler.initial_speed import ExpectedEngine
from rlhfless_ray.common.json_types import JsonObject


class EngineSpeeds:
    """The speed that is fitted at the present width, and what is known of the other widths that engines may have."""

    def __init__(self, width: int, speed: Speed) -> None:
        self.width = width  # slots of an engine
        self.fit, self.capacity = SpeedFit(speed), math.inf
        self.expected: dict[int, ExpectedEngine] = {}  # by width, if the planner chooses it
        self.fits: dict[int, SpeedFit] = {}  # of widths that engines had before
        self.by_pool: dict[str, SpeedFit] = {}  # at the present width, where engines of several pools have worked

    def expect(self, engines: dict[int, ExpectedEngine]) -> None:
        """Set initial estimates of engines by width, narrowest first."""
        self.width, engine = next(iter(engines.items()))
        self.expected = engines if len(engines) > 1 else {}
        self.fit, self.capacity = SpeedFit(engine.speed), engine.capacity or math.inf

    def fit_of(self, width: int) -> SpeedFit:
        """Return the speed at a width. For a width never used, scale the current speed by the roofline's estimates for both."""
        if width == self.width:
            return self.fit
        seeds = self.expected[self.width].speed, self.expected[width].speed
        return self.fits.get(width) or SpeedFit(scale_speed(self.fit.speed, *seeds))

    def observe_pool(self, pool: str) -> SpeedFit:
        """Return the fit to a pool's engines, which begins with that of all."""
        return self.by_pool.setdefault(pool, SpeedFit(self.fit.speed))

    def speed_in(self, pool: str, width: int) -> Speed:
        """Return the speed of a pool's engines at a width. Without records it is that of all engines."""
        fit = self.by_pool.get(pool)
        return fit.speed if fit is not None and fit.records and width == self.width else self.fit_of(width).speed

    def capacity_of(self, width: int) -> float:
        """Return the KV tokens that an engine of a width holds."""
        return self.capacity if width == self.width else self.expected[width].capacity or math.inf

    def use(self, width: int) -> None:
        """Fit the speed at another width from now on. No such engine works yet."""
        fit = self.fit_of(width)
        self.fits[self.width] = self.fit
        self.fit, self.width, self.by_pool = fit, width, {}
        self.capacity = self.expected[width].capacity or math.inf

    def state(self) -> JsonObject:
        """Return the state of a run whose planner chooses the width, else an empty one: `fit` has its own."""
        return {"width": self.width, "speeds": {width: fit.state() for width, fit in self.fits.items()}} if self.expected else {}

    def restore(self, state: JsonObject) -> None:
        fits = {int(width): fit for width, fit in state["speeds"].items()}  # JSON has made strings of the widths
        self.fits = {width: self.fit_of(width) for width in fits if width in self.expected}
        for width, fit in self.fits.items():
            fit.restore(fits[width])
        self.use(state["width"])
