"""A run's part of the slots that the runs of a cluster share: it takes and releases them at the cluster's `SlotPool`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from placement.market import Bid, Clearing
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions.lease import Grant, LeaseRequest, others_wait
from rlhfless_ray.functions.pool_state import SILENT_S, PoolSlot, PoolView, RunInfo, SlotRequest
from rlhfless_ray.functions.slot_pool import NAMESPACE, TICK_S, SlotPool, UnknownRun

BEAT_S = 1.0  # interval of heartbeats
ANSWER_S = 10.0  # timeout of a call to the pool, after which it is replaced
START_S = 300.0  # time for the pool to start, as long as for any other process (`functions.lease_deadline_s`)
REPLACE_S = 60.0  # time for a lost pool to be replaced, before the run ends
STANDING_S = 30.0  # longest wait for a slot that a phase asks for while it works
WAIT_S = 0.2  # longest wait within the pool for one slot, between two checks for a stop signal


class PoolClient:
    """It asks for slots as `RayGroups` does. A thread keeps the heartbeat, and `view` up to date."""

    def __init__(self, resource: str, info: RunInfo, say: Callable[[str], None] = lambda text: None) -> None:
        """Join the cluster's pool; the first run starts it. Raises UserError if the pool refuses the run.

        `say`: callback for log messages.
        """
        self.resource, self.info, self.say = resource, info, say
        self.held: dict[str, PoolSlot] = {}
        self.granted: dict[str, PoolSlot] = {}  # by request id, until they are waited for
        self.released: set[str] = set()  # ids of requests, not confirmed by the pool yet
        self.view = PoolView(0, 1, 0, 0, 0, 0.0, "", 0.0, 0.0, 0.0)
        self.lock, self.closed = threading.RLock(), threading.Event()
        self.lost = ""  # why this run's slots are no longer its own
        self.waits_said = False
        self.handle = self._find()
        self._join_first()
        self.thread = threading.Thread(target=self._beat, name="slot pool heartbeat", daemon=True)
        self.thread.start()

    # ---- what a LeaseManager needs ----------------------------------------------------------------------------------

    def ask(self, requests: list[LeaseRequest]) -> None:
        if requests:
            self._take(self._call("ask", [self._asked(one) for one in requests]))

    def wait(self, request: LeaseRequest, until_s: float) -> Grant | None:
        """Return what was granted, or None at the time `until_s` (monotonic)."""
        while (slot := self.granted.pop(self._id(request), None)) is None:
            STOP.check()
            request.from_s, seconds = time.time(), max(0.0, until_s - time.monotonic())
            found = self._call("wait", self._asked(request), min(WAIT_S, seconds))
            if found is not None:
                self._take({self._id(request): found})
            elif not seconds:
                return None
        request.from_s = min(time.time(), max(request.from_s, slot.granted_s))  # nodes' clocks may differ a little
        return Grant(slot.id, slot.node, slot.device)

    def arrival(self, request: LeaseRequest) -> Any:
        """Return a reference that resolves when the request is granted, or at the latest after STANDING_S. Then `wait` tells."""
        return self.handle.wait.remote(self._asked(request), STANDING_S)

    def withdraw(self, requests: list[LeaseRequest]) -> None:
        for request in requests:
            if (slot := self.granted.pop(self._id(request), None)) is not None:
                del self.held[slot.id]
        self._release([self._id(request) for request in requests])

    def release(self, ids: list[str]) -> None:
        self._release([self.held.pop(id).request for id in ids])

    def drop(self, ids: list[str]) -> None:
        """Release slots of nodes that are lost or leave. The pool may not know that yet, and would grant them again."""
        self._release([self.held.pop(id).request for id in ids], dropped=True)

    def _release(self, requests: list[str], dropped: bool = False) -> None:
        """Tell the pool. If the call is lost, the next heartbeat repeats it."""
        if requests:
            with self.lock:
                self.released |= set(requests)
                self.handle.release.remote(self.info.run, requests, dropped)

    def others_wait(self) -> bool:
        """Return whether another run is short of slots that this one has above its target, or another program waits for any."""
        return self.view.surplus > 0 or others_wait(self.resource, set())

    @property
    def surplus(self) -> int:
        return self.view.surplus

    def may_wait(self) -> bool:
        """Return whether a needed slot comes although its deadline is over: other runs hold slots, and give back what is this run's."""
        self.view = self._call("beat", self.info.run, [])
        others = self.view.others
        if others and not self.waits_said:
            self.waits_said = True
            held = ", ".join(f"{name}: {count}" for name, count in sorted(others.items()))
            self.say(f"waits for its turn: the slots of the pool are held by other runs ({held})")
        return bool(others)

    def close(self) -> None:
        """Leave the pool. The last run ends it."""
        if self.closed.is_set():
            return
        self.closed.set()
        with suppress(RayActorError, GetTimeoutError):  # the end of the heartbeat says the same a little later
            if ray.get(self.handle.leave.remote(self.info.run), timeout=ANSWER_S):
                ray.get(self.handle.end_if_empty.remote(), timeout=ANSWER_S)

    # ---- the market ---------------------------------------------------------------------------------------------------

    def bid(self, bid: Bid) -> None:
        """Say what slots are worth to the run from now on."""
        self.view = self._call("bid", bid)

    def what_if(self, bid: Bid) -> Clearing:
        """Return how the pool would be divided if this run bid so."""
        return self._call("what_if", bid)

    # ---- inside -------------------------------------------------------------------------------------------------------

    def _id(self, request: LeaseRequest) -> str:
        return f"{self.info.run}/{request.id}"

    def _asked(self, request: LeaseRequest) -> SlotRequest:
        return SlotRequest(self._id(request), self.info.run, request.node, request.labels)

    def _take(self, granted: dict[str, PoolSlot]) -> None:
        with self.lock:
            self.granted |= granted
            self.held |= {slot.id: slot for slot in granted.values()}

    def _find(self) -> Any:
        options = {"name": f"slot-pool-{self.resource}", "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        on_head = {"node:__internal_head__": 0.001}  # other nodes come and go
        remote = ray.remote(SlotPool).options(**options, max_restarts=-1, num_cpus=0, max_concurrency=1000, resources=on_head)
        return remote.remote(self.resource)

    def _join_first(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                refused, _ = ray.get(self.handle.join.remote(self.info, []), timeout=START_S)
                break
            except (RayActorError, GetTimeoutError) as error:  # it ended with the last run before
                STOP.check()
                if time.monotonic() > end:
                    raise RunError(f"the slot pool of this cluster did not start within {START_S:.0f} s") from error
                time.sleep(TICK_S)
                self.handle = self._find()
        if refused:
            raise UserError(f"{refused}; `rlhfless cluster` shows who is on it")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the pool. One that is lost is replaced, and learns again what this run holds."""
        end = time.monotonic() + REPLACE_S
        while True:
            if self.lost:
                raise RunError(self.lost)
            try:
                return ray.get(getattr(self.handle, method).remote(*arguments), timeout=ANSWER_S)
            except (RayActorError, GetTimeoutError, UnknownRun) as error:
                if time.monotonic() > end:
                    raise RunError(f"the slot pool of this cluster did not answer within {REPLACE_S:.0f} s") from error
                self._rejoin(error)

    def _rejoin(self, error: Exception) -> None:
        """Find the pool again, and join it if it does not know this run."""
        with self.lock, suppress(RayActorError, GetTimeoutError):  # after another failure the caller tries again
            if self.closed.is_set():
                return
            if isinstance(error, GetTimeoutError):  # it hangs: Ray starts another one
                ray.kill(self.handle, no_restart=False)
            time.sleep(TICK_S)
            self.handle = self._find()
            with suppress(UnknownRun):
                ray.get(self.handle.beat.remote(self.info.run, []), timeout=ANSWER_S)
                return  # another thread was quicker
            refused, gone = ray.get(self.handle.join.remote(self.info, list(self.held.values()), self.view.slot_s), timeout=ANSWER_S)
            if refused or gone:
                self.lost = refused or (
                    f"this run did not answer for {SILENT_S:.0f} s, and its slots went to other runs of the cluster; --resume continues it"
                )
            else:
                self.say("the slot pool of the cluster was replaced; this run goes on with what it holds")

    def _beat(self) -> None:
        while not self.closed.is_set() and not self.lost:
            with self.lock:
                released = list(self.released)
            try:
                self.view = ray.get(self.handle.watch.remote(self.info.run, released, self.view.surplus, BEAT_S), timeout=BEAT_S + ANSWER_S)
            except (RayActorError, GetTimeoutError, UnknownRun) as error:
                self._rejoin(error)
                continue
            with self.lock:
                self.released -= set(released)
