"""What the runs of a cluster and their pool say to each other, and a run's own record of its slots. Pure.

A run always states everything: what it waits for, what it has, what it bids. So a message may be lost, repeated, or overtaken by a later
one. The next one mends it: a slot that was granted for nobody is free again, and a request that nobody makes is forgotten.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from placement.market import Bid

SILENT_S = 20.0  # a run that was not heard of for so long has ended, and its slots are free


@dataclass(frozen=True)
class RunInfo:
    """A run as it joins: its name, what it is entitled to (see `Bid`), and where it runs."""

    run: str
    share: float | None = None
    weight: float = 1.0
    least: int = 1  # slots that it cannot do without
    folder: str = ""
    job: str = ""  # Ray's id of its driver, whose processes are ended with a run that is silent for too long
    price: float = 0.0  # money of a slot-hour


@dataclass(frozen=True)
class SlotRequest:
    """A wish for one slot, on a node (any if empty) that has these labels."""

    id: str
    run: str
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass
class PoolSlot:
    """A slot that Ray has granted to the pool. `group`: its placement group, which this module does not look at."""

    id: str
    node: str
    device: int | str
    group: Any = None
    holder: str = ""  # name of the run; empty: free
    request: str = ""  # id of the request that it was granted for
    since_s: float = 0.0  # time of the last hand-over
    granted_s: float = 0.0  # the same as wall-clock time, for the ledger of the run
    last: str = ""  # the run that held it before


@dataclass(frozen=True)
class PoolView:
    """What a run sees of the pool. `surplus`: slots above its target that runs below theirs wait for."""

    slots: int
    runs: int
    held: int
    target: int
    surplus: int
    price: float
    reason: str
    slot_s: float
    lent_slot_s: float
    borrowed_slot_s: float
    others: Mapping[str, int] = field(default_factory=dict)  # slots of the other runs that hold any
    waiting: tuple[str, ...] = ()  # other runs below their target that want slots
    parked_mb: Mapping[str, float] = field(default_factory=dict)  # memory of the parked processes of other runs, by node

    def metrics(self) -> dict[str, Any]:
        return {
            "shared/runs": self.runs,
            "shared/slots": self.held,
            "shared/target_slots": self.target,
            "shared/price_slot_s": self.price,
            "shared/paid_slot_s": self.slot_s,
            "shared/lent_slot_s": self.lent_slot_s,
            "shared/borrowed_slot_s": self.borrowed_slot_s,
            "shared/reason": self.reason,
        }


@dataclass(frozen=True)
class Statement:
    """All that a run wants of the pool. The pool ignores a statement with a lower `number` than the last one.

    Parameters
    ----------
    session : str
        A new one whenever the run joins. What was said in another one counts no more.
    wants : tuple of SlotRequest
        Requests whose slots the run does not know yet, oldest first.
    holds : tuple of str
        Ids of the requests whose slots it has.
    bid : Bid, optional
        What slots are worth to it. None: it has made no bid yet.
    avoids : frozenset of str
        Nodes that it found lost or leaving. Ray may not know that yet.
    parked_mb : mapping of str to float
        Memory of its parked processes, by node.
    """

    run: str
    session: str
    number: int
    wants: tuple[SlotRequest, ...] = ()
    holds: tuple[str, ...] = ()
    bid: Bid | None = None
    avoids: frozenset[str] = frozenset()
    parked_mb: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """`granted`: slots of requests that the run does not say to hold yet, by request id."""

    session: str
    granted: Mapping[str, PoolSlot]
    view: PoolView


class RunSlots:
    """A run's own record: what it waits for, and what it has."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.wants: dict[str, SlotRequest] = {}
        self.held: dict[str, PoolSlot] = {}  # by request id
        self.bid: Bid | None = None
        self.avoids: frozenset[str] = frozenset()
        self.parked_mb: Mapping[str, float] = {}
        self.renew()

    def renew(self) -> str:
        """Begin a session, and return its name."""
        self.session, self.number = uuid.uuid4().hex, 0
        return self.session

    def statement(self) -> Statement:
        self.number += 1
        wants, holds = tuple(self.wants.values()), tuple(self.held)
        return Statement(self.run, self.session, self.number, wants, holds, self.bid, self.avoids, self.parked_mb)

    def ask(self, requests: Iterable[SlotRequest]) -> None:
        self.wants |= {request.id: request for request in requests}

    def accept(self, reply: Reply) -> None:
        """Take slots that are still wanted. The next statement gives the others back."""
        for id, slot in reply.granted.items() if reply.session == self.session else ():
            if self.wants.pop(id, None) is not None:
                self.held[id] = slot

    def end(self, ids: Iterable[str]) -> None:
        """Withdraw requests, whether they were granted or not."""
        for id in ids:
            self.wants.pop(id, None)
            self.held.pop(id, None)

    def avoid(self, ids: Iterable[str]) -> None:
        """Ask for no slot on the nodes of these requests any more."""
        self.avoids |= {self.held[id].node for id in ids}
