"""Where slots come from: what a run asks of the pool, and what the pool answers.

The pool of a private run is in the run's own process (`private_slots`), that of a joined cluster is an actor (`pool_client`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace

from placement.market import Bid
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.functions.pool_messages import PoolSlot, PoolView, Reply, RunInfo, RunSlots, SlotRequest

WAIT_S = 0.2  # longest wait within the pool for one slot, between two checks for a stop signal


class SlotSource(ABC):
    """A run's part of a pool of slots. `view` is the pool as of its last answer.

    Every call may be repeated. A slot that is granted while its request is released is free again. A source says how its messages reach the
    pool (`_exchange`), and passes `tests/functions/test_slot_source_contract.py`.
    """

    def __init__(self, resource: str, info: RunInfo) -> None:
        self.resource, self.info, self.slots = resource, info, RunSlots(info.run)
        self.view, self.viewed_s = PoolView(), time.monotonic()
        self.lock = threading.RLock()
        self.used: set[str] = set()  # leases that `wait` has returned
        self.absent_s: dict[str, float] = {}  # wall-clock time before which a request was not granted, whatever the pool's clock says

    def ask(self, requests: Iterable[SlotRequest], *, returns: Iterable[str] = ()) -> None:
        """Request slots without waiting. On GPU a request that names a device gets no other.

        `returns`: leases that the run returns for them, which may be completed to what it asks for.
        """
        if asked := [replace(request, run=self.info.run) for request in requests]:
            with self.lock:
                self._end(returns)
                self.slots.ask(asked)
                self.absent_s |= dict.fromkeys((request.id for request in asked), time.time())
            self._exchange()

    def wait(self, request: SlotRequest, until_s: float) -> list[PoolSlot]:
        """Return the granted slots, or none of them at the time `until_s` (monotonic)."""
        while request.id in self.slots.wants:
            STOP.check()
            looked_s, seconds = time.time(), until_s - time.monotonic()
            self._exchange(max(0.0, min(WAIT_S, seconds)))
            if request.id in self.slots.wants:
                self.absent_s[request.id] = looked_s
                if seconds <= 0:
                    return []
        granted = [self.slots.held[id] for id in request.ids]
        absent_s = self.absent_s.pop(request.id, 0.0)
        for slot in granted:  # the pool counts from then, also if its reply came late; nodes' clocks may differ a little
            slot.granted_s = min(time.time(), max(absent_s, slot.granted_s))
        self.used |= set(request.ids)
        return granted

    def release(self, ids: Iterable[str], *, avoids: bool = False) -> None:
        """Return slots by the ids of their leases, and withdraw requests. Slots that `wait` has not returned cost nothing.

        `avoids`: their nodes are lost or drained, so the run wants no other slot there.
        """
        with self.lock:
            if self._end(ids, avoids):
                self._notify()

    def look(self) -> PoolView:
        """Ask the pool, and return its newest view."""
        self._exchange()
        return self.view

    def may_wait(self) -> bool:
        """Return whether a needed slot may still be granted after its deadline, because other runs hold some."""
        return bool(self.look().others)

    def room(self, width: int) -> int:
        """Return how many times the run could have `width` more slots of one node, as of the last answer."""
        return self.view.free // width

    def bid(self, bid: Bid, gives_s: float | None = None) -> None:
        """Say what slots are worth to the run from now on. `gives_s`: seconds until it can give back some; None: unknown."""
        with self.lock:
            self.slots.bid = bid
            self.slots.gives_at_s = None if gives_s is None else time.monotonic() + gives_s
        self._exchange()

    def parks(self, own_mb: Mapping[str, float], devices: frozenset[tuple[str, str]]) -> None:
        """Tell the pool, with the next message, what this run parks: MB by node, and the nodes and devices to which processes are bound."""
        self.slots.parked_mb, self.slots.warm = own_mb, devices

    def _accept(self, reply: Reply) -> None:
        with self.lock:
            self.slots.accept(reply)
            self.view, self.viewed_s = reply.view, time.monotonic()

    @abstractmethod
    def others_wait(self) -> bool:
        """Return whether another run is short of slots that this one has above its target, or another program waits for any."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _exchange(self, seconds: float | None = None) -> None:
        """Send the run's whole state, and accept the reply. `seconds`: longest wait for a slot; None: it waits for none."""

    def _notify(self) -> None:
        """Tell the pool that leases or requests have ended."""
        self._exchange()

    def _end(self, ids: Iterable[str], avoids: bool = False) -> bool:
        """End leases and requests. Returns whether any of them was the run's."""
        ended = {id for id in ids if id in self.slots.wants or id in self.slots.held}
        if avoids:
            self.slots.avoid(ended & set(self.slots.held))
        self.slots.end(ended - self.used)
        self.slots.end(ended & self.used, time.time())
        self.used -= ended
        for id in ended:
            self.absent_s.pop(id, None)
        return bool(ended)
