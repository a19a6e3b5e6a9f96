"""One pool of slots for all runs of a cluster: a Ray actor that is found by name. `pool_client` is a run's part.

The first run starts the actor, and it ends after the last one has left. It holds the placement groups, so that a slot passes from run to
run without Ray's queue. They outlive the actor: if it dies Ray starts another one, which learns from the runs what they hold.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from placement.market import Bid, Clearing
from rlhfless_ray.functions.cluster_nodes import node_slots
from rlhfless_ray.functions.cost_record import load_costs, save_costs, today
from rlhfless_ray.functions.lease import LOOKING_SHARE
from rlhfless_ray.functions.pool_messages import (
    MESSAGES,
    OTHER_VERSION,
    SILENT_S,
    PoolSlot,
    PoolView,
    Reply,
    RunInfo,
    SlotRequest,
    Statement,
)
from rlhfless_ray.functions.pool_state import IDLE_S, PastRun, PoolState
from rlhfless_ray.functions.slot_source import (
    POOL_PREFIX,
    RESERVED_S,
    device_ids,
    device_named,
    is_reserving,
    others_wait,
    request_group,
    tasks_wait,
)

NAMESPACE = "rlhfless"
RESOURCES = ("cpu", "gpu")
TICK_S = 0.25  # interval at which the pool looks for silent runs and idle slots
LOOK_S = 1.0  # interval at which it looks at the cluster's nodes
POLL_S = (0.002, 0.05)  # shortest and longest pause between two looks at a placement group that Ray has not granted yet
LOOKS_PER_S = 200  # largest total number of such looks per second, because the pool answers no run during a look
NAMING_S = 20.0  # timeout for the name of a device: starting a process for it takes 5 s on busy cores
TASK_WAITS_S = 2.0  # a slot that no run takes for this long goes back to Ray if a task waits, whether or not the task could use it
SAVE_S = 10.0  # interval at which it stores what it has counted: if it dies, the hand-overs and free slots since then are not counted
EMPTY_S = 5.0  # a pool that no run has joined for so long ends


class UnknownRun(Exception):
    """The pool does not know the run: it was replaced, or the run was silent for too long."""


class SlotPool:
    """The actor. Its state is a `PoolState`; here are only the calls of Ray. All methods run on one event loop."""

    def __init__(self, resource: str) -> None:
        """`resource`: "cpu" (a slot is a core) or "gpu" (a slot is a device)."""
        now = time.monotonic()
        self.resource = resource
        self.state = PoolState(now)
        self.creating: dict[str, PlacementGroup] = {}  # placement groups that are not slots yet, by the request they were asked for
        self.arriving: set[str] = set()  # ids in `creating` whose group Ray has granted: they become slots even if the request is withdrawn
        self.counter, self.began_s, self.started_s, self.empty_s, self.looked_s = 0, time.time(), now, now, -float("inf")
        self.counted_from_s = self.began_s  # when the cluster's first pool began
        self.state.begin_day(today(), now)
        if (known := load_costs(resource)) is not None:
            self.counted_from_s, self.state.past = known["began_s"], known["past"]
            self.state.free_slot_s, self.state.handovers = known["free_slot_s"], known["handovers"]
        self.saved, self.saved_s = self.state.past, now
        self.look()
        # of an earlier pool: they are removed unless a run claims them
        self.orphans = {
            info["name"]: PlacementGroup(ray.PlacementGroupID.from_hex(id))
            for id, info in placement_group_table().items()
            if info["name"].startswith(f"{POOL_PREFIX}{resource}-") and info["state"] != "REMOVED"
        }
        self.orphans_until_s = now + SILENT_S
        self.idle_s, self.asked_s = IDLE_S, now  # how long free slots stay in the pool, and when to look again who waits for them
        self.keeps_warm = True  # whether slots of devices with parked processes stay longer
        self.changed = asyncio.Event()  # set for a moment when slots or requests have changed
        self.tasks: set[asyncio.Task[None]] = set()  # asyncio keeps weak references only
        # Devices of a node are named in turn, by one process. Otherwise Ray starts a process for each: 8 took 0.6 to 3 s instead of 0.1 s.
        self.naming: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.withdrawn: list[PlacementGroup] = []  # groups that are removed once no node reserves a slot for them
        self._begin(self._tick())

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

    async def join(
        self, info: RunInfo, session: str, held: list[PoolSlot], before: PoolView | None = None, unheard_s: float = 0.0, messages: int = 1
    ) -> tuple[str, list[str]]:
        """Add a run. Returns why it cannot join, or an empty string, and the ids of those of `held` that it has no more.

        `session`: of its statements. `held`: slots that it holds, as far as it knows. `before`: its last view of the pool if it joins
        again, which is `unheard_s` old. `messages`: version of its messages; runs of the first one do not say.
        """
        if messages != MESSAGES:
            return OTHER_VERSION, []
        self.look()
        now = time.monotonic()
        if refused := self.state.refusal(info, now, _is_alive, is_new=before is None):
            return refused, []
        there = [slot for slot in held if placement_group_table(slot.group)["state"] == "CREATED"]
        for slot in there:
            self.orphans.pop(slot.id, None)
        if before is not None and now - self.started_s < unheard_s:  # no pool counted what the run held since then
            more = unheard_s * len(there)
            before = replace(before, slot_s=before.slot_s + more, today_slot_s=before.today_slot_s + more)
        taken = self.state.join(info, now, [replace(slot) for slot in there], before, session)
        removed = [slot.id for slot in held if slot not in there and slot.node in self.state.nodes]
        return "", [*taken, *removed]

    async def leave(self, run: str) -> bool:
        """Remove a run. Returns whether it was the last one."""
        self.state.leave(run, time.monotonic())
        self._settle()
        return not self.state.runs

    async def end_if_empty(self) -> None:
        """End the pool and return its slots to Ray, unless a run has joined. The call fails if it ends."""
        while self.withdrawn:
            await asyncio.sleep(POLL_S[0])
        if self.state.runs:
            return
        for slot in list(self.state.slots.values()):
            self._remove(slot)
        for group in [*self.creating.values(), *self.orphans.values()]:
            remove_placement_group(group)
        self._save_costs()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        await asyncio.sleep(TICK_S)

    async def tell(self, statement: Statement, seconds: float = 0.0, surplus: int | None = None) -> Reply:
        """Apply a run's statement, and reply.

        The reply comes when the run has a slot that it does not know of, when its surplus differs from `surplus`, or after `seconds`.
        """
        run, now = statement.run, self._known(statement.run, statement.session)
        self.state.tell(statement, now)
        self._settle()
        end_s = now + seconds
        while True:
            reply = self.state.reply(run, now)
            if reply.granted or surplus not in (None, reply.view.surplus) or now >= end_s:
                return reply
            await self._change(end_s - now)
            now = self._known(run, statement.session)

    async def arrival(self, id: str, seconds: float) -> None:
        """Return when a request is granted or ended, at the latest after `seconds`. This changes nothing."""
        end_s = time.monotonic() + seconds
        while id in self.state.requests and (left_s := end_s - time.monotonic()) > 0:
            await self._change(left_s)

    async def what_if(self, bid: Bid) -> Clearing:
        """Return the division of the pool if this run bid so."""
        if bid.run not in self.state.runs:
            raise UnknownRun(bid.run)
        return self.state.what_if(bid)

    async def status(self) -> dict[str, Any]:
        """Return everything that `rlhfless cluster` shows."""
        self.look()
        now, state = time.monotonic(), self.state
        waiting = state.waiting(now)
        runs = [
            {
                "name": name,
                "folder": run.info.folder,
                "share": run.info.share,
                "priority": run.info.weight,
                "since_s": now - run.joined_s,
                "silent_s": now - run.heard_s,
                "slots_by_node": dict(Counter(slot.node for slot in state.slots.values() if slot.holder == name)),
                "waits": waiting.get(name, 0),
                "money": run.slot_s / 3600 * run.info.price,
                "money_today": run.today_slot_s / 3600 * run.info.price,
                **asdict(state.view(name, now)),
            }
            for name, run in sorted(state.runs.items())
        ]
        return {
            "messages": MESSAGES,
            "resource": self.resource,
            "slots": state.size,
            "nodes": {id: count for id, (count, _) in state.nodes.items()},
            "held": sum(slot.holder != "" for slot in state.slots.values()),
            "free_slot_s": state.free_slot_s,
            "handovers": state.handovers,
            "began_s": self.counted_from_s,
            "runs": runs,
            "past": [describe_past(past, now) for past in state.past],
        }

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, work: Any) -> None:
        self.tasks.add(task := asyncio.get_event_loop().create_task(work))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forget a task. If it failed, the process ends, and Ray starts another one: a pool without it would grant nothing more."""
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            os._exit(1)

    def _known(self, run: str, session: str) -> float:
        """Return the current time. Raises UnknownRun if the run is not in the pool, or joined it again after this session."""
        if run not in self.state.runs or self.state.runs[run].session != session:
            raise UnknownRun(run)
        return time.monotonic()

    async def _change(self, seconds: float) -> None:
        """Wait until slots or requests change, at most for so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), seconds)

    def _settle(self) -> None:
        """Hand free slots to those who wait, ask Ray for a slot for each of the others, and wake those who watch."""
        now = time.monotonic()
        for slot in self.state.match(now):
            slot.granted_s = time.time()
        # after `match`: what one run does not take, or avoids, another may want
        for slot in self.state.idle(now, self.idle_s, keeps_warm=self.keeps_warm):
            self._remove(slot)
        for id in set(self.creating) - set(self.state.requests) - self.arriving:
            self.withdrawn.append(group := self.creating.pop(id))
            self._begin(self._withdraw(group))
        for request in self.state.requests.values():
            if request.id not in self.creating and not self.state.has_device(request):
                self._create(request)
        if self.state.past is not self.saved or now - self.saved_s > SAVE_S:
            self._save_costs()
        self.changed.set()
        self.changed.clear()

    def _save_costs(self) -> None:
        self.saved, self.saved_s = self.state.past, time.monotonic()
        save_costs(self.resource, self.state, self.counted_from_s, self.saved_s)

    def _remove(self, slot: PoolSlot) -> None:
        self.state.drop(slot.id, time.monotonic())
        remove_placement_group(slot.group)

    def _create(self, request: SlotRequest) -> None:
        self.counter += 1
        name = f"{POOL_PREFIX}{self.resource}-{int(1e6 * self.began_s):x}-{self.counter}"
        avoided = self.state.runs[request.run].avoids
        node = request.node or (f"!in({','.join(sorted(avoided))})" if avoided else "")
        group = self.creating[request.id] = request_group(self.resource, name, node, request.labels, lifetime="detached")
        self._begin(self._receive(request, name, group))

    async def _receive(self, request: SlotRequest, name: str, group: PlacementGroup) -> None:
        """Wait until Ray grants a group, and make it a slot of the pool.

        A granted group is not removed before its device is named: Ray 2.60 never answers a task of a removed one (measured), and devices
        of a node are named in turn. Requests that were withdrawn after 5 s then grew a queue in which each held up the next one.
        """
        pause, longest = POLL_S
        while self.creating.get(request.id) is group:
            if (table := placement_group_table(group))["state"] == "CREATED":
                break
            await asyncio.sleep(pause)
            pause = max(min(longest, 1.5 * pause), len(self.creating) / LOOKS_PER_S)
        else:
            return  # withdrawn
        self.arriving.add(request.id)
        node = table["bundles_to_node_id"][0]
        try:
            device = await self._device(group, node) if self.resource == "gpu" else self._number(node)
        except (RayError, TimeoutError):  # the node was lost before it could name the device, or its process hangs: ask for another slot
            remove_placement_group(group)
        else:
            self.state.put(PoolSlot(name, node, device, group), time.monotonic())
        self.arriving.discard(request.id)
        del self.creating[request.id]
        self._settle()

    async def _withdraw(self, group: PlacementGroup) -> None:
        end_s = time.monotonic() + RESERVED_S
        while is_reserving(placement_group_table(group)) and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S[0])
        remove_placement_group(group)
        self.withdrawn.remove(group)

    async def _device(self, group: PlacementGroup, node: str) -> int | str:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        async with self.naming[node]:
            asked = device_ids.options(scheduling_strategy=strategy, max_retries=0).remote()  # it ends with its group
            ids = await asyncio.wait_for(asked, NAMING_S)  # others wait for their turn
        return device_named(ids[0])

    def _number(self, node: str) -> int:
        taken = {slot.device for slot in self.state.slots.values() if slot.node == node}
        first = self.state.nodes[node][0] if self.orphans and node in self.state.nodes else 0  # those of an earlier pool are below it
        return next(n for n in range(first, first + len(taken) + 1) if n not in taken)

    def _look_at_others(self) -> None:
        """Look whether other programs wait in Ray's queue. If so, unused slots are returned to it at once or soon."""
        if (now := time.monotonic()) >= self.asked_s:
            if others_wait(self.resource, set()):
                self.idle_s, self.keeps_warm = -1.0, False
            else:
                has_free = any(not slot.holder for slot in self.state.slots.values())
                self.keeps_warm = not (has_free and tasks_wait(self.resource))
                self.idle_s = IDLE_S if self.keeps_warm else TASK_WAITS_S
            self.asked_s = now + max(LOOK_S, (time.monotonic() - now) / LOOKING_SHARE)

    async def _tick(self) -> None:
        now = time.monotonic()
        while True:
            before = now
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.state.was_held_up(max(0.0, now - before - TICK_S), now)
            self.state.begin_day(today(), now)
            self.look()
            self._look_at_others()
            for info in self.state.silent(now):
                if info.job:
                    _end_processes(info.job)
                self.state.leave(info.run, now)
            self._settle()
            if self.orphans and now > self.orphans_until_s:
                for group in self.orphans.values():
                    remove_placement_group(group)
                self.orphans.clear()
            if self.state.runs or self.orphans:
                self.empty_s = now
            elif now - self.empty_s > EMPTY_S:
                await self.end_if_empty()


def describe_past(past: PastRun, now_s: float) -> dict[str, Any]:
    """Return what `rlhfless cluster` shows of a run that has ended."""
    return {
        "name": past.info.run,
        "folder": past.info.folder,
        "lasted_s": past.ended_s - past.joined_s,
        "ended_s_ago": now_s - past.ended_s,
        "slot_s": past.slot_s,
        "today_slot_s": past.today_slot_s,
        "money": past.slot_s / 3600 * past.info.price,
        "money_today": past.today_slot_s / 3600 * past.info.price,
    }


def _is_alive(job: str) -> bool:
    """Return whether the driver of a job is connected to Ray."""
    import ray._private.state as state

    return any(known["JobID"] == job and not known["IsDead"] for known in state.jobs())


def _end_processes(job: str) -> None:
    """Kill the processes of a run whose driver does not answer: they may hold memory of the slots that go to other runs."""
    import ray._private.state as state

    for actor in state.actors(job_id=ray.JobID.from_hex(job)).values():
        if actor["State"] == "ALIVE" and actor["ActorClassName"] != SlotPool.__name__:
            on_its_node = NodeAffinitySchedulingStrategy(actor["Address"]["NodeID"], soft=False)
            _kill.options(scheduling_strategy=on_its_node).remote(actor["Pid"])


@ray.remote(num_cpus=0, max_retries=0)
def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def ended_pools() -> list[dict[str, Any]]:
    """Return what `SlotPool.status` would of the pools that have ended with their last run."""
    found = []
    for resource in RESOURCES:
        if (known := load_costs(resource)) is not None:
            nodes, past = node_slots(resource), [describe_past(one, time.monotonic()) for one in known["past"]]
            found.append({**known, "resource": resource, "slots": sum(nodes.values()), "nodes": nodes, "held": 0, "runs": [], "past": past})
    return found


def find_pools() -> list[Any]:
    """Return the handles of the pools on this cluster."""
    found = []
    for resource in RESOURCES:
        with suppress(ValueError):
            found.append(ray.get_actor(f"slot-pool-{resource}", namespace=NAMESPACE))
    return found
