"""Placement groups of a pool on GPU: few groups, devices of a node named together, and nothing held that Ray could use."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import NodeDiedError

from placement.market import Bid
from rlhfless_ray.functions import node_groups
from rlhfless_ray.functions.pool_core import PoolCore
from rlhfless_ray.functions.pool_messages import MESSAGES, PoolSlot, RunInfo, RunSlots, SlotRequest
from rlhfless_ray.functions.pool_state import IDLE_S
from rlhfless_ray.functions.pool_view import reply_to, view_of
from tests.functions.fake_ray import ActorOnThread, FakeRay


class Run:
    """A run on a shared pool whose clock the test sets."""

    def __init__(self, pool: PoolCore, name: str) -> None:
        self.pool, self.slots, self.asked = pool, RunSlots(name), 0
        pool.state.join(RunInfo(name), time.monotonic(), session=self.slots.session)

    def ask(self, count: int, **more: Any) -> list[str]:
        requests = [SlotRequest(f"{self.slots.run}/{self.asked + n}", self.slots.run, **more) for n in range(count)]
        self.asked += count
        self.slots.ask(requests)
        self.tell()
        return [id for request in requests for id in request.ids]

    def tell(self) -> None:
        self.pool.state.tell(self.slots.statement(), time.monotonic())
        for _ in range(3):  # Ray grants, the devices are named, and what is left is asked for
            for group in self.pool.groups.asked:
                group.look_s = 0.0
            self.pool.settle()
        self.slots.accept(reply_to(self.pool.state, self.slots.run, time.monotonic()))

    def end(self, ids: list[str]) -> None:
        self.slots.end(ids)
        self.tell()


def on(monkeypatch: pytest.MonkeyPatch, nodes: int, slots: int = 8) -> tuple[FakeRay, PoolCore]:
    ray = FakeRay({f"n{number:02}": (slots, {}) for number in range(nodes)})
    ray.install(monkeypatch)
    return ray, PoolCore("gpu", "rlhfless-pool-", is_shared=True, is_bundled=True)


def test_512_gpus_are_64_groups_whose_devices_64_processes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, pool = on(monkeypatch, 64)
    run, other = Run(pool, "x"), Run(pool, "y")
    ids = run.ask(512)
    assert len(run.slots.held) == 512 and ray.asked == ray.named == len(ray.alive()) == 64
    other.ask(200)
    assert ray.asked <= 64 + 25, "what waits in Ray's queue is groups of whole nodes too"
    run.end(ids[:200])
    other.tell()
    assert len(other.slots.held) == 200 and len(ray.alive()) == 64, "slots pass without Ray"


def test_what_other_programs_hold_is_not_asked_for_as_if_it_were_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, pool = on(monkeypatch, 3, 4)
    ray.busy = {"n00": {0, 1, 2}, "n01": {1}, "n02": {0, 1, 2, 3}}
    run = Run(pool, "x")
    run.ask(5)
    assert sorted(slot.place for slot in run.slots.held.values()) == [("n00", "3"), ("n01", "0"), ("n01", "2"), ("n01", "3")]
    assert ray.asked == 3 and len(pool.groups.asked) == 1, "the fifth waits in Ray's queue"
    ray.busy["n02"] = {0}
    run.tell()
    assert len(run.slots.held) == 5 and not pool.groups.asked


def test_a_group_that_ray_does_not_grant_is_divided_as_nodes_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray's head says is free lags: another program may have taken it."""
    ray, pool = on(monkeypatch, 2, 4)
    monkeypatch.setattr(node_groups, "free_slots", lambda resource: {"n00": 4, "n01": 0})
    ray.busy = {"n00": {0, 1}, "n01": {0, 1, 2, 3}}
    run = Run(pool, "x")
    run.ask(4)
    assert not run.slots.held and [group.count for group in pool.groups.asked] == [4]
    monkeypatch.setattr(node_groups, "free_slots", lambda resource: {node: len(ray.free(node)) for node in ray.nodes})
    run.tell()
    assert not run.slots.held, "Ray has a moment to grant it"
    pool.groups.asked[0].asked_s -= node_groups.PLAN_S
    run.tell()
    assert len(run.slots.held) == 2 and sum(group.count for group in pool.groups.asked) == 2


def test_a_group_goes_back_once_none_of_its_slots_is_used_and_used_groups_are_handed_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, pool = on(monkeypatch, 2, 4)
    run = Run(pool, "x")
    ids = run.ask(8)
    by_node = {node: [id for id in ids if run.slots.held[id].node == node] for node in ("n00", "n01")}
    run.end([*by_node["n00"], by_node["n01"][0]])
    again = run.ask(1)
    assert run.slots.held[again[0]].node == "n01", "n00 may go back as a whole"
    later_s = time.monotonic() + IDLE_S + 1
    run.end(by_node["n01"][1:2])
    pool.groups.give_back(pool.state, pool.state.idle(later_s), later_s)
    assert len(ray.alive()) == 1 and {slot.node for slot in pool.state.slots.values()} == {"n01"}
    assert len(pool.state.slots) == 4, "three are used, and Ray takes no part of a group"


def test_wide_requests_are_completed_with_idle_slots_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, pool = on(monkeypatch, 2, 4)
    ray.busy["n01"] = {0, 1, 2, 3}
    run, other = Run(pool, "x"), Run(pool, "y")
    [one, two] = run.ask(2)
    run.end([two])
    got = other.ask(1, width=3)
    assert {other.slots.held[id].place for id in got} == {("n00", "1"), ("n00", "2"), ("n00", "3")}
    assert [len(info["bundles"]) for info in ray.groups.values()] == [1, 1] and ray.groups["rlhfless-pool-2"]["bundles"] == {0: {"GPU": 2}}
    assert list(run.slots.held) == [one]


def test_a_run_gives_a_wide_engine_of_another_run_slots_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of two nodes would be of no use to it, and would be asked for again without an end."""
    _, pool = on(monkeypatch, 2, 4)
    run, other = Run(pool, "x"), Run(pool, "y")
    run.ask(8)
    other.slots.bid = Bid("y", (4,), (0.0,))
    assert other.ask(1, width=4) and not other.slots.held
    view = view_of(pool.state, "x", time.monotonic())
    nodes = {run.slots.held[lease].node for lease in view.surplus_leases}
    assert view.surplus == 4 and len(nodes) == 1 and len(view.surplus_leases) == 4
    run.end([view.surplus_leases[0]])
    after = view_of(pool.state, "x", time.monotonic())
    assert {run.slots.held[lease].node for lease in after.surplus_leases} == nodes
    run.end(list(after.surplus_leases))
    other.tell()
    assert len(other.slots.held) == 4


def test_devices_of_a_lost_process_of_names_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, pool = on(monkeypatch, 1, 2)
    name, failed = ray.name, []

    def fail(group: str, count: int) -> Any:
        if failed:
            return name(group, count)
        failed.append(group)
        future: Future[list[str]] = Future()
        future.set_exception(NodeDiedError("gone"))
        return future

    monkeypatch.setattr(node_groups, "name_devices", fail)
    run = Run(pool, "x")
    run.ask(2)
    run.tell()
    assert len(run.slots.held) == 2 and len(ray.alive()) == 1 and failed[0] not in ray.alive()


def test_a_run_that_comes_to_a_new_pool_brings_its_groups_and_their_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, pool = on(monkeypatch, 1, 4)
    run = Run(pool, "x")
    held = [run.slots.held[id] for id in run.ask(4)]
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool.PlacementGroup", lambda id: id)
    monkeypatch.setattr("rlhfless_ray.functions.slot_pool.ray", SimpleNamespace(PlacementGroupID=SimpleNamespace(from_hex=str)))
    for info in ray.groups.values():
        info["name"] = "rlhfless-pool-gpu-earlier-1"
    actor = ActorOnThread("gpu")
    try:
        actor.pool.orphans_until_s = time.monotonic() + 0.5
        kept: list[PoolSlot] = held[:1]
        assert actor.join.remote(RunInfo("x", folder="x"), "s", kept, None, 0.0, messages=MESSAGES).result(10)[0] == ""
        end_s = time.monotonic() + 10
        while len(actor.pool.state.slots) < 4:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert sorted(slot.place for slot in actor.pool.state.slots.values()) == [("n00", str(n)) for n in range(4)]
        assert actor.pool.state.held("x") == 1 and len(ray.alive()) == 1 and not actor.pool.orphans
    finally:
        actor.stop()
