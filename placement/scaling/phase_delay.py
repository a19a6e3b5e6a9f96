"""Put off the beginning of a phase for slots that another run of the pool is about to give back.

Only for phases that keep the slots with which they begin. A phase that can grow begins at once: it has then less left to do when the slots
come.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from placement.scaling.engine_width import slots
from placement.scaling.resize_policy import MAX_COST_SHARE

MAX_DELAY_S = 5.0  # longest delay, however much it would save: what other runs say of themselves is a forecast


@dataclass(frozen=True)
class Delay:
    """Begin as soon as there are `slots`, after `seconds` at the latest. `reason`: why, or why not; empty if no slot is due."""

    seconds: float
    slots: int
    reason: str


def delay(points: Sequence[tuple[int, float]], have: int, due: Sequence[tuple[float, int]], value_per_s: float) -> Delay:
    """Decide whether a phase waits for slots before it begins.

    It waits for the slots with which slots and time cost least in sum, if by the forecast the wait takes at most half of what they save.
    Slots that are held during the wait count. If the slots are late, the phase begins when half of what they save is over.

    Parameters
    ----------
    points : sequence of (int, float)
        Slots, ascending, and seconds of the phase with them, descending.
    have : int
        Slots that there are now, at least as many as the first point has.
    due : sequence of (float, int)
        Seconds until other runs give back slots, and how many.
    value_per_s : float
        Worth of a second of the phase, in slot-seconds.

    Examples
    --------
    >>> delay([(1, 8.0), (2, 4.5), (4, 3.0)], 1, [(0.5, 1)], 2.0)
    Delay(seconds=1.75, slots=2, reason='waits for 1 slot that another run gives back in about 0.5 s: 4.5 s on 2 slots, 8 s on 1')
    >>> delay([(1, 8.0), (2, 4.5), (4, 3.0)], 1, [(3.0, 1)], 2.0).reason
    'begins on 1 slot: another one comes in about 3 s, and saves 3.5 s'
    """
    counts = [count for count, _ in points]

    def at(slots: int) -> tuple[int, float]:
        return points[bisect_right(counts, slots) - 1]

    own, own_s = at(have)
    best, least = (0.0, own, own_s), own * own_s + value_per_s * own_s
    there, refused = have, ""
    for in_s, group in itertools.groupby(sorted(due), key=lambda one: one[0]):
        there += sum(slots for _, slots in group)
        count, seconds = at(there)
        if seconds >= own_s:
            continue
        cost = own * in_s + count * seconds + value_per_s * (in_s + seconds)
        if in_s > min(MAX_DELAY_S, MAX_COST_SHARE * (own_s - seconds)) or cost >= least:
            refused = refused or f"begins on {slots(own)}: another one comes in about {in_s:.2g} s, and saves {own_s - seconds:.3g} s"
        else:
            best, least = (in_s, count, seconds), cost
    in_s, count, seconds = best
    if count == own:
        return Delay(0.0, own, refused)
    reason = f"waits for {slots(count - have)} that another run gives back in about {in_s:.2g} s: {seconds:.3g} s on {slots(count)}"
    return Delay(min(MAX_DELAY_S, MAX_COST_SHARE * (own_s - seconds)), count, f"{reason}, {own_s:.3g} s on {own}")
