"""Search over whole steps: which GPU, how many, engines of which width, on demand or spot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.planning.partition import pareto
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.setting import Setting
from placement.simulate.simulate_run import simulate
from placement.speed.roofline import Device, low_kv_warning

NODE = 8  # devices of a node


@dataclass(frozen=True)
class Fleet:
    """Devices held for whole steps: rollout, scoring, learning and publishing, with the expected loss to preemptions.

    cost: dollars a step. width: devices of an engine. warning: set if almost no KV is left.
    """

    device: str
    count: int
    width: int
    spot: bool
    time_s: float
    rollout_s: float
    price_per_hour: float
    warning: str | None

    @property
    def cost(self) -> float:
        return self.time_s * self.count * self.price_per_hour / 3600

    @property
    def actors(self) -> int:
        """Return the engines of its rollout."""
        return self.count // self.width


@dataclass(frozen=True)
class FleetSearch:
    """Result of a search. best: fleets that no other beats on both time and cost, fastest first. refused: the reason, by device."""

    fleets: tuple[Fleet, ...]
    best: tuple[Fleet, ...]
    refused: dict[str, str]

    def calibrated(self, factor: float) -> FleetSearch:
        """Return the search with all times multiplied by a factor, which is measured over planned seconds of a run."""

        def scaled(some: tuple[Fleet, ...]) -> tuple[Fleet, ...]:
            return tuple(replace(fleet, time_s=factor * fleet.time_s, rollout_s=factor * fleet.rollout_s) for fleet in some)

        return FleetSearch(scaled(self.fleets), scaled(self.best), self.refused)


def search_fleets(setting: Setting, devices: Sequence[Device], most: int, spot_discount: float | None = None) -> FleetSearch:
    """Try 1, 2, 4, … up to `most` devices of each kind, at each width, with the phases one after the other on all devices.

    spot_discount: share off the on-demand price for spot devices. None: the device's own spot price. A device without a
    price is refused by name. Raises ValueError for a setting that is wrong on every device.
    """
    found: list[Fleet] = []
    refused: dict[str, str] = {}
    for device in devices:
        prices = prices_of(device, spot_discount)
        fleets, why = [], "it has no list price; give one as `price_per_hour`"
        for count in (2**k for k in range(most.bit_length() if prices else 0)):
            try:
                fleets += fleets_of(setting, device, count, prices)
            except ValueError as error:
                why = str(error)
        found += fleets
        if not fleets:
            refused[device.name] = why
    return FleetSearch(tuple(found), tuple(pareto(found)), refused)


def fleets_of(setting: Setting, device: Device, count: int, prices: Sequence[tuple[bool, float]]) -> list[Fleet]:
    """Return the fleets of so many devices with engines of each width that fits, at each price. Raises ValueError if none fits."""
    nodes = max(1, count // NODE)
    there = setting.but(device=device, nodes=nodes, devices_per_node=count // nodes, tensor_parallel="auto")
    widths = PhaseTimes.from_setting(there).widths
    return [fleet for times in widths for fleet in _fleets(there.but(tensor_parallel=times.width), times, prices)]


def prices_of(device: Device, spot_discount: float | None = None) -> list[tuple[bool, float]]:
    """Return (is spot, dollars an hour) of each way to rent the device."""
    if device.price_per_hour is None:
        return []
    spot = device.spot_price_per_hour if spot_discount is None else device.price_per_hour * (1 - spot_discount)
    return [(False, device.price_per_hour), *([] if spot is None else [(True, spot)])]


def _fleets(setting: Setting, times: PhaseTimes, prices: Sequence[tuple[bool, float]]) -> list[Fleet]:
    """Return the fleet of this setting on demand and on spot. A spot fleet that preemptions never let finish is left out."""
    device, phases = setting.device, setting.phases
    run = simulate(setting, ["fixed"]).policies["fixed"]
    longest = setting.prompt_limit + setting.response_limit
    one = Fleet(
        device.name,
        setting.devices,
        times.width,
        False,
        run.step_s,
        sum(step.rollout_s for step in run.steps) / len(run.steps),
        0.0,
        low_kv_warning(setting.engine_model, device, times.width, phases["engine_memory"], longest),
    )
    start_s = phases["cold_start_s" if times.width == 1 else "cold_start_parallel_s"]
    found = []
    for is_spot, price in prices:
        lost_s = start_s + one.time_s / 2  # a start, and on average half of the step again
        slower = 1 - (device.spot_preempt_per_hour * one.count * lost_s / 3600 if is_spot else 0.0)
        if slower > 0:
            found.append(replace(one, spot=is_spot, price_per_hour=price, time_s=one.time_s / slower))
    return found
