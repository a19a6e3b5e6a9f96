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
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.market import Bid, Clearing
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.cluster_nodes import node_slots
from rlhfless_ray.functions.cost_record import load_costs, save_costs, today
from rlhfless_ray.functions.lease import LOOKING_SHARE
from rlhfless_ray.functions.node_groups import POLL_S, POOL_PREFIX, NodeGroup, others_wait, tasks_wait
from rlhfless_ray.functions.pool_core import LOOK_S, PoolCore
from rlhfless_ray.functions.pool_messages import MESSAGES, OTHER_VERSION, SILENT_S, PoolSlot, PoolView, Reply, RunInfo, Statement
from rlhfless_ray.functions.pool_runs import PastRun
from rlhfless_ray.functions.pool_state import IDLE_S
from rlhfless_ray.functions.pool_view import reply_to, view_of

NAMESPACE = "rlhfless"
RESOURCES = ("cpu", "gpu")
TICK_S = 0.25  # interval at which the pool looks for silent runs and idle slots
TASK_WAITS_S = 2.0  # a slot that no run takes for this long goes back to Ray if a task waits, whether or not the task could use it
SAVE_S = 10.0  # interval at which it stores what it has counted: if it dies, the hand-overs and free slots since then are not counted
EMPTY_S = 5.0  # a pool that no run has joined for so long ends


class UnknownRun(Exception):
    """The pool does not know the run: it was replaced, or the run was silent for too long."""


class SlotPool:
    """The actor around a `PoolCore`. All methods run on one event loop."""

    def __init__(self, resource: str) -> None:
        """`resource`: "cpu" (a slot is a core) or "gpu" (a slot is a device)."""
        now = time.monotonic()
        self.resource = resource
        self.began_s, self.started_s, self.empty_s = time.time(), now, now
        prefix = f"{POOL_PREFIX}{resource}-{int(1e6 * self.began_s):x}-"
        self.pool = PoolCore(resource, prefix, is_shared=True, is_bundled=resource == "gpu")
        self.state, self.groups = self.pool.state, self.pool.groups
        self.counted_from_s = self.began_s  # when the cluster's first pool began
        self.state.begin_day(today(), now)
        if (known := load_costs(resource)) is not None:
            self.counted_from_s, self.state.past = known["began_s"], known["past"]
            self.state.free_slot_s, self.state.handovers = known["free_slot_s"], known["handovers"]
        self.saved, self.saved_s = self.state.past, now
        self.pool.look()
        # of an earlier pool: they are removed unless a run claims a slot of them
        self.orphans = {
            PlacementGroup(ray.PlacementGroupID.from_hex(id)): False
            for id, info in placement_group_table().items()
            if info["name"].startswith(f"{POOL_PREFIX}{resource}-") and info["state"] != "REMOVED"
        }
        self.orphans_until_s = now + SILENT_S
        self.groups.first_number = self._first_number
        self.asked_s = now  # when to look again who waits for free slots
        self.changed = asyncio.Event()  # set for a moment when slots or requests have changed
        self.tasks: set[asyncio.Task[None]] = set()  # asyncio keeps weak references only
        self._begin(self._tick())
        self._begin(self._advance())

    def _first_number(self, node: str) -> int:
        """Return the first number of a node's slots: those of an earlier pool are below it."""
        return self.state.nodes[node][0] if not all(self.orphans.values()) and node in self.state.nodes else 0

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
        self.pool.look()
        now = time.monotonic()
        if refused := self.state.refusal(info, now, _is_alive, is_new=before is None):
            return refused, []
        there = [slot for slot in held if placement_group_table(slot.group)["state"] == "CREATED"]
        self.orphans |= dict.fromkeys(self.orphans.keys() & {slot.group for slot in there}, True)
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
        while self.groups.leaving:
            await asyncio.sleep(POLL_S[0])
        if self.state.runs:
            return
        self.groups.remove_all(self.state, time.monotonic())
        for group in self.orphans:
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
            reply = reply_to(self.state, run, now)
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

    async def status(self) -> JsonObject:
        """Return everything that `rlhfless cluster` shows."""
        self.pool.look()
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
                **asdict(view_of(state, name, now)),
            }
            for name, run in sorted(state.runs.items())
        ]
        return {
            "messages": MESSAGES,
            "resource": self.resource,
            "slots": state.size,
            "nodes": {id: count for id, (count, _) in state.nodes.items()},
            "labels": {id: {k: v for k, v in labels.items() if not k.startswith("ray.io/")} for id, (_, labels) in state.nodes.items()},
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
        """Hand free slots to those who wait, ask Ray for what they lack, and wake those who watch."""
        self.pool.settle()
        if self.state.past is not self.saved or time.monotonic() - self.saved_s > SAVE_S:
            self._save_costs()
        self.changed.set()
        self.changed.clear()

    async def _advance(self) -> None:
        """Look how far the groups are that were asked for or withdrawn."""
        while True:
            await asyncio.sleep(self.groups.pause_s(time.monotonic()))
            slots, naming = len(self.state.slots), self.groups.is_naming
            self.groups.advance(self.state, time.monotonic())
            if slots != len(self.state.slots) or naming != self.groups.is_naming:
                self._settle()

    def _save_costs(self) -> None:
        self.saved, self.saved_s = self.state.past, time.monotonic()
        save_costs(self.resource, self.state, self.counted_from_s, self.saved_s)

    def _look_at_others(self) -> None:
        """Look whether other programs wait in Ray's queue. If so, unused slots are returned to it at once or soon."""
        if (now := time.monotonic()) >= self.asked_s:
            if others_wait(self.resource, POOL_PREFIX):
                self.pool.idle_s, self.pool.keeps_warm = -1.0, False
            else:
                has_free = any(not slot.holder for slot in self.state.slots.values())
                self.pool.keeps_warm = not (has_free and tasks_wait(self.resource))
                self.pool.idle_s = IDLE_S if self.pool.keeps_warm else TASK_WAITS_S
            self.asked_s = now + max(LOOK_S, (time.monotonic() - now) / LOOKING_SHARE)

    async def _tick(self) -> None:
        now = time.monotonic()
        while True:
            before = now
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.state.was_held_up(max(0.0, now - before - TICK_S), now)
            self.state.begin_day(today(), now)
            self._look_at_others()
            for info in self.state.silent(now):
                if info.job:
                    _end_processes(info.job)
                self.state.leave(info.run, now)
            self._settle()
            if self.orphans and now > self.orphans_until_s:
                self._end_orphans(now)
            if self.state.runs or self.orphans:
                self.empty_s = now
            elif now - self.empty_s > EMPTY_S:
                await self.end_if_empty()

    def _end_orphans(self, now: float) -> None:
        """Remove the groups of an earlier pool of which no run has claimed a slot, and name all devices of the others."""
        for group, is_claimed in self.orphans.items():
            bundles = placement_group_table(group)["bundles"] if is_claimed and self.resource == "gpu" else {}
            count = int(sum(bundle.get("GPU", 0) for bundle in bundles.values()))
            known = [slot for slot in self.state.slots.values() if slot.group == group]
            if not is_claimed:
                remove_placement_group(group)
            elif 0 < len(known) < count:
                name = f"{known[0].id.rsplit('.', 1)[0]}.again"
                self.groups.asked.append(NodeGroup(name, group, (known[0].node, ()), count, now, node=known[0].node))
        self.orphans.clear()


def describe_past(past: PastRun, now_s: float) -> JsonObject:
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


def ended_pools() -> list[JsonObject]:
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
