"""One pool of slots for all runs of a cluster: a Ray actor that is found by name, and each run's client of it.

The first run starts the actor, and it ends after the last one has left. It holds the placement groups, so that a slot passes from run to run
without Ray's queue. They outlive the actor: if it dies Ray starts another one, which learns from the runs' heartbeats what they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.market import Bid, Clearing
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions.lease import POOL_PREFIX, Grant, LeaseRequest, bundle_of, device_ids, device_named, node_slots, others_wait
from rlhfless_ray.functions.pool_state import SILENT_S, PoolSlot, PoolState, PoolView, RunInfo, SlotRequest

NAMESPACE = "rlhfless"
BEAT_S = 1.0  # interval of heartbeats
TICK_S = 0.25  # interval at which the pool looks for silent runs and idle slots
LOOK_S = 1.0  # interval at which it looks at the cluster's nodes
POLL_S = (0.002, 0.05)  # shortest and longest pause between two looks at a placement group that Ray has not granted yet
EMPTY_S = 5.0  # a pool without runs ends after this time
ANSWER_S = 10.0  # timeout of a call to the pool, after which it is replaced
REPLACE_S = 60.0  # time for a lost pool to be replaced, before the run ends
WAIT_S = 0.2  # longest wait within the pool for one slot, between two checks for a stop signal


class UnknownRun(Exception):
    """The pool does not know the run: it was replaced, or the run was silent for too long."""


class SlotPool:
    """The actor. Its state is a `PoolState`; here are only the calls of Ray. All methods run on one event loop."""

    def __init__(self, resource: str) -> None:
        """`resource`: "cpu" (a slot is a core) or "gpu" (a slot is a device)."""
        self.resource, self.bundle = resource, bundle_of(resource)
        self.state = PoolState(time.monotonic())
        self.granted: dict[str, asyncio.Future[PoolSlot]] = {}  # by request id
        self.creating: dict[str, Any] = {}  # placement groups that Ray has not granted yet, by the request they were asked for
        self.counter, self.began_s, self.empty_s = 0, time.time(), time.monotonic()
        self.looked_s = -float("inf")
        self.look()
        until = time.monotonic() + SILENT_S
        self.orphans = {info["name"]: until for info in self._groups()}  # of an earlier pool: when they are removed unless a run has them
        self.tasks: set[asyncio.Task[None]] = set()  # asyncio keeps weak references only
        self.ticking = False

    def _prefix(self) -> str:
        return f"{POOL_PREFIX}{self.resource}-"

    def _groups(self) -> list[dict[str, Any]]:
        """Return Ray's rows of this pool's placement groups that exist."""
        return [info for info in placement_group_table().values() if info["name"].startswith(self._prefix()) and info["state"] != "REMOVED"]

    def look(self) -> None:
        """Look at the nodes of the cluster."""
        now = time.monotonic()
        if now - self.looked_s < LOOK_S:
            return
        self.looked_s, nodes = now, ray.nodes()
        labels = {node["NodeID"]: node.get("Labels") or {} for node in nodes}
        for slot in self.state.set_nodes({id: (count, labels[id]) for id, count in node_slots(self.resource, nodes=nodes).items()}, now):
            remove_placement_group(slot.group)

    # ---- calls of the runs ----------------------------------------------------------------------------------------

    async def join(self, info: RunInfo, held: list[PoolSlot], paid_slot_s: float = 0.0) -> str:
        """Add a run; returns why it cannot join, or an empty string. `held`: slots that it has from a pool that was lost."""
        if not self.ticking:
            self.ticking = True
            self.tasks.add(asyncio.create_task(self._tick()))
        slots = []
        for one in held:
            if self.orphans.pop(one.id, None) is not None:
                slots.append(replace(one, group=get_placement_group(one.id)))
        return self.state.join(info, time.monotonic(), slots, paid_slot_s)

    async def leave(self, run: str) -> None:
        now = time.monotonic()
        for request in [one for one in self.state.requests.values() if one.run == run]:
            self._withdraw(request.id)
        self.state.leave(run, now)
        self.empty_s = now
        self._match()
        if not self.state.runs:
            self._remove_idle(all_of_them=True)

    async def beat(self, run: str, released: list[str]) -> PoolView:
        """Say that the run is alive, and which slots it has released. Returns what it sees of the pool."""
        now = self._known(run)
        self.state.heard(run, now)
        self.state.release(run, released, now)
        self._match()
        return self.state.view(run, now)

    async def release(self, run: str, ids: list[str]) -> None:
        self.state.release(run, ids, self._known(run))
        self._match()

    async def ask(self, requests: list[SlotRequest]) -> None:
        """Ask for slots. `wait` returns them. An id that was asked for before is ignored: a call may be repeated."""
        for request in requests:
            now = self._known(request.run)
            if request.id not in self.granted:
                self.granted[request.id] = asyncio.get_running_loop().create_future()
                self.state.ask(request, now)
        self._match()
        for request in requests:
            if request.id in self.state.requests and request.id not in self.creating:  # no free slot for it: Ray may have one
                self._create(request)

    async def wait(self, request: SlotRequest, seconds: float) -> PoolSlot | None:
        """Return the slot for a request, or None if there is none within `seconds`."""
        await self.ask([request])  # of a pool that was replaced it was not asked yet
        with contextlib.suppress(TimeoutError):
            slot = await asyncio.wait_for(asyncio.shield(self.granted[request.id]), seconds)
            return replace(slot, group=None)
        return None

    async def withdraw(self, run: str, ids: list[str]) -> None:
        """End requests. A slot that was granted meanwhile is free again."""
        now = self._known(run)
        for id in ids:
            future = self._withdraw(id)
            if future is not None and future.done() and not future.cancelled():
                self.state.release(run, [future.result().id], now)
        self._match()

    async def taken(self, run: str, id: str) -> None:
        """Forget a request: the run has received its slot."""
        self.granted.pop(id, None)

    async def bid(self, bid: Bid) -> PoolView:
        now = self._known(bid.run)
        self.state.bid(bid.run, bid, now)
        self._match()
        return self.state.view(bid.run, now)

    async def what_if(self, bid: Bid) -> Clearing:
        """Return the division of the pool if this run bid so."""
        self._known(bid.run)
        return self.state.what_if(bid)

    async def status(self) -> dict[str, Any]:
        """Return everything that `rlhfless cluster` shows."""
        self.look()
        now, state = time.monotonic(), self.state
        runs = [
            {
                "name": name,
                "folder": run.info.folder,
                "share": run.info.share,
                "priority": run.info.weight,
                "since_s": now - run.joined_s,
                "silent_s": now - run.heard_s,
                "slots_by_node": _count(slot.node for slot in state.slots.values() if slot.holder == name),
                "waits": state.waiting(now).get(name, 0),
                **asdict(state.view(name, now)),
            }
            for name, run in sorted(state.runs.items())
        ]
        return {
            "resource": self.resource,
            "slots": state.size,
            "nodes": {id: count for id, (count, _) in state.nodes.items()},
            "free": sum(not slot.holder for slot in state.slots.values()),
            "free_slot_s": state.free_slot_s,
            "handovers": state.handovers,
            "began_s": self.began_s,
            "runs": runs,
            "past": [
                {"name": info.run, "folder": info.folder, "lasted_s": to_s - from_s, "ended_s_ago": now - to_s, "slot_s": paid}
                for info, from_s, to_s, paid in state.past
            ],
        }

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _known(self, run: str) -> float:
        """Return the time, if the run is known."""
        if run not in self.state.runs:
            raise UnknownRun(run)
        return time.monotonic()

    def _match(self) -> None:
        """Hand free slots to those who wait."""
        for request, slot in self.state.match(time.monotonic()):
            self._abandon(request.id)
            future = self.granted[request.id]
            future.set_result(slot)

    def _withdraw(self, id: str) -> asyncio.Future[PoolSlot] | None:
        self.state.withdraw(id, time.monotonic())
        self._abandon(id)
        return self.granted.pop(id, None)

    def _abandon(self, id: str) -> None:
        """End the request to Ray that was made for this one."""
        if (group := self.creating.pop(id, None)) is not None:
            remove_placement_group(group)

    def _create(self, request: SlotRequest) -> None:
        self.counter += 1
        name = f"{self._prefix()}{int(1e6 * self.began_s):x}-{self.counter}"
        selector = dict(request.labels) | ({"ray.io/node-id": request.node} if request.node else {})
        selectors = [selector] if selector else None
        group = placement_group([dict(self.bundle)], name=name, lifetime="detached", bundle_label_selector=selectors)
        self.creating[request.id] = group
        self.tasks.add(task := asyncio.create_task(self._receive(request, name, group)))
        task.add_done_callback(self.tasks.discard)

    async def _receive(self, request: SlotRequest, name: str, group: Any) -> None:
        """Wait until Ray grants a group, and make it a slot of the pool."""
        pause, longest = POLL_S
        while (table := placement_group_table(group))["state"] != "CREATED":
            await asyncio.sleep(pause)
            pause = min(longest, 1.5 * pause)
            if self.creating.get(request.id) is not group:
                return
        node = table["bundles_to_node_id"][0]
        try:
            device = await self._device(group) if self.resource == "gpu" else self._number(node)
        except RayError:  # the node was lost before it could name the device
            if self.creating.get(request.id) is group:
                self._abandon(request.id)
                self._create(request)
            return
        if self.creating.get(request.id) is group:  # otherwise it was abandoned meanwhile
            del self.creating[request.id]
            self.state.put(PoolSlot(name, node, device, group), time.monotonic())
            self._match()

    async def _device(self, group: Any) -> int | str:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        ids = await device_ids.options(scheduling_strategy=strategy).remote()
        return device_named(ids[0])

    def _number(self, node: str) -> int:
        taken = {slot.device for slot in self.state.slots.values() if slot.node == node}
        return next(n for n in range(len(taken) + 1) if n not in taken)

    def _remove_idle(self, all_of_them: bool = False) -> None:
        now = time.monotonic()
        free = [slot for slot in self.state.slots.values() if not slot.holder] if all_of_them else self.state.idle(now)
        for slot in free:
            self.state.drop(slot.id, now)
            remove_placement_group(slot.group)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.look()
            for run in self.state.end_silent(now):
                for id in [id for id in self.granted if id.startswith(f"{run}/")]:
                    self._withdraw(id)
                self.empty_s = now
            self._match()
            self._remove_idle()
            for name in [name for name, until in self.orphans.items() if now > until]:  # no run has claimed them
                del self.orphans[name]
                remove_placement_group(get_placement_group(name))
            if not self.state.runs and not self.orphans and now - self.empty_s > EMPTY_S:
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class PoolClient:
    """A run's part: it asks for slots as `RayGroups` does, and keeps the heartbeat in a thread of its own."""

    def __init__(self, resource: str, info: RunInfo, say: Callable[[str], None] = lambda text: None) -> None:
        """Join the cluster's pool; the first run starts it. Raises UserError if the pool refuses the run.

        `say`: callback for log messages.
        """
        self.resource, self.info, self.say = resource, info, say
        self.name = f"slot-pool-{resource}"
        self.held: dict[str, PoolSlot] = {}
        self.released: set[str] = set()  # not confirmed by the pool yet
        self.view = PoolView(0, 1, 0, 0, 0, 0.0, "", 0.0, 0.0, 0.0)
        self.lock, self.closed = threading.RLock(), threading.Event()
        self.lost = ""  # why this run's slots are no longer its own
        self.handle = self._find()
        if refused := ray.get(self.handle.join.remote(info, []), timeout=REPLACE_S):
            raise UserError(f"the slot pool of this cluster: {refused}; see `rlhfless cluster`")
        self.thread = threading.Thread(target=self._beat, name="slot pool heartbeat", daemon=True)
        self.thread.start()

    # ---- what a LeaseManager needs ----------------------------------------------------------------------------------

    def ask(self, requests: list[LeaseRequest]) -> None:
        if requests:
            self._call("ask", [self._asked(one) for one in requests])

    def wait(self, request: LeaseRequest, until_s: float) -> Grant | None:
        """Return what was granted, or None at the time `until_s` (monotonic)."""
        while True:
            self._check()
            seconds = min(WAIT_S, max(0.0, until_s - time.monotonic()))
            request.from_s = time.time()
            slot = self._call("wait", self._asked(request), seconds)
            if slot is not None:
                self.held[slot.id] = slot
                self.handle.taken.remote(self.info.run, self._id(request))
                request.from_s = time.time()
                return Grant(slot.id, slot.node, slot.device)
            STOP.check()
            if time.monotonic() >= until_s:
                return None

    def withdraw(self, requests: list[LeaseRequest]) -> None:
        if requests:
            self._call("withdraw", self.info.run, [self._id(one) for one in requests])

    def release(self, ids: list[str]) -> None:
        """Give slots to the pool. If the call is lost, the next heartbeat repeats it."""
        for id in ids:
            self.held.pop(id, None)
        if ids:
            with self.lock:
                self.released |= set(ids)
                self.handle.release.remote(self.info.run, ids)

    def others_wait(self) -> bool:
        """Return whether another run is short of slots that this one has above its target, or another program waits for any."""
        return self.view.surplus > 0 or others_wait(self.resource, set())

    @property
    def surplus(self) -> int:
        return self.view.surplus

    def close(self) -> None:
        """Leave the pool."""
        if self.closed.is_set():
            return
        self.closed.set()
        self.thread.join(ANSWER_S)
        with contextlib.suppress(RayActorError, GetTimeoutError):  # the heartbeat's end says the same a little later
            ray.get(self.handle.leave.remote(self.info.run), timeout=ANSWER_S)

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

    def _check(self) -> None:
        if self.lost:
            raise RunError(self.lost)

    def _find(self) -> Any:
        options = {"name": self.name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        return ray.remote(SlotPool).options(**options, max_restarts=-1, num_cpus=0, max_concurrency=1000).remote(self.resource)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the pool. One that is lost is replaced, and learns again what this run holds."""
        end = time.monotonic() + REPLACE_S
        while True:
            try:
                return ray.get(getattr(self.handle, method).remote(*arguments), timeout=ANSWER_S)
            except (RayActorError, GetTimeoutError, UnknownRun) as error:
                self._check()
                if time.monotonic() > end:
                    raise RunError(f"the slot pool of this cluster did not answer within {REPLACE_S:.0f} s") from error
                self._rejoin(error)

    def _rejoin(self, error: Exception) -> None:
        """Find the pool again, and join it if it does not know this run."""
        with self.lock:
            if isinstance(error, GetTimeoutError):  # it hangs: Ray starts another one
                with contextlib.suppress(RayActorError, ValueError):
                    ray.kill(self.handle, no_restart=False)
            time.sleep(TICK_S)
            try:
                self.handle = self._find()
                ray.get(self.handle.beat.remote(self.info.run, []), timeout=ANSWER_S)
                return  # another thread was quicker
            except UnknownRun:
                pass
            except (RayActorError, GetTimeoutError):
                return  # the caller tries again
            held = list(self.held.values())
            with contextlib.suppress(RayActorError, GetTimeoutError):
                refused = ray.get(self.handle.join.remote(self.info, held, self.view.slot_s), timeout=ANSWER_S)
                known = ray.get(self.handle.beat.remote(self.info.run, []), timeout=ANSWER_S) if not refused else None
                if known is None or known.held < len(held):
                    self.lost = refused or (
                        f"this run did not answer for {SILENT_S:.0f} s, and its slots went to other runs of the cluster; --resume continues it"
                    )
                else:
                    self.say("the slot pool of the cluster was replaced; this run goes on with what it holds")

    def _beat(self) -> None:
        while not self.closed.wait(BEAT_S):
            with self.lock:
                released = list(self.released)
            try:
                self.view = ray.get(self.handle.beat.remote(self.info.run, released), timeout=ANSWER_S)
            except (RayActorError, GetTimeoutError, UnknownRun) as error:
                self._rejoin(error)
                if self.lost:
                    return
                continue
            with self.lock:
                self.released -= set(released)


def find_pools() -> list[Any]:
    """Return the handles of the pools on this cluster."""
    found = []
    for resource in ("cpu", "gpu"):
        with contextlib.suppress(ValueError):
            found.append(ray.get_actor(f"slot-pool-{resource}", namespace=NAMESPACE))
    return found


def _count(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
