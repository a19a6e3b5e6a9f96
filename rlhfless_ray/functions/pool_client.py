"""A run's part of the slots that the runs of a cluster share: it takes and releases them at the cluster's `SlotPool`."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from placement.market import Bid, Clearing
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, UserError, one_line_with_type
from rlhfless_ray.functions.node_groups import POOL_PREFIX, others_wait
from rlhfless_ray.functions.pool_messages import MESSAGES, SILENT_S, RunInfo, SlotRequest
from rlhfless_ray.functions.slot_pool import NAMESPACE, TICK_S, SlotPool, UnknownRun
from rlhfless_ray.functions.slot_source import SlotSource
from rlhfless_ray.recipe.run_sections import ClusterConfig, PriceConfig

BEAT_S = 1.0  # interval of heartbeats
ANSWER_S = 10.0  # timeout of a call to the pool, after which it is replaced
START_S = 300.0  # time for the pool to start, as long as for any other process (`functions.lease_deadline_s`)
REPLACE_S = 60.0  # time for a lost pool to be replaced, before the run ends
STANDING_S = 30.0  # longest wait for a slot that a phase asks for while it works


class PoolClient(SlotSource):
    """The slots of a run that shares the cluster's pool. A thread keeps the heartbeat, and `view` up to date."""

    def __init__(self, resource: str, info: RunInfo, say: Callable[[str], None] = lambda text: None) -> None:
        """Join the cluster's pool; the first run starts it. Raises UserError if the pool refuses the run.

        `say`: callback for log messages.
        """
        super().__init__(resource, info)
        self.say, self.closed = say, threading.Event()
        self.lost = ""  # why this run's slots are no longer its own
        self.has_said_that_it_waits = False
        self.handle = self._find()
        self._join_first()
        self.thread = threading.Thread(target=self._beat, name="slot pool heartbeat", daemon=True)
        self.thread.start()

    def arrival(self, request: SlotRequest) -> Any:
        """Return a reference that resolves when the request is granted, or at the latest after STANDING_S. Then `wait` tells."""
        return self.handle.arrival.remote(request.id, STANDING_S)

    def others_wait(self) -> bool:
        return self.view.surplus > 0 or others_wait(self.resource, POOL_PREFIX)

    def may_wait(self) -> bool:
        others = self.look().others
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

    # ---- the market ---------------------------------------------------------------------------------------------------

    def renew_bid(self, bid: Bid) -> None:
        """Say with the next heartbeat what slots are worth by now, in the same phase."""
        with self.lock:
            self.slots.bid = bid

    def what_if(self, bid: Bid) -> Clearing:
        """Return how the pool would be divided if this run bid so."""
        return self._call(lambda: self.handle.what_if.remote(bid))

    # ---- inside -------------------------------------------------------------------------------------------------------

    def _exchange(self, seconds: float | None = None) -> None:
        self._accept(self._call(lambda: self._send_statement(seconds or 0.0)))

    def _notify(self) -> None:
        self._send_statement()  # if it is lost, the next heartbeat says the same

    def _send_statement(self, *how: object) -> Any:
        with self.lock:
            return self.handle.tell.remote(self.slots.statement(), *how)

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

    def _join(self, timeout_s: float, session: str, *mine: object) -> tuple[str, list[str]]:
        """Send `SlotPool.join`, and return its result. `mine`: what this run has, see there."""
        reply: tuple[str, list[str]] = ray.get(self.handle.join.remote(self.info, session, *mine, messages=MESSAGES), timeout=timeout_s)
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
