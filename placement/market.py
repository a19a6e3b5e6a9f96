"""A market for slots, which divides a pool among several runs and gives the price of a slot.

Each run bids the worth of each number of slots that it can use. Clearing maximises the weighted worth of all, exactly, under three rules.
No run gets less than its share while it can use it. A change pays back the slot-seconds that a hand-over takes. A run that holds less than
its share earns a credit, which gives it precedence later.

Worth is in slot-seconds: a second is worth to a run what its objective pays for it alone, see `scaling.resize_policy.time_value`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.planning.objective import Objective
from placement.scaling.resize_policy import MAX_COST_SHARE, MAX_PREFER, preferred_value

CREDIT_S = 600.0  # seconds of the whole pool that a run's credit or debt is limited to
CREDIT_WEIGHT = 0.5  # share by which a full credit raises what a run's slots above its share count, and a full debt lowers it
TURN_SLOT_S = 60.0  # what a run has lent of a slot of which each of several runs owns a part, before it gets that slot
EVEN = 1e-9  # relative difference of worths that counts as none


@dataclass(frozen=True)
class Bid:
    """The worth to a run of each number of slots, until its phase ends.

    Parameters
    ----------
    run : str
        Name of the run.
    slots : tuple of int
        Numbers of slots that the run can use, ascending. The first is the fewest that it can work with.
    worth : tuple of float
        Slot-seconds that each number is worth more than the first, strictly ascending from 0.
    share : float, optional
        Share of the pool that the run may always have. None: an equal part of what the shares of others leave.
    weight : float
        Priority: how much a slot-second of this run counts.

    Examples
    --------
    >>> bid_of("a", [(1, 40.0, 40.0), (2, 20.0, 40.0), (4, 20.0, 80.0)], Objective(prefer=0.5))
    Bid(run='a', slots=(1, 2), worth=(0.0, 40.0), share=None, weight=1.0)
    """

    run: str
    slots: tuple[int, ...]
    worth: tuple[float, ...]
    share: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.slots or len(self.slots) != len(self.worth):
            raise ValueError(
                f"the bid of {self.run}: {len(self.slots)} numbers of slots and {len(self.worth)} worths, expected as many, at least 1"
            )
        if self.slots[0] < 0 or any(b <= a for a, b in itertools.pairwise(self.slots)):
            raise ValueError(f"the bid of {self.run}: numbers of slots must ascend from 0 or more, got {self.slots}")
        if self.worth[0] != 0 or any(not b > a for a, b in itertools.pairwise(self.worth)) or not all(map(math.isfinite, self.worth)):
            raise ValueError(f"the bid of {self.run}: worths must be finite and ascend from 0, got {self.worth}")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"the share of {self.run} lies between 0 and 1, got {self.share}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"the weight of {self.run} must be finite and above 0, got {self.weight}")

    @property
    def most(self) -> int:
        return self.slots[-1]


def bid_of(run: str, points: Sequence[tuple[int, float, float]], objective: Objective, value_per_s: float | None = None) -> Bid:
    """Return the bid of a run that knows its time and cost with each number of slots.

    Parameters
    ----------
    run : str
        Name of the run.
    points : sequence of (int, float, float)
        Slots, seconds until the phase ends with them, and its cost in slot-seconds.
    objective : Objective
        With `prefer`, a number of slots is offered if it is worth what it costs. With `deadline_s`, slots are worth the seconds that
        they save, up to the number that meets the deadline; more are worth nothing. `budget` bounds the cost. `knee` is as `prefer`.
    value_per_s : float, optional
        Slot-seconds that a second is worth with `prefer` p or `knee`. None: p / (1 - p) · C / T, with the lowest cost C and the shortest
        time T of the points, as in `time_value`. `knee` counts as p = 0.5. If no other run bids, a run then bids for the number that it
        would choose alone.

    Returns
    -------
    Bid
        Numbers of slots that are no better for the run than fewer are left out.

    Raises
    ------
    ValueError
        Without points, and for values that `Bid` refuses.
    """
    if not points:
        raise ValueError(f"the bid of {run}: there are no points")
    ordered = sorted(points)
    first, start_s, cost = ordered[0]
    if value_per_s is None:
        prefer = 0.5 if objective.prefer is None else objective.prefer
        value_per_s = preferred_value(prefer, min(cost for *_, cost in points), min(seconds for _, seconds, _ in points))
    slots, worth, seconds_of, met = [first], [0.0], start_s, False
    least = cost + value_per_s * start_s  # what the best number so far costs the run, in slot-seconds
    for count, seconds, cost in ordered[1:]:
        if objective.deadline_s is not None:
            better = seconds < seconds_of and not met and seconds_of > objective.deadline_s
            met = met or seconds <= objective.deadline_s
        elif objective.budget is not None:
            better = seconds < seconds_of and cost <= objective.budget
        else:
            better = cost + value_per_s * seconds < least
        gain = (value_per_s if objective.prefer is not None or objective.knee else 1 / (1 - MAX_PREFER)) * (start_s - seconds)
        if better and gain > worth[-1]:
            slots, worth, seconds_of = [*slots, count], [*worth, gain], seconds
            least = min(least, cost + value_per_s * seconds)
    return Bid(run, tuple(slots), tuple(worth))


@dataclass(frozen=True)
class Credits:
    """Balances of runs in slot-seconds: positive if a run lent part of its share, negative if it borrowed. Each is bounded, and a run
    that lends to one whose debt is at its bound still earns: their sum may be above 0.

    Examples
    --------
    >>> credits = Credits().after(10.0, {"a": 1, "b": 3}, {"a": 2, "b": 2}, pool_slots=4)
    >>> credits.of("a"), credits.of("b")
    (10.0, -10.0)
    """

    balance: Mapping[str, float] = field(default_factory=dict)

    def of(self, run: str) -> float:
        return self.balance.get(run, 0.0)

    def turns(self, run: str) -> int:
        """Return how many whole times TURN_SLOT_S a run has lent more than it borrowed, negative for a borrower."""
        return int(self.of(run) / TURN_SLOT_S)

    def after(self, seconds: float, held: Mapping[str, int], entitled: Mapping[str, float], pool_slots: int) -> Credits:
        """Return the credits after `seconds` in which runs held these slots. Slots that nobody borrowed do not count as lent."""
        over = {run: max(0.0, held.get(run, 0) - entitled[run]) for run in entitled}
        under = {run: max(0.0, entitled[run] - held.get(run, 0)) for run in entitled}
        borrowed, offered, limit = sum(over.values()), sum(under.values()), CREDIT_S * pool_slots
        used = min(1.0, borrowed / offered) if offered else 0.0
        paid = min(1.0, offered / borrowed) if borrowed else 0.0  # slots of no run's share are free
        balance = dict(self.balance)
        for run in entitled:
            changed = self.of(run) + seconds * (under[run] * used - over[run] * paid)
            balance[run] = min(limit, max(-limit, changed))
        return Credits(balance)

    def restored(self, run: str, balance: float, pool_slots: int) -> Credits:
        """Return the credits with the balance that a run had."""
        limit = CREDIT_S * pool_slots
        return Credits({**self.balance, run: min(limit, max(-limit, balance))})


@dataclass(frozen=True)
class Clearing:
    """Slots of each run, the price of a slot, and the reason for each run.

    The price is what the pool would lose with one slot less, in slot-seconds: 0 if slots are free. Where the runs' shares take all slots,
    none of them has a buyer, and the price is what one more would gain.
    """

    slots: Mapping[str, int]
    price: float
    reasons: Mapping[str, str]


def exact_slots(pool_slots: int, bids: Sequence[Bid]) -> dict[str, float]:
    """Return each run's share in slots. Runs without a share divide what others leave.

    Raises ValueError if shares add up to more than 1, or if two bids are of one run.
    """
    names = [bid.run for bid in bids]
    if len(set(names)) < len(names):
        raise ValueError(f"more than one bid of the same run: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    given = sum(bid.share or 0.0 for bid in bids)
    if given > 1 + EVEN:
        raise ValueError(f"shares add up to {given:g}, more than 1")
    open_runs = sum(bid.share is None for bid in bids)
    return {bid.run: pool_slots * ((1 - given) / open_runs if bid.share is None else bid.share) for bid in bids}


def entitled_slots(
    pool_slots: int, bids: Sequence[Bid], held: Mapping[str, int] | None = None, credits: Credits | None = None
) -> dict[str, int]:
    """Return each run's share in whole slots, by largest remainders. Raises ValueError as `exact_slots` does.

    With `held` and `credits`, which count against the exact shares, runs take turns with the slots of which each owns a part: the more
    whole times a run has lent TURN_SLOT_S, the earlier it comes. Between equal ones the run keeps such a slot that holds it.

    Examples
    --------
    >>> two = [Bid(run, (1, 3), (0.0, 9.0)) for run in "ab"]
    >>> entitled_slots(3, two)
    {'a': 2, 'b': 1}
    >>> entitled_slots(3, two, {"a": 2, "b": 1}, Credits({"a": -80.0, "b": 80.0}))
    {'a': 1, 'b': 2}
    """
    held, credits = held or {}, credits or Credits()
    exact = exact_slots(pool_slots, bids)
    whole = {run: int(x + EVEN) for run, x in exact.items()}
    spare = int(sum(exact.values()) + EVEN) - sum(whole.values())
    owners = [run for run in exact if exact[run] > whole[run] + EVEN]

    def order(run: str) -> tuple[float, bool, str]:
        return whole[run] - exact[run] - credits.turns(run), held.get(run, 0) <= whole[run], run

    for run in sorted(owners, key=order)[:spare]:
        whole[run] += 1
    return whole


def clear(
    pool_slots: int,
    bids: Sequence[Bid],
    held: Mapping[str, int] | None = None,
    credits: Credits | None = None,
    handover_s: float = 0.0,
    entitled: Mapping[str, int] | None = None,
) -> Clearing:
    """Divide a pool among runs: the largest Σ weight · worth, by dynamic programming over runs and slots.

    A run gets at least as many slots as its share has, or the most that it can use if that is less. The worth of slots above the share
    counts more for a run with credit and less for one in debt. Each slot that a run takes in addition to those that it holds costs
    `handover_s` seconds, and these count twice, so that a change pays back. Of equal divisions the one with the fewest such slots is
    taken.

    A false worth cannot take from others what their shares give them. It can only win slots that the shares of others leave, and pays
    for each second of them with credit. A run that names more slots than its share as the fewest that it can work with gets these from the
    others' shares, and no more than these.

    Parameters
    ----------
    pool_slots : int
        Slots of the pool.
    bids : sequence of Bid
        One for each run.
    held : mapping of str to int, optional
        Slots that runs hold now.
    credits : Credits, optional
        Balances of the runs. None: no run has lent or borrowed.
    handover_s : float
        Seconds from the moment one run releases a slot until it works for another.
    entitled : mapping of str to int, optional
        Shares in whole slots, if they are not `entitled_slots(pool_slots, bids)`.

    Raises
    ------
    ValueError
        If the pool has fewer slots than the runs need at least, if shares add up to more than 1, or if two bids are of one run.

    Examples
    --------
    >>> tail = Bid("tail", (1, 2, 3), (0.0, 1.0, 1.5))
    >>> busy = Bid("busy", (1, 2, 3), (0.0, 30.0, 50.0))
    >>> clear(4, [tail, busy]).slots
    {'busy': 2, 'tail': 2}
    >>> clear(4, [Bid("tail", (1,), (0.0,)), busy]).slots
    {'busy': 3, 'tail': 1}
    """
    held, credits = held or {}, credits or Credits()
    bids = sorted(bids, key=lambda bid: bid.run)
    entitled = entitled_slots(pool_slots, bids) if entitled is None else entitled
    least = sum(bid.slots[0] for bid in bids)
    if least > pool_slots:
        raise ValueError(f"the runs need at least {least} slots together, but the pool has {pool_slots}")
    floors = _floors(pool_slots, bids, entitled)
    values, choices = np.zeros(pool_slots + 2), []
    room = np.arange(pool_slots + 2)
    for bid in bids:
        options = np.array([i for i, count in enumerate(bid.slots) if count >= floors[bid.run]])
        counts = np.array(bid.slots)[options]
        own = held.get(bid.run, 0)
        worths = [_counted(bid, i, entitled[bid.run], credits, pool_slots) - _cost(bid.slots[i], own, handover_s) for i in options]
        before = room - counts[:, None]  # slots that are left for the runs before this one
        totals = np.where(before >= 0, values[np.maximum(before, 0)], -np.inf) + np.array(worths)[:, None]
        best = totals.argmax(axis=0)
        choices.append(options[best])
        values = totals[best, room]
    left, slots = pool_slots, {}
    for bid, chosen in zip(reversed(bids), reversed(choices), strict=True):
        slots[bid.run] = bid.slots[chosen[left]]
        left -= slots[bid.run]
    slots = dict(sorted(slots.items()))
    fewer, whole, more = values[pool_slots - 1] if pool_slots else -np.inf, values[pool_slots], values[pool_slots + 1]
    price = float(whole - fewer if math.isfinite(fewer) else more - whole)
    above = {run for run in slots if slots[run] > entitled[run]}
    reasons = {
        bid.run: _reason(bid, slots[bid.run], entitled[bid.run], held.get(bid.run, 0), price, bool(above - {bid.run})) for bid in bids
    }
    return Clearing(slots, max(0.0, price), reasons)


def _floors(pool_slots: int, bids: Sequence[Bid], entitled: Mapping[str, int]) -> dict[str, int]:
    """Return the fewest slots that each run gets: as many of its share as it can use. If a run needs more than its share to work, other
    runs get less than theirs, those with the most slots first."""
    floors = {bid.run: max([bid.slots[0], *(count for count in bid.slots if count <= entitled[bid.run])]) for bid in bids}
    options = {bid.run: bid.slots for bid in bids}
    while sum(floors.values()) > pool_slots:
        run = max((name for name in floors if floors[name] > options[name][0]), key=lambda name: (floors[name], name))
        floors[run] = max(count for count in options[run] if count < floors[run])
    return floors


def _counted(bid: Bid, option: int, entitled: int, credits: Credits, pool_slots: int) -> float:
    """Return the weighted worth of an option, whose part above the share is scaled by the run's credit or debt."""
    within = bid.worth[max(0, bisect_right(bid.slots, min(entitled, bid.slots[option])) - 1)]
    level = 1 + CREDIT_WEIGHT * credits.of(bid.run) / (CREDIT_S * pool_slots) if pool_slots else 1.0
    return bid.weight * (within + (bid.worth[option] - within) * level)


def _cost(count: int, held: int, handover_s: float) -> float:
    """Return the cost of taking slots beyond those that are held, in slot-seconds. It is slightly above 0 even if a hand-over is free."""
    return max(0, count - held) * max(handover_s / MAX_COST_SHARE, 1e-6)


def _reason(bid: Bid, slots: int, entitled: int, held: int, price: float, others_above: bool) -> str:
    """Return why a run gets so many slots. `others_above`: whether another run gets more than its share."""
    changed = "keeps" if slots == held else f"goes from {held} to"
    if slots >= bid.most:
        why = "all that it can use"
    elif slots > entitled:
        why = f"{slots - entitled} above its share of {entitled}; the next would have to be worth more than {price:.3g} slot-s"
    elif others_above:
        why = f"its share is {entitled}, and other runs gain more by what is left ({price:.3g} slot-s a slot)"
    else:
        why = f"its share is {entitled}, and other runs use theirs"
    return f"{bid.run} {changed} {slots} of its {bid.most} wanted slots: {why}"
