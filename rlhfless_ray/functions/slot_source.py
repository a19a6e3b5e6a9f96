"""Where slots come from: what a run asks of the pool, and what the pool answers.

The pool of a private run is in the run's own process (`private_slots`), that of a joined cluster is an actor (`pool_client`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.functions.pool_messages import PoolView, Reply, RunInfo, RunSlots, SlotRequest

WAIT_S = 0.2  # longest wait within the pool for one slot, between two checks for a stop signal


@dataclass(eq=False)
class LeaseRequest:
    """A slot that was requested and may not be granted yet, on a node (any if empty) that has these labels.

    `device`: the only one that is of use, on GPU.
    """

    id: str
    from_s: float  # wall-clock time before which it was not granted
    node: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    device: int | str | None = None


@dataclass(frozen=True)
class Grant:
    """A granted slot. `id`: of its request, and so of the lease."""

    id: str
    node: str
    device: int | str


class SlotSource(Protocol):
    """A run's part of a pool of slots.

    Every call may be repeated. A slot that is granted while its request is released is free again. `view`: the pool as of the last answer.
    """

    view: PoolView

    def ask(self, requests: list[LeaseRequest], /) -> None:
        """Request slots without waiting. On GPU a request that names a device gets no other."""
        ...

    def wait(self, request: LeaseRequest, until_s: float, /) -> Grant | None:
        """Return the granted slot, or None at the time `until_s` (monotonic)."""
        ...

    def release(self, ids: Iterable[str], /, *, avoids: bool = False) -> None:
        """Return slots, and withdraw requests. One that `wait` has not returned costs nothing.

        `avoids`: their nodes are lost or drained, so the run wants no other slot there.
        """
        ...

    def look(self) -> PoolView:
        """Ask the pool, and return its newest view."""
        ...

    def others_wait(self) -> bool:
        """Return whether another run is short of slots that this one has above its target, or another program waits for any."""
        ...

    def may_wait(self) -> bool:
        """Return whether a needed slot may still be granted after its deadline, because other runs hold some."""
        ...

    def parks(self, own_mb: Mapping[str, float], devices: frozenset[tuple[str, str]], /) -> None:
        """Tell the pool, with the next message, what this run parks: MB by node, and the nodes and devices to which processes are bound."""
        ...

    def close(self) -> None: ...


class PooledSlots(ABC):
    """A `SlotSource` whose messages reach its pool by `_exchange`."""

    def __init__(self, resource: str, info: RunInfo) -> None:
        self.resource, self.info, self.slots = resource, info, RunSlots(info.run)
        self.view, self.viewed_s = PoolView(), time.monotonic()
        self.lock = threading.RLock()
        self.used: set[str] = set()  # requests whose slots `wait` has returned

    @abstractmethod
    def _exchange(self, seconds: float | None = None) -> None:
        """Send the run's whole state, and accept the reply. `seconds`: longest wait for a slot; None: it waits for none."""

    @abstractmethod
    def others_wait(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def _notify(self) -> None:
        """Tell the pool that requests have ended."""
        self._exchange()

    def ask(self, requests: list[LeaseRequest]) -> None:
        if requests:
            with self.lock:
                self.slots.ask(SlotRequest(one.id, self.info.run, one.node, one.labels, one.device) for one in requests)
            self._exchange()

    def wait(self, request: LeaseRequest, until_s: float) -> Grant | None:
        while (slot := self.slots.held.get(request.id)) is None:
            STOP.check()
            asked_s, seconds = time.time(), until_s - time.monotonic()
            self._exchange(max(0.0, min(WAIT_S, seconds)))
            if request.id not in self.slots.held:
                request.from_s = asked_s  # it is granted later than that, whatever the clock of the pool's node says
                if seconds <= 0:
                    return None
        # the pool counts from then, also if its reply came late; nodes' clocks may differ a little
        slot.granted_s = request.from_s = min(time.time(), max(request.from_s, slot.granted_s))
        self.used.add(request.id)
        return Grant(request.id, slot.node, slot.device)

    def release(self, ids: Iterable[str], *, avoids: bool = False) -> None:
        ended = {id for id in ids if id in self.slots.wants or id in self.slots.held}
        if not ended:
            return
        with self.lock:
            if avoids:
                self.slots.avoid(ended)
            self.slots.end(ended - self.used)
            self.slots.end(ended & self.used, time.time())
            self.used -= ended
            self._notify()

    def look(self) -> PoolView:
        self._exchange()
        return self.view

    def may_wait(self) -> bool:
        return bool(self.look().others)

    def parks(self, own_mb: Mapping[str, float], devices: frozenset[tuple[str, str]]) -> None:
        self.slots.parked_mb, self.slots.warm = own_mb, devices

    def _accept(self, reply: Reply) -> None:
        with self.lock:
            self.slots.accept(reply)
            self.view, self.viewed_s = reply.view, time.monotonic()
