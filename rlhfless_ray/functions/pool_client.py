"""A run's part of the slots that the runs of a cluster share: it takes and releases them at the cluster's `SlotPool`."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from placement.market import Bid, Clearing
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, UserError, one_line_with_type
from rlhfless_ray.functions.pool_messages import MESSAGES, OTHER_VERSION, SILENT_S, PoolView, Reply, RunInfo, RunSlots, SlotRequest
from rlhfless_ray.functions.slot_pool import NAMESPACE, TICK_S, SlotPool, UnknownRun
from rlhfless_ray.functions.slot_source import Grant, LeaseRequest, others_wait
from rlhfless_ray.recipe.run_sections import ClusterConfig, PriceConfig

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
        self.grants_devices = resource == "gpu"
        self.slots = RunSlots(info.run)
        self.view, self.viewed_s = PoolView(0, 1, 0, 0, 0, 0.0, "", 0.0, 0.0, 0.0), time.monotonic()
        self.lock, self.closed = threading.RLock(), threading.Event()
        self.lost = ""  # why this run's slots are no longer its own
        self.has_said_that_it_waits = False
        self.handle = self._find()
        self._join_first()
        self.thread = threading.Thread(target=self._beat, name="slot pool heartbeat", daemon=True)
        self.thread.start()

    # ---- what a LeaseManager needs ----------------------------------------------------------------------------------

    def ask(self, requests: list[LeaseRequest]) -> None:
        if requests:
            with self.lock:
                self.slots.ask(SlotRequest(self._id(one), self.info.run, one.node, one.labels, one.device) for one in requests)
            self._tell()

    def wait(self, request: LeaseRequest, until_s: float) -> Grant | None:
        """Return what was granted, or None at the time `until_s` (monotonic)."""
        while (slot := self.slots.held.get(self._id(request))) is None:
            STOP.check()
            asked_s, seconds = time.time(), until_s - time.monotonic()
            self._tell(max(0.0, min(WAIT_S, seconds)))
            if self._id(request) not in self.slots.held:
                request.from_s = asked_s  # it is granted later than that, whatever the clock of the pool's node says
                if seconds <= 0:
                    return None
        # the pool counts from then, also if its reply came late; nodes' clocks may differ a little
        slot.granted_s = request.from_s = min(time.time(), max(request.from_s, slot.granted_s))
        return Grant(slot.request, slot.node, slot.device)

    def arrival(self, request: LeaseRequest) -> Any:
        """Return a reference that resolves when the request is granted, or at the latest after STANDING_S. Then `wait` tells."""
        return self.handle.arrival.remote(self._id(request), STANDING_S)

    def withdraw(self, requests: list[LeaseRequest]) -> None:
        self._end([self._id(request) for request in requests], 0.0)

    def release(self, ids: list[str]) -> None:
        self._end(ids, time.time())

    def _end(self, ids: list[str], ended_s: float) -> None:
        if ids:
            with self.lock:
                self.slots.end(ids, ended_s)
                self._send_statement()  # if it is lost, the next heartbeat says the same

    def drop(self, ids: list[str]) -> None:
        """Release slots of nodes that are lost or leave. The pool may not know that yet, and would grant them again."""
        with self.lock:
            self.slots.avoid(ids)
            self.release(ids)

    def others_wait(self) -> bool:
        """Return whether another run is short of slots that this one has above its target, or another program waits for any."""
        return self.view.surplus > 0 or others_wait(self.resource, set())

    @property
    def surplus(self) -> int:
        return self.view.surplus

    @property
    def warm_free(self) -> tuple[tuple[str, str], ...]:
        return self.view.warm_free

    def warm_due(self) -> tuple[tuple[str, str], ...]:
        self._tell()  # the view may be older than the last release
        return self.view.warm_free + self.view.warm_lent

    @property
    def surplus_leases(self) -> tuple[str, ...]:
        return self.view.surplus_leases

    def may_wait(self) -> bool:
        """Return whether a needed slot may still be granted after its deadline: other runs hold slots, and give back this run's."""
        self._tell()
        others = self.view.others
        if others and not self.has_said_that_it_waits:
            self.has_said_that_it_waits = True
            held = ", ".join(f"{name}: {count}" for name, count in sorted(others.items()))
            self.say(f"waits for its turn: the slots of the pool are held by other runs ({held})")
        return bool(others)

    def close(self) -> None:
        """Leave the pool. The last run ends it."""
        if self.closed.is_set():
            return
        with self.lock:  # it may be joining again
            self.closed.set()
        with suppress(RayActorError, GetTimeoutError):  # the end of the heartbeat says the same a little later
            if ray.get(self.handle.leave.remote(self.info.run), timeout=ANSWER_S):
                ray.get(self.handle.end_if_empty.remote(), timeout=ANSWER_S)
        self.thread.join(ANSWER_S)  # a message that it sends while Ray shuts down would end this process with an error

    # ---- memory of parked processes --------------------------------------------------------------------------------

    @property
    def runs(self) -> int:
        """Number of runs, this one included."""
        return max(1, self.view.runs)

    def parks(self, own_mb: Mapping[str, float], devices: frozenset[tuple[str, str]]) -> None:
        """Tell the pool, with the next message, what this run parks: MB by node, and the nodes and devices to which processes are bound."""
        self.slots.parked_mb, self.slots.warm = own_mb, devices

    def others_mb(self, node: str) -> float:
        """Return the memory in MB of the other runs' parked processes on a node."""
        return self.view.parked_mb.get(node, 0.0)

    # ---- the market ---------------------------------------------------------------------------------------------------

    def bid(self, bid: Bid, gives_s: float | None = None) -> None:
        """Say what slots are worth to the run from now on. `gives_s`: seconds until it can give back some; None: unknown."""
        with self.lock:
            self.slots.bid = bid
            self.slots.gives_at_s = None if gives_s is None else time.monotonic() + gives_s
        self._tell()

    def renew_bid(self, bid: Bid) -> None:
        """Say with the next heartbeat what slots are worth by now, in the same phase."""
        with self.lock:
            self.slots.bid = bid

    def what_if(self, bid: Bid) -> Clearing:
        """Return how the pool would be divided if this run bid so."""
        return self._call(lambda: self.handle.what_if.remote(bid))

    # ---- inside -------------------------------------------------------------------------------------------------------

    def _id(self, request: LeaseRequest) -> str:
        return f"{self.info.run}/{request.id}"

    def _tell(self, seconds: float = 0.0) -> None:
        """Send the run's whole state, and collect grants for up to `seconds`."""
        self._accept(self._call(lambda: self._send_statement(seconds)))

    def _send_statement(self, *how: Any) -> Any:
        with self.lock:
            return self.handle.tell.remote(self.slots.statement(), *how)

    def _accept(self, reply: Reply) -> None:
        with self.lock:
            self.slots.accept(reply)
            self.view, self.viewed_s = reply.view, time.monotonic()

    def _find(self) -> Any:
        options = {"name": f"slot-pool-{self.resource}", "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        on_head = {"node:__internal_head__": 0.001}  # other nodes come and go
        remote = ray.remote(SlotPool).options(**options, max_restarts=-1, num_cpus=0, max_concurrency=1000, resources=on_head)
        return remote.remote(self.resource)

    def _join_first(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                refused, _ = self._join(START_S, self.slots.session, [])
                break
            except (RayActorError, GetTimeoutError) as error:  # it ended with the last run before
                STOP.check()
                if time.monotonic() > end:
                    raise RunError(f"the slot pool of this cluster did not start within {START_S:.0f} s") from error
                time.sleep(TICK_S)
                self.handle = self._find()
        if refused:
            raise UserError(f"{refused}; `rlhfless cluster` shows who is on it")

    def _join(self, timeout_s: float, session: str, *mine: Any) -> tuple[str, list[str]]:
        """Send `SlotPool.join`, and return its result. `mine`: what this run has, see there."""
        try:
            reply: tuple[str, list[str]] = ray.get(self.handle.join.remote(self.info, session, *mine, messages=MESSAGES), timeout=timeout_s)
        except TypeError as error:
            if "messages" not in str(error):
                raise
            return OTHER_VERSION, []  # a pool of the first version has no such parameter
        return reply

    def _call(self, call: Callable[[], Any]) -> Any:
        """Call the pool, and return its reply. A pool that is lost is replaced, and learns again what this run holds."""
        end = time.monotonic() + REPLACE_S
        while True:
            if self.lost:
                raise RunError(self.lost)
            try:
                return ray.get(call(), timeout=ANSWER_S)
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
                ray.get(self._send_statement(), timeout=ANSWER_S)
                return  # another thread was quicker
            mine = self.slots.renew(), list(self.slots.held.values()), self.view, time.monotonic() - self.viewed_s
            refused, gone = self._join(ANSWER_S, *mine)
            if refused or gone:
                self.lost = refused or (
                    f"this run did not answer for {SILENT_S:.0f} s, and its slots went to other runs of the cluster; --resume continues it"
                )
            else:
                self.say("the slot pool was replaced, or had not heard from this run; the run keeps the slots that it holds")

    def _beat(self) -> None:
        while not self.closed.is_set() and not self.lost:
            try:
                try:
                    self._accept(ray.get(self._send_statement(BEAT_S, self.view.surplus), timeout=BEAT_S + ANSWER_S))
                except (RayActorError, GetTimeoutError, UnknownRun) as error:
                    self._rejoin(error)
            except Exception as error:  # the run's next call ends it with this sentence
                self.lost = f"the heartbeat to the slot pool failed: {one_line_with_type(error, 300)}"


def join_pool(
    cluster: ClusterConfig, price: PriceConfig, resource: str, least: int, folder: Path, new: bool, say: Callable[[str], None]
) -> PoolClient:
    """Join the pool of slots that all runs of the cluster share.

    `least`: slots that the run needs at once. `folder`: of the run; if it is `new` and the pool refuses the run, it is deleted.
    Raises UserError if the pool refuses the run.
    """
    job = ray.get_runtime_context().get_job_id()
    where, per_hour = str(folder.resolve()), price.slot_per_hour(resource)
    info = RunInfo(folder.name, cluster.share, cluster.priority, least, where, job, per_hour, uuid.uuid4().hex)
    try:
        return PoolClient(resource, info, say)
    except UserError:
        if new:
            shutil.rmtree(folder)
        raise
