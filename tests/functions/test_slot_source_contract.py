"""What every `SlotSource` does, whether the pool is in this process or an actor. A new source is added to `SOURCES`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhfless_ray.functions.pool_messages import PoolSlot, SlotRequest
from rlhfless_ray.functions.private_slots import PrivateSlots
from rlhfless_ray.functions.slot_source import SlotSource
from tests.functions.fake_ray import ActorOnThread, FakeRay, client_on

NODES = {"a": (4, {"zone": "1"}), "b": (2, {"zone": "2"})}
WAIT_S = 10.0  # far more than any of this takes


def private(resource: str) -> Iterator[SlotSource]:
    source = PrivateSlots(resource, "x")
    yield source
    source.close()


def alone(resource: str) -> Iterator[SlotSource]:
    source = PrivateSlots(resource, "x", is_alone=True)
    yield source
    source.close()


def client(resource: str) -> Iterator[SlotSource]:
    actor = ActorOnThread(resource)
    source = client_on(actor, "x")
    yield source
    source.close()
    actor.stop()


SOURCES: list[Callable[[str], Iterator[SlotSource]]] = [private, alone, client]


@pytest.fixture(params=["cpu", "gpu"])
def cluster(request: Any, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(NODES, request.param)
    fake.install(monkeypatch)
    return fake


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__)
def source(request: Any, cluster: FakeRay) -> Iterator[SlotSource]:
    yield from request.param(cluster.resource)
    assert not cluster.alive(), "a source that is closed leaves no group"


def get(source: SlotSource, *requests: SlotRequest, seconds: float = WAIT_S) -> list[PoolSlot]:
    source.ask(requests)
    return [slot for request in requests for slot in source.wait(request, time.monotonic() + seconds)]


def ask(count: int, start: int = 0) -> list[SlotRequest]:
    return [SlotRequest(f"r{start + number}") for number in range(count)]


def test_slots_are_granted_once_each_under_the_ids_of_their_requests(source: SlotSource, cluster: FakeRay) -> None:
    slots = get(source, *ask(6))
    assert [slot.request for slot in slots] == [f"r{number}" for number in range(6)]
    assert sorted(slot.place for slot in slots) == [(node, str(n)) for node, (count, _) in NODES.items() for n in range(count)]
    assert source.look().held == 6
    source.ask(ask(6))  # a call may be repeated
    assert source.look().held == 6


def test_what_is_not_granted_in_time_can_be_withdrawn_and_leaves_nothing(source: SlotSource, cluster: FakeRay) -> None:
    get(source, *ask(6))
    groups, [late] = len(cluster.alive()), ask(1, 6)
    assert get(source, late, seconds=0.05) == []
    source.release([late.id])
    assert source.look().held == 6 and len(cluster.alive()) == groups
    source.release(["r1"])
    assert len(get(source, *ask(1, 7))) == 1, "the slot went to the next request and not to the one that was withdrawn"


def test_a_slot_that_is_released_is_granted_again_and_a_release_may_be_repeated(source: SlotSource) -> None:
    first = get(source, *ask(6))
    for _ in range(2):
        source.release(["r2", "r4"])
    again = get(source, *ask(2, 6))
    assert {slot.place for slot in again} == {first[2].place, first[4].place} and source.look().held == 6


def test_a_slot_that_is_granted_and_not_waited_for_is_free_once_its_request_is_withdrawn(source: SlotSource) -> None:
    [request] = ask(1)
    source.ask([request])
    end_s = time.monotonic() + WAIT_S
    while source.look().held == 0:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    source.release([request.id])
    assert source.look().held == 0 and len(get(source, *ask(6, 1))) == 6


def test_nodes_and_labels_are_kept(source: SlotSource) -> None:
    slots = get(source, SlotRequest("r0", node="b"), SlotRequest("r1", labels={"zone": "1"}), SlotRequest("r2", labels={"zone": "2"}))
    assert [slot.node for slot in slots] == ["b", "a", "b"]
    assert get(source, SlotRequest("r3", node="b"), seconds=0.05) == [], "both slots of it are taken"


def test_several_slots_are_of_one_node_all_or_none(source: SlotSource) -> None:
    get(source, SlotRequest("r0", node="a"))
    wide = get(source, SlotRequest("r1", width=3))
    assert [slot.request for slot in wide] == ["r1.0", "r1.1", "r1.2"] and {slot.node for slot in wide} == {"a"}
    assert get(source, SlotRequest("r2", width=3), seconds=0.3) == [] and source.look().held == 4, "two are no three"
    source.release(["r2"])
    assert len(get(source, SlotRequest("r3", width=2))) == 2


def test_slots_that_are_not_enough_are_completed(source: SlotSource) -> None:
    get(source, SlotRequest("r0", node="a"), SlotRequest("r1", node="a"), SlotRequest("r2", width=2, node="b"))
    wide = SlotRequest("r3", width=3)
    source.ask([wide], returns=["r1"])
    assert len(source.wait(wide, time.monotonic() + WAIT_S)) == 3 and source.look().held == 6


def test_nodes_that_are_avoided_grant_nothing_more(source: SlotSource) -> None:
    get(source, SlotRequest("r0", node="a"))
    source.release(["r0"], avoids=True)
    assert [slot.node for slot in get(source, *ask(2, 1))] == ["b", "b"]
    assert get(source, *ask(1, 3), seconds=0.05) == []


def test_slots_of_a_lost_node_are_gone_and_others_are_granted(source: SlotSource, cluster: FakeRay, monkeypatch: Any) -> None:
    monkeypatch.setattr("rlhfless_ray.functions.pool_core.LOOK_S", 0.0)
    get(source, *[SlotRequest(f"r{number}", node="a") for number in range(4)])
    cluster.lose("a")
    end_s = time.monotonic() + WAIT_S
    while source.look().held:
        assert time.monotonic() < end_s
    source.release([f"r{number}" for number in range(4)])
    assert [slot.node for slot in get(source, *ask(2, 4))] == ["b", "b"]


def test_the_time_of_a_grant_is_when_the_run_could_use_the_slot(source: SlotSource, cluster: FakeRay) -> None:
    get(source, *ask(6))
    request, asked_s = SlotRequest("r6"), time.time()
    source.ask([request])
    assert source.wait(request, time.monotonic() + 0.05) == []
    source.release(["r0"])
    [slot] = source.wait(request, time.monotonic() + WAIT_S)
    assert asked_s + 0.01 < slot.granted_s <= time.time()


def test_other_programs_are_seen_and_own_requests_are_not(source: SlotSource, cluster: FakeRay) -> None:
    get(source, *ask(7), seconds=0.05)
    assert not source.others_wait() and not source.may_wait()
    cluster.ask([{"GPU" if cluster.resource == "gpu" else "CPU": 9.0}], "theirs")
    assert source.others_wait()
    cluster.remove("theirs")


def test_the_view_names_devices_of_parked_processes_that_nobody_holds(source: SlotSource) -> None:
    get(source, SlotRequest("r0", node="b"), SlotRequest("r1", node="b"))
    source.parks({"b": 100.0}, frozenset({("b", "0"), ("b", "1")}))
    source.release(["r1"])
    assert len(source.look().warm_free) == 1 and source.view.runs == 1


def test_a_device_is_granted_and_no_other_one(source: SlotSource, cluster: FakeRay) -> None:
    if cluster.resource == "cpu":
        pytest.skip("slots of a node are alike")
    [slot] = get(source, SlotRequest("r0", node="a", device=2))
    assert slot.place == ("a", "2") and source.look().held == 1
    assert get(source, SlotRequest("r1", node="a", device=2), seconds=0.05) == []
