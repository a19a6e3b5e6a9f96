"""A rollout that grows when another run lets a slot go, and shrinks when another run waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhfless_ray.functions.pool_messages import SlotRequest
from rlhfless_ray.rollout import shared_slots as module
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.shared_slots import GIVEN, SharedSlots


class Leases:
    """What `SharedSlots` needs of a LeaseManager."""

    def __init__(self) -> None:
        self.pending: dict[str, SlotRequest] = {}
        self.granted = self.withdrawn = self.asked = 0

    def ask(self, count: int, nodes: Any = None, labels: Any = None, width: int = 1) -> list[SlotRequest]:
        requests = [SlotRequest(f"r{self.asked + n}", width=width) for n in range(count)]
        self.asked += len(requests)
        self.pending |= {request.id: request for request in requests}
        return requests

    def withdraw(self, requests: list[SlotRequest]) -> None:
        self.withdrawn += sum(self.pending.pop(one.id, None) is not None for one in requests)

    def collect(self, requests: list[SlotRequest], kind: str, wait_s: float) -> list[str]:
        self.granted += 1
        return ["lease"] * self.pending.pop(requests[0].id).width

    def without_lost(self, leases: list[str]) -> list[str]:
        return leases


class Engine(int):
    """An engine and its number. Its lease has the same number."""

    @property
    def leases(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(id=f"lease-{int(self)}")]


class Rollout:
    """What it needs of a LiveRollout: engines 0, 1, … with so many requests each."""

    def __init__(self, owed: list[int]) -> None:
        self.stopping, self.owed, self.tail, self.start_s = False, owed, 100.0, 15.0
        working = [Engine(n) for n in range(len(owed))]
        self.pool = SimpleNamespace(kind="rollout", labels={}, width=1, working=working, count_warm=self.count_warm)
        self.warm: set[str] = set()  # devices of parked engines
        self.calls = SimpleNamespace(number=lambda instance: instance, available=lambda: self.pool.working)
        self.token_log = SimpleNamespace(owed=lambda number: range(self.owed[number]))
        self.migrations = SimpleNamespace(leaving={})
        self.result = RolloutResult()
        self.evacuated: list[tuple[list[int], list[int], str]] = []

    def join(self, leases: list[str]) -> None:
        self.pool.working.append(Engine(len(self.owed)))
        self.owed.append(0)

    def count_warm(self, width: int, places: Any) -> int:
        return len(self.warm if places is None else self.warm & set(places))

    def tail_s(self) -> float:
        return self.tail

    def remaining(self) -> tuple[list[int], list[int]]:
        return self.owed, self.owed

    def evacuate(self, leaving: list[int], stay: list[int], reason: str) -> None:
        self.evacuated.append((leaving, stay, reason))


@pytest.fixture
def shared(monkeypatch) -> SharedSlots:
    ready: set[str] = set()
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([ref for ref in refs if ref in ready], []))
    wanted = ("lease-0", "lease-1", "lease-2")
    view = SimpleNamespace(surplus=0, surplus_leases=wanted, warm_free=())
    source = SimpleNamespace(view=view, arrival=lambda request: request.id, ready=ready)
    return SharedSlots(Leases(), source, max_engines=3, start_s=0.1, renew=lambda *rest: 3)  # type: ignore[arg-type]


def test_a_granted_slot_becomes_an_engine(shared):
    rollout = shared.rollout = Rollout([4, 4])
    shared.poll()
    assert shared.refs() == ["r0"] and rollout.pool.working == [0, 1]
    shared.source.ready.add("r0")
    shared.poll()
    assert rollout.pool.working == [0, 1, 2]
    assert shared.refs() == [] and not shared.leases.pending  # no fourth engine would have work
    assert rollout.result.metrics()["shared/slots_taken"] == 1


def test_no_slot_is_requested_if_too_little_work_is_left(shared):
    rollout = shared.rollout = Rollout([4, 4])
    shared.poll()
    rollout.tail = 20.0  # a cold engine takes 15 s
    shared.poll()
    assert shared.refs() == [] and shared.leases.withdrawn == 1
    rollout.warm.add("a")
    shared.poll()
    assert shared.refs() == [], "another run holds the device of the parked engine"
    shared.source.view.warm_free = ("a", "b")
    shared.poll()
    assert len(shared.refs()) == 1
    rollout.stopping = True
    shared.poll()
    assert shared.refs() == [] and not shared.leases.pending


def test_a_slot_that_the_tail_has_no_work_for_is_not_requested_again(shared):
    shared.rollout = Rollout([1])  # another engine has just given its slot back
    shared.renew = lambda left, *rest: sum(left)
    shared.poll()
    assert shared.refs() == []


def test_a_request_for_nodes_that_are_all_gone_is_made_again_for_those_that_are_left(shared):
    rollout = shared.rollout = Rollout([4, 4])
    shared.poll()
    rollout.pool.labels = {"ray.io/node-id": "home"}
    shared.leases.ask = lambda count, labels, width: [SlotRequest(f"home-{n}", labels=labels) for n in range(count)]
    shared.poll()
    assert shared.refs() == ["home-0"] and shared.leases.withdrawn == 1


def test_the_bid_is_renewed_every_second(shared, monkeypatch):
    renewed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(shared, "renew", lambda *rest: renewed.append(rest) or 2)
    rollout = shared.rollout = Rollout([4, 4, 4])
    rollout.warm, shared.source.view.warm_free = {"a", "b"}, ("b",)
    shared.poll()
    assert not renewed
    shared.renew_at_s -= module.RENEW_S
    for _ in range(3):
        shared.poll()
    assert renewed == [([4, 4, 4], [4, 4, 4], 3, 1)] and shared.max_engines == 2


def test_the_engine_with_the_least_work_leaves_for_another_run_and_one_always_stays(shared):
    rollout = shared.rollout = Rollout([4, 1, 3])
    shared.source.view.surplus = 1
    shared.poll()
    assert rollout.evacuated == [([1], [0, 2], GIVEN.reason)] and shared.refs() == []
    rollout.pool.working.remove(1)
    shared.source.view.surplus = 0
    shared.poll()
    assert not shared.leaving and len(rollout.evacuated) == 1
    assert rollout.result.metrics({"shared/slots_given": 2})["shared/slots_given"] == 3
    shared.look_again_s, shared.source.view.surplus = 0.0, 5
    shared.poll()
    assert rollout.evacuated[-1][:2] == ([2], [0])


def test_an_engine_leaves_where_the_other_run_can_use_its_slot(shared):
    rollout = shared.rollout = Rollout([4, 1, 3])
    shared.source.view.surplus, shared.source.view.surplus_leases = 1, ("lease-2",)
    shared.poll()
    assert rollout.evacuated == [([2], [0, 1], GIVEN.reason)]
    rollout.pool.working.pop()
    shared.look_again_s = 0.0
    shared.poll()
    assert not shared.leaving and len(rollout.result.decisions) == 1, "none is there any more"


def test_a_request_that_a_worker_group_withdrew_is_forgotten(shared):
    rollout = shared.rollout = Rollout([4, 4])
    shared.poll()
    shared.leases.pending.clear()
    shared.source.ready.add("r0")
    rollout.tail = 0.0
    shared.poll()
    assert rollout.pool.working == [0, 1] and shared.leases.granted == 0


def test_several_wide_engines_are_asked_for_at_once_and_each_joins_with_all_its_slots(shared):
    shared.max_engines = 4
    shared.renew = lambda *rest: shared.max_engines
    rollout = shared.rollout = Rollout([4, 4])
    rollout.pool.width = 2
    shared.poll()
    assert shared.refs() == ["r0", "r1"] and [request.width for request in shared.leases.pending.values()] == [2, 2]
    shared.source.ready |= {"r0", "r1"}
    shared.poll()
    assert rollout.pool.working == [0, 1, 2, 3] and shared.refs() == []
    assert rollout.result.metrics()["shared/slots_taken"] == 4
    shared.max_engines = 5
    shared.poll()
    shared.max_engines = 4  # less is left to do than was expected
    shared.poll()
    assert shared.refs() == [] and shared.leases.withdrawn == 1
    shared.source.view.surplus, shared.source.view.surplus_leases = 3, ("lease-0", "lease-1", "lease-3")
    shared.poll()
    assert rollout.evacuated[-1][0] == [0, 3], "three slots of other runs are two engines of it, of which the idle one is sure"
    rollout.pool.working = [1, 2]
    shared.source.view.surplus = 0
    shared.poll()
    assert rollout.result.metrics({"shared/slots_given": 0})["shared/slots_given"] == 4
