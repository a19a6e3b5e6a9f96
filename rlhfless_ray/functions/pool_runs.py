"""The runs of a pool, and those that have ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from placement.market import Bid
from rlhfless_ray.functions.pool_messages import RunInfo, SlotRequest


@dataclass
class PoolRun:
    info: RunInfo
    session: str
    bid: Bid
    heard_s: float
    joined_s: float
    number: int = 0  # number of its newest statement
    has_bid: bool = False  # False while its processes start; it can give nothing back until then
    holds: frozenset[str] = frozenset()  # ids of the leases that it has confirmed
    avoids: frozenset[str] = frozenset()  # nodes on which it wants no slot
    parked_mb: Mapping[str, float] = field(default_factory=dict)  # memory of its parked processes, by node
    warm: frozenset[tuple[str, str]] = frozenset()  # nodes and devices to which parked processes are bound
    gives_at_s: float | None = None  # when it expects to give back slots that others wait for
    held_since_s: float = 0.0
    waits_since_s: float | None = None  # time since which it has fewer slots than it can work with; reset RECENT_S after a withdrawal
    withdrew_s: float = -float("inf")  # time of its last withdrawal of a request that was not granted; a later grant resets it
    withdrew: SlotRequest | None = None  # that request
    homes: set[tuple[str, str]] = field(default_factory=set)  # devices for which processes with state have asked
    slot_s: float = 0.0  # slot-seconds that it has paid for
    today_slot_s: float = 0.0  # those of the state's day
    lent_slot_s: float = 0.0
    borrowed_slot_s: float = 0.0


@dataclass(frozen=True)
class PastRun:
    """A run that has ended, and the slot-seconds that it paid for, in all and in the state's day."""

    info: RunInfo
    joined_s: float
    ended_s: float
    slot_s: float
    today_slot_s: float = 0.0
