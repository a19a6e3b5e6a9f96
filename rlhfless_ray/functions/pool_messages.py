"""Messages between the runs of a cluster and their shared pool, and a run's own record of its slots. Pure.

Each message of a run contains its whole state: its requests, its slots and its bid. Messages may therefore be lost, repeated or
reordered, and the next one repairs the pool's state: slots that no request is for are freed, and requests that are missing are dropped.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from placement.market import Bid
from rlhfless_ray.common.json_types import JsonObject

NODE_LABEL = "ray.io/node-id"  # Ray's own label
MESSAGES = 4  # version of these messages and of `SlotPool.status`: the pool refuses runs with another one
OTHER_VERSION = (
    "the runs on this cluster use another version of rlhfless-ray, whose slot pool does not understand this run; "
    "use the same version, wait until those runs have ended, or set cluster.pool to false"
)
SILENT_S = 20.0  # a run without messages for this long counts as ended, and its slots are freed


@dataclass(frozen=True)
class RunInfo:
    """A run that joins: its name, its share and priority (see `Bid`), and where it runs."""

    run: str
    share: float | None = None
    weight: float = 1.0
    least: int = 1  # minimum number of slots that it needs at once
    folder: str = ""
    job: str = ""  # Ray's job id of its driver, whose processes are ended if the run is silent for too long
    price: float = 0.0  # money per slot-hour
    id: str = ""  # tells runs apart that one process starts in one folder after another


@dataclass(frozen=True)
class SlotRequest:
    """A request for `width` slots of one node, all or none. The node is any if empty, and meets these conditions on its labels.

    `device`: the only one that is of use, on GPU. `run`: set by the run's source.
    """

    id: str
    run: str = ""
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    device: int | str | None = None
    width: int = 1

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the leases of its slots."""
        return (self.id,) if self.width == 1 else tuple(f"{self.id}.{number}" for number in range(self.width))


@dataclass
class PoolSlot:
    """A slot that Ray has granted to the pool. `group`: its placement group, which this module does not use."""

    id: str
    node: str
    device: int | str
    group: Hashable = None
    holder: str = ""  # name of the run; empty: free
    request: str = ""  # id of the lease that it was granted for
    since_s: float = 0.0  # time of the last hand-over
    granted_s: float = 0.0  # the same in wall-clock time; of a slot that the run uses, when its ledger began
    last: str = ""  # name of the run that held it before

    @property
    def place(self) -> tuple[str, str]:
        return self.node, str(self.device)


@dataclass(frozen=True)
class PoolView:
    """A run's view of the pool.

    `surplus`: slots that it should give back to runs below their targets. It includes slots above its own target. It also includes slots
    to which processes with state of those runs must return.
    """

    slots: int = 0
    runs: int = 1
    held: int = 0
    target: int = 0
    surplus: int = 0
    price: float = 0.0
    reason: str = ""
    slot_s: float = 0.0
    lent_slot_s: float = 0.0
    borrowed_slot_s: float = 0.0
    others: Mapping[str, int] = field(default_factory=dict)  # slots of the other runs that hold any
    waiting: tuple[str, ...] = ()  # other runs below their target that want slots
    parked_mb: Mapping[str, float] = field(default_factory=dict)  # memory of the parked processes of other runs, by node
    due: tuple[tuple[float, int], ...] = ()  # seconds until other runs expect to give back slots above their targets, and how many
    surplus_leases: tuple[str, ...] = ()  # ids of the leases among which the surplus is
    today_slot_s: float = 0.0  # the part of `slot_s` that belongs to `day`
    day: int = 0  # UTC day, in days since the epoch
    # nodes and devices to which parked processes of the run are bound: those that no run holds, also if they went back to Ray, and those
    # that other runs hold beyond their shares
    warm_free: tuple[tuple[str, str], ...] = ()
    warm_lent: tuple[tuple[str, str], ...] = ()

    @property
    def free(self) -> int:
        """Slots that no run holds."""
        return max(0, self.slots - self.held - sum(self.others.values()))

    def metrics(self) -> JsonObject:
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
    """The whole state of a run in the pool. The pool ignores a statement with a lower `number` than the last one.

    Attributes:
        session: a new id whenever the run joins. Statements of earlier sessions no longer count.
        wants: requests whose slots the run does not know yet, oldest first.
        holds: ids of its leases.
        bid: the value of slots to the run. None: it has made no bid yet.
        avoids: ids of nodes that the run found lost or drained. Ray may not know that yet.
        parked_mb: memory of its parked processes in MB, by node id.
        warm: nodes and devices to which parked processes of it are bound, on GPU.
        gives_s: seconds in which it expects to give back slots that others wait for. None: unknown.
        paid_s: leased seconds by lease id, of ended requests whose end the pool may not know.
    """

    run: str
    session: str
    number: int
    wants: tuple[SlotRequest, ...] = ()
    holds: tuple[str, ...] = ()
    bid: Bid | None = None
    avoids: frozenset[str] = frozenset()
    parked_mb: Mapping[str, float] = field(default_factory=dict)
    warm: frozenset[tuple[str, str]] = frozenset()
    gives_s: float | None = None
    paid_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The pool's reply to a statement.

    `granted`: slots that the run has not confirmed yet, by lease id. `number`: number of the newest statement that the pool
    has read.
    """

    session: str
    granted: Mapping[str, PoolSlot]
    view: PoolView
    number: int = 0


class RunSlots:
    """A run's own record of its requests and slots."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.wants: dict[str, SlotRequest] = {}
        self.held: dict[str, PoolSlot] = {}  # by lease id
        self.bid: Bid | None = None
        self.avoids: frozenset[str] = frozenset()
        self.parked_mb: Mapping[str, float] = {}
        self.warm: frozenset[tuple[str, str]] = frozenset()
        self.gives_at_s: float | None = None  # when it expects to give back slots that others wait for, on its own clock
        self.renew()

    def renew(self) -> str:
        """Begin a session, and return its name."""
        self.session, self.number = uuid.uuid4().hex, 0
        self.paid_s: dict[str, tuple[float, int]] = {}  # see `Statement`, and the number of the last statement before each end
        return self.session

    def statement(self) -> Statement:
        self.number += 1
        wants, holds = tuple(self.wants.values()), tuple(self.held)
        gives_s = None if self.gives_at_s is None else max(0.0, self.gives_at_s - time.monotonic())
        paid_s = {id: seconds for id, (seconds, _) in self.paid_s.items()}
        own = self.bid, self.avoids, self.parked_mb, self.warm
        return Statement(self.run, self.session, self.number, wants, holds, *own, gives_s, paid_s)

    def ask(self, requests: Iterable[SlotRequest]) -> None:
        self.wants |= {request.id: request for request in requests}

    def accept(self, reply: Reply) -> None:
        """Take granted slots that are still wanted. The next statement gives the others back."""
        if reply.session != self.session:
            return
        self.paid_s = {id: ended for id, ended in self.paid_s.items() if ended[1] >= reply.number}
        for request in [one for one in self.wants.values() if all(id in reply.granted for id in one.ids)]:
            del self.wants[request.id]
            self.held |= {id: reply.granted[id] for id in request.ids}

    def end(self, ids: Iterable[str], ended_s: float = 0.0) -> None:
        """End leases, and withdraw requests. `ended_s`: wall-clock time at which the run's ledger of their slots ended; 0: it used none."""
        for id in ids:
            self.wants.pop(id, None)
            slot = self.held.pop(id, None)
            self.paid_s[id] = max(0.0, ended_s - slot.granted_s) if slot is not None else 0.0, self.number

    def avoid(self, ids: Iterable[str]) -> None:
        """Request no more slots on the nodes of these leases."""
        self.avoids |= {self.held[id].node for id in ids}
