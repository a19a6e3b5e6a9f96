"""Keep idle instances warm, and start the next one ahead of its phase, by price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from placement.scaling.resize_policy import Decision, Hold, Park, Release

MIN_GAPS = 3


@dataclass(frozen=True)
class Prewarm:
    """Start an instance `at_s` seconds from now. This includes a margin of `margin_s` for the errors of both predictions."""

    at_s: float
    margin_s: float
    reason: str


def start_cost(start_s: float, price: float, value_per_s: float) -> float:
    """Return the cost of a start: its slot-seconds, and the delay of the critical path.

    value_per_s: worth of a second of the step (`resize_policy.time_value`).
    """
    return price * start_s + value_per_s * max(0.0, start_s)


def keep_alive(gaps_s: Sequence[float], hold_price: float, start: float) -> Decision:
    """Decide how long to keep an instance warm that has just become idle.

    gaps_s: past idle times in seconds (inf: it was not needed again). hold_price: cost of a second kept warm (memory
    that the slot cannot use, a lease held). start: cost of the start that a warm instance saves (`start_cost`).

    With a history, the result is the time that would have cost least over it. For gaps from one distribution that is
    the optimal policy (ski rental with known statistics). With fewer than 3 gaps it is start/hold_price, which never
    costs more than twice the optimum in hindsight (Karlin et al., Competitive Snoopy Caching, 1988).

    Raises ValueError for negative prices or gaps.
    """
    gaps = np.sort(np.asarray(gaps_s, float))
    if hold_price < 0 or start < 0 or np.isnan(gaps).any() or (len(gaps) and gaps[0] < 0):
        raise ValueError(f"prices and gaps must not be negative, got {hold_price}, {start} and {list(gaps_s)}")
    if start == 0:
        return Release(0, "a start costs nothing")
    if hold_price == 0:
        return Park(0, "keeping it warm costs nothing", keep_s=math.inf)
    if len(gaps) < MIN_GAPS:
        keep = start / hold_price
        return Park(0, f"kept for {keep:.3g} s: by then that has cost as much as the start it saves", keep_s=keep)
    finite = gaps[np.isfinite(gaps)]
    times = np.concatenate([[0.0], finite])
    costs = [float(np.mean(hold_price * np.minimum(gaps, t) + start * (gaps > t))) for t in times]
    best = int(np.argmin(costs))
    if times[best] == 0:
        return Release(0, f"over the last {len(gaps)} gaps keeping it warm costs more than the starts it saves")
    saved = start - costs[best]
    return Park(
        0,
        f"kept for {times[best]:.3g} s: over the last {len(gaps)} gaps that saves {saved:.3g} each against a new start",
        keep_s=float(times[best]),
    )


def hold_slot(idle_s: float, hold_price: float, start: float) -> Decision:
    """Decide whether to hold a slot's lease through `idle_s` predicted idle seconds, or to release it and pay a start."""
    holding = hold_price * idle_s
    if holding < start:
        return Hold(1, f"holding it {idle_s:.3g} s costs {holding:.3g}, less than the start ({start:.3g}) it saves")
    return Release(0, f"holding it {idle_s:.3g} s costs {holding:.3g}, the start it would save {start:.3g}")


def prewarm(
    phase_end_s: float, phase_spread_s: float, start_s: float, start_spread_s: float, hold_price: float, value_per_s: float
) -> Prewarm:
    """Decide when to start the instance for the next phase: predicted end of this phase - start time - margin.

    Times count from now. Spreads are standard errors of the two predictions. Being ready too early costs hold_price per
    second, too late value_per_s. The best lead is the quantile value_per_s/(value_per_s + hold_price) of the errors'
    normal distribution (the newsvendor's critical ratio, Arrow et al. 1951).

    Raises ValueError if both prices are 0.
    """
    if hold_price < 0 or value_per_s < 0 or hold_price + value_per_s == 0:
        raise ValueError(f"prices must not be negative nor both 0, got {hold_price} and {value_per_s}")
    ratio = min(max(value_per_s / (value_per_s + hold_price), 0.001), 0.999)
    margin = float(ndtri(ratio)) * math.hypot(phase_spread_s, start_spread_s)
    at = max(0.0, phase_end_s - start_s - margin)
    return Prewarm(
        at,
        margin,
        f"{start_s + margin:.3g} s before the end of a phase that goes on for {max(0.0, phase_end_s):.3g} s: a start takes "
        f"{start_s:.3g} s, and a second too late costs {value_per_s:.3g}, too early {hold_price:.3g}",
    )
