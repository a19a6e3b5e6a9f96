"""Run calls of a step's graph on worker groups, several at once where there are slots for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from placement.calls import StepGraph, with_needs
from rlhfless_ray.common.deadlines import wait_any
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.learn.worker_group import WorkerGroup


@dataclass(frozen=True)
class GroupCall:
    """A call on a worker group. `slots`: leases for all ranks, if so many are free. `start`: starts it under these leases."""

    worker_group: WorkerGroup
    slots: int
    start: Callable[[], Pending[Any]]


@dataclass(frozen=True)
class CallTime:
    """When a call ran, on the driver's monotonic clock. `slots`: leases of all ranks. `lost`: whether ranks were lost meanwhile."""

    start_s: float
    end_s: float
    slots: int
    lost: bool = False

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class CallRunner:
    """Starts each call once the calls that it needs have ended and its worker group has leases.

    Calls of worker groups for which there are not enough slots take turns. A rank that is lost is replaced while the other worker groups
    work. If there is no slot for it, the driver waits for their calls and takes their leases.
    """

    def __init__(self, groups: ColocatedGroups, graph: StepGraph, wait: Callable[..., list[Any]] = wait_any) -> None:
        """`graph`: of all calls that may be started."""
        self.groups, self.graph, self.wait = groups, graph, wait
        self.order = graph  # what each call of now waits for
        self.calls: Mapping[str, GroupCall] = {}
        self.running: dict[str, Pending[Any]] = {}
        self.started_s: dict[str, tuple[float, int]] = {}  # call → time of its start, and restarts of its worker group before
        self.results: dict[str, Any] = {}
        self.times: dict[str, CallTime] = {}  # of the calls that have ended

    def start(self, calls: Mapping[str, GroupCall], planned: StepGraph) -> None:
        """Start all of these calls, by name. Waits for calls that others need, or whose slots they need, but not for the last ones.

        `planned`: a plan's graph, in which a call may need further ones, because they take turns.
        """
        self.calls, self.running, self.results, self.times = calls, {}, {}, {}
        self.order = with_needs(self.graph, {call.name: call.needs for call in planned.calls})
        if not self.groups.alone:
            self.groups.park_others([call.worker_group for call in calls.values()])
        while len(self.running) + len(self.results) < len(calls):
            started = next((name for name in self._ready() if self._get_leases(name)), None)
            if started is None:
                self._end_first()
            else:
                self.started_s[started] = time.monotonic(), calls[started].worker_group.recovery.restarts
                self.running[started] = calls[started].start()
        if not self.groups.alone:
            self.groups.release()

    def _ready(self, *begun: str) -> list[str]:
        """Return the calls that may start now, also after these have begun."""
        ended = {call.name for call in self.order.calls} - self.calls.keys() | self.results.keys()
        return [call.name for call in self.order.ready(ended, ended | self.running.keys() | set(begun))]

    def finish(self) -> dict[str, Any]:
        """Wait for all calls. Returns their results by name."""
        while self.running:
            self._end_first()
        return self.results

    @property
    def broker(self) -> SlotBroker:
        return self.groups.context.broker

    def is_ready(self) -> bool:
        return all(pending.is_ready() for pending in self.running.values())

    def has_failed(self) -> bool:
        return any(pending.has_failed() for pending in self.running.values())

    # ---- leases -----------------------------------------------------------------------------------------------

    def _get_leases(self, name: str) -> bool:
        """Give a call's worker group leases. Returns whether it has some; while no call runs, this waits for them."""
        call, groups = self.calls[name], self.groups
        worker_group = call.worker_group
        if worker_group.working:
            held = sum(len(instance.leases) for instance in worker_group.by_rank)
            if groups.alone or held == call.slots or self.broker.leases.resource == "gpu":
                return True
            self.broker.put(worker_group.park())
        worker_group.slots = call.slots
        if not self.running:
            groups.park_others([worker_group])
        elif not self._can_get(worker_group):
            groups.park_others([self.calls[other].worker_group for other in self.running])
            if not self._can_get(worker_group):
                return False
        self.broker.staff(worker_group)
        groups.release(keep=sum(self.calls[other].slots for other in self._ready(name)))
        return True

    def _can_get(self, worker_group: WorkerGroup) -> bool:
        """Return whether free leases are enough for every rank. Leases free slots if these make it so, but none of a shared pool.

        Such a pool grants slots for bids, and beside an update that engines work at, free slots are theirs.
        """
        if worker_group.fits(list(self.broker.free)):
            return True
        if self.groups.shares_slots or self.groups.context.autoscaler.criteria.bids is not None or not worker_group.by_rank:
            return False
        self.broker.put(worker_group.scheduler.lease_free(worker_group.by_rank, list(self.broker.free)))
        return worker_group.fits(list(self.broker.free))

    # ---- ends -------------------------------------------------------------------------------------------------

    def _end_first(self) -> None:
        """Take the result of the running call that ends or fails first."""
        self.end(self._wait_for_one(list(self.running)) if len(self.running) > 1 else next(iter(self.running)))

    def _wait_for_one(self, names: Sequence[str]) -> str:
        """Return the first of these running calls that has ended or failed. Raises RunError past their deadline."""
        deadline_s = min(self.calls[name].worker_group.deadline_s for name in names)
        end_s = time.monotonic() + deadline_s
        while not (ended := [name for name in names if self.running[name].is_ready()]):
            refs = [ref for name in names for ref in self.calls[name].worker_group.pending(list(self.running[name].refs))]
            self.wait(refs, end_s - time.monotonic(), f"the {' and the '.join(names)}", of_s=deadline_s)
        return ended[0]

    def end(self, name: str) -> Any:
        """Take the result of a call, once it has ended, and return it. Lost ranks are replaced, see the class."""
        if name not in self.running:
            return self.results[name]
        worker_group, (start_s, restarts) = self.calls[name].worker_group, self.started_s[name]
        with self.broker.lending(lambda: self._end_others(name)) if len(self.running) > 1 else nullcontext():
            self.results[name] = self.running[name].result()
        self.running.pop(name, None)
        slots, lost = sum(len(i.leases) for i in worker_group.by_rank), worker_group.recovery.restarts > restarts
        self.times[name] = CallTime(start_s, time.monotonic() if lost else start_s + worker_group.call_s, slots, lost)
        return self.results[name]

    def _end_others(self, name: str) -> list[Lease]:
        """Wait for the other calls. Returns the leases of their worker groups, except for those that have lost ranks too."""
        leases: list[Lease] = []
        for other in [other for other in self.running if other != name]:
            self._wait_for_one([other])
            if not self.running[other].has_failed():
                self.end(other)
                leases += self.calls[other].worker_group.park()
        return leases
