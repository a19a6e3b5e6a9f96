"""A run's own requests do not stand in one another's way."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from placement.market import Bid
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions import node_groups, worker_pool
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease, LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.node_groups import NodeGroups, is_reserving
from rlhfless_ray.functions.pool_messages import PoolSlot, PoolView, RunInfo, RunSlots, SlotRequest
from rlhfless_ray.functions.pool_state import PoolState
from rlhfless_ray.functions.slot_source import SlotSource
from rlhfless_ray.functions.worker_pool import WorkerPool
from tests.functions.test_pool_messages import joined, say
from tests.functions.test_pool_state import pool


class Source(SlotSource):
    """A shared pool without Ray. Each call reaches it at once, and a wait ends at once."""

    def __init__(self, state: PoolState, slots: RunSlots) -> None:
        super().__init__("cpu", RunInfo(slots.run))
        self.state, self.slots, self.others = state, slots, False

    def _exchange(self, seconds: float | None = None) -> None:
        self._accept(say(self.state, self.slots.statement()))

    def others_wait(self) -> bool:
        return self.others

    def close(self) -> None:
        pass


def test_a_standing_request_does_not_keep_the_only_slot_from_one_that_is_needed():
    """A rollout asks for one more engine and then loses its only one with its node. The slot that is left goes to the standing request,
    which the rollout does not look at while it waits for a successor."""
    state = pool(2)
    [slots] = joined(state, "x")
    source: Any = Source(state, slots)
    leases = LeaseManager("cpu", Ledger("cpu"), 0.5, "x", source)
    [lost, other] = leases.take(2, "rollout")
    [standing] = leases.ask(1)
    leases.release([other])
    source.look()
    assert standing.id in slots.held and standing.id in leases.pending  # granted, and not collected
    state.drop(slots.held[lost.id].id, 0.0)
    leases.release([lost])
    began_s = time.monotonic()
    [successor] = leases.take(1, "rollout", need=1)
    assert time.monotonic() - began_s < 0.4 and list(leases.held) == [successor.id] and not leases.pending
    assert state.held("x") == 1 and not state.requests


def test_a_needed_slot_whose_node_is_lost_as_it_is_granted_is_waited_for(monkeypatch):
    """Ray grants its request again on another node. A run that has time left must not end."""
    [slots], waits = joined(state := pool(1), "x"), []
    source: Any = Source(state, slots)
    granted = source.wait

    def lose(request: SlotRequest, until_s: float) -> list[PoolSlot]:
        waits.append(until_s)
        return granted(request, until_s) if len(waits) > 2 else []

    source.wait = lose
    leases = LeaseManager("gpu", Ledger("gpu"), 5.0, "x", source)
    monkeypatch.setattr(leases, "availability", lambda: "no Ray")
    [lease] = leases.take(1, "rollout")
    assert list(leases.held) == [lease.id] and len(waits) == 3
    leases.release([lease])
    waits.clear()
    assert leases.take(1, "rollout", need=0, wait_s=5.0) == [] and len(waits) == 1, "one that is not needed is given up"


def test_a_needed_slot_is_asked_for_elsewhere_once_the_last_node_of_its_label_is_lost():
    """Ray lists a lost node for up to half a minute. A request for it, made meanwhile, would never be granted."""
    spot, home = {"market": "spot"}, {"ray.io/node-id": "home"}
    asked: dict[str, dict[str, str]] = {}
    withdrawn: list[str] = []

    def wait(request: SlotRequest, until_s: float) -> list[PoolSlot]:
        return [PoolSlot("s", "home", 0)] if asked[request.id] == home else []

    source: Any = SimpleNamespace(wait=wait, may_wait=lambda: False)
    source.ask = lambda requests, returns: asked.update({one.id: one.labels for one in requests})
    source.release = lambda ids, **_: withdrawn.extend(ids)
    leases = LeaseManager("cpu", Ledger("cpu"), 5.0, "x", source, SimpleNamespace(slots=lambda labels: {}))  # type: ignore[arg-type]
    looks = iter([spot, spot, spot, home])
    [lease] = leases.take(1, "rollout", labels=lambda: next(looks, home))
    assert lease.slot.node == "home" and list(asked.values()) == [spot, home] and withdrawn == [next(iter(asked))]
    assert list(leases.held) == [lease.id] and not leases.pending


@pytest.mark.parametrize(("pause_s", "expected"), [(0.05, 6), (1.0, 1)])
def test_slots_that_come_one_after_the_other_are_waited_for(pause_s, expected):
    """A rollout on 32 GPUs began with 1 to 3 engines, because the other devices were named after its wait."""
    [slots] = joined(state := pool(6), "x")
    source: Any = Source(state, slots)
    granted, next_s = source.wait, [time.monotonic()]

    def wait(request: SlotRequest, until_s: float) -> list[PoolSlot]:
        time.sleep(max(0.0, min(next_s[0], until_s) - time.monotonic()))
        if time.monotonic() < next_s[0]:
            return []
        next_s[0] = time.monotonic() + pause_s
        return granted(request, until_s)

    source.wait = wait
    leases = LeaseManager("cpu", Ledger("cpu"), 5.0, "x", source)
    assert len(leases.take(6, "rollout", need=1, wait_s=0.2)) == expected and not leases.pending


def test_each_engine_starts_as_soon_as_its_own_slot_is_granted():
    """The first of several engines does not wait for the slots of the others."""
    [slots] = joined(state := pool(3), "x")
    source: Any = Source(state, slots)
    granted, events = source.wait, list[str]()

    def wait(request: SlotRequest, until_s: float) -> list[PoolSlot]:
        events.append("wait")
        return granted(request, until_s)

    source.wait = wait
    nodes: Any = SimpleNamespace(slots=lambda labels: {"a": 3}, present=list, find_lost=list, draining=set, known_going=set)
    leases = LeaseManager("cpu", Ledger("cpu"), 5.0, "x", source, nodes)
    engines = WorkerPool("rollout", lambda slot: SimpleNamespace(open=SimpleNamespace(remote=lambda threads: None)), leases, 60.0)

    def begin(instance: Instance) -> None:
        events.append("start")

    assert engines.resize(3, [], wait_s=0.2, begin=begin) == [] and len(engines.working) == 3
    assert events == ["wait", "start"] * 3


def test_a_parked_engine_counts_as_warm_only_if_its_devices_can_be_had():
    """Plans counted on engines whose devices another run held: they started anew, 22 s each on a GPU."""
    view = PoolView(warm_free=(("a", "0"),), warm_lent=(("a", "2"),))
    leases: Any = LeaseManager("gpu", Ledger("gpu"), 5.0, "x", SimpleNamespace(look=lambda: view), None)  # type: ignore[arg-type]
    leases.held = {"lease": Lease("lease", Slot("a", 3))}
    engines = WorkerPool("rollout", lambda slot: None, leases, 60.0, on_device=True)
    engines.parked = [Instance("rollout", Slot("a", device), None, memory_mb=7.0) for device in (0, 1, 2, 3)]
    engines.parked.append(Instance("rollout", Slot("a", 2), None))  # started ahead: its engine is not built
    assert engines.count_warm(1, leases.reachable()) == 3 and engines.count_warm(1, view.warm_free) == 1
    engines.parked = [Instance("rollout", Slot("a", devices), None, memory_mb=7.0, width=2) for devices in ("0,1", "2,3")]
    assert engines.count_warm(2, leases.reachable()) == 1 and engines.count_warm(1, leases.reachable()) == 0
    on_cores = WorkerPool("rollout", lambda slot: None, SimpleNamespace(resource="cpu", ledger=None), 60.0, on_device=True)  # type: ignore[arg-type]
    on_cores.parked = [Instance("rollout", Slot("a", 0), None, memory_mb=7.0)]
    assert on_cores.count_warm(1, set()) == 1, "it works on any slot of its node"


@pytest.mark.parametrize(("resource", "on_device", "expected"), [("gpu", False, True), ("gpu", True, False), ("cpu", True, True)])
def test_only_a_process_with_memory_of_a_device_is_bound_to_it(resource, on_device, expected):
    """The process of a reward function started anew, in seconds, in steps that had another device for it."""
    leases: Any = SimpleNamespace(resource=resource, ledger=None)
    pool = WorkerPool("score", lambda slot: None, leases, 60.0, on_device=on_device)
    instance = Instance("score", Slot("a", 0), None)
    assert pool.fits(instance, Slot("a", 1)) is expected
    assert pool.fits(instance, Slot("a", 0)) and not pool.fits(instance, Slot("b", 0))


@pytest.mark.parametrize(
    ("state", "attempt", "delay_ms", "scheduling", "expected"),
    [
        ("PENDING", 0, 0.0, "QUEUED", True),  # Ray may begin at any moment
        ("PENDING", 1, 0.0, "QUEUED", True),
        ("PENDING", 1, 100.0, "NO_RESOURCES", False),
        ("PENDING", 2, 100.0, "NO_RESOURCES", True),
        ("PENDING", 4, 337.0, "NO_RESOURCES", False),  # as Ray 2.60 has said
        ("PREPARED", 5, 337.0, "NO_RESOURCES", True),
        ("CREATED", 5, 337.0, "FINISHED", False),
        ("PENDING", 30, 1000.0, "NO_RESOURCES", False),
        ("PENDING", 1, 0.0, "INFEASIBLE", False),
        ("REMOVED", 1, 0.0, "REMOVED", False),
    ],
)
def test_a_slot_is_reserved_during_each_attempt_of_ray(state: str, attempt: int, delay_ms: float, scheduling: str, expected: bool) -> None:
    stats = {"scheduling_attempt": attempt, "highest_retry_delay_ms": delay_ms, "scheduling_state": scheduling}
    assert is_reserving({"state": state, "stats": stats}) is expected


def test_a_request_is_withdrawn_only_once_no_node_reserves_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    states, removed, state = ["PREPARED", "PREPARED", "CREATED"], [], pool(0)
    monkeypatch.setattr(node_groups, "placement_group", lambda bundles, name, **_: name)
    monkeypatch.setattr(node_groups, "placement_group_table", lambda group: {"state": states.pop(0)})
    monkeypatch.setattr(node_groups, "remove_placement_group", lambda group: removed.append((group, len(states))))
    [run], groups = joined(state, "x"), NodeGroups("cpu", "rlhfless-run-", is_shared=False, is_bundled=False)
    state.ask(SlotRequest("x/1", "x"), 0.0)
    groups.ask(state, 0.0)
    assert [group.name for group in groups.asked] == ["rlhfless-run-1"]
    say(state, run.statement())  # it wants nothing any more
    groups.ask(state, 0.1)
    for now_s in (0.1, 0.2, 0.3):
        assert not groups.asked and len(groups.leaving) == 1 and not removed
        groups.advance(state, now_s)
    assert removed == [("rlhfless-run-1", 0)] and not groups.leaving


def test_a_slot_that_no_node_has_is_not_waited_for_because_other_runs_hold_others(monkeypatch):
    """Engines for spot nodes must not wait forever after the last of these has gone, because another run is in the pool."""
    [slots] = joined(state := pool(1), "x")
    source: Any = Source(state, slots)
    nodes: Any = SimpleNamespace(slots=lambda labels: {"a": 1} if not labels else {}, known_going=set)
    leases = LeaseManager("cpu", Ledger("cpu"), 0.2, "x", source, nodes)
    monkeypatch.setattr(leases, "availability", lambda: "no Ray")
    asked: list[int] = []
    source.may_wait = lambda: not asked.append(1) and len(asked) < 3
    for take in (lambda: leases.take(1, "rollout", labels=lambda: {"market": "spot"}), lambda: leases.take(1, "rollout", width=2)):
        with pytest.raises(RunError, match="within"):
            take()
    assert not asked
    leases.take(1, "rollout")
    with pytest.raises(RunError, match="within"):
        leases.take(1, "rollout")
    assert len(asked) == 3, "others may give it back"


def test_two_rollouts_that_each_hold_half_of_what_both_need_take_turns(monkeypatch):
    """Neither may wait for the other one's slot without an end, also where both are runs of one pool."""
    monkeypatch.setattr(worker_pool, "ATTEMPT_S", 0.1)
    state, lock, ended, said = pool(2), threading.Lock(), [], []
    nodes: Any = SimpleNamespace(slots=lambda labels: {"a": 2}, present=lambda: [{"NodeID": "a", "Alive": True}], known_going=set)
    nodes.find_lost, nodes.draining = lambda ids: [], set
    actor = SimpleNamespace(open=SimpleNamespace(remote=lambda threads: None))

    def run(slots: RunSlots) -> None:
        def tell(seconds: float | None = None) -> None:
            with lock:
                slots.accept(say(state, slots.statement(), time.monotonic()))

        source: Any = Source(state, slots)
        source._exchange = tell
        leases = LeaseManager("cpu", Ledger("cpu"), 20.0, slots.run, source, nodes)
        monkeypatch.setattr(leases, "availability", lambda: "no Ray")
        left_by_update = leases.take(1, "learn")
        both_hold.wait(5.0)
        slots.bid = Bid(slots.run, (2,), (0.0,))
        try:
            engines = WorkerPool("rollout", lambda slot: actor, leases, 60.0)
            assert engines.resize(2, left_by_update, need=2) == [] and len(engines.working) == 2 == state.held(slots.run)
            leases.release(engines.park_all())
            ended.append(slots.run)
        except Exception as error:
            said.append(error)

    both_hold = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(slots,)) for slots in joined(state, "x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(ended) == ["x", "y"] and not said
