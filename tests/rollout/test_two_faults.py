"""Two faults at once, as the driver sees them: a death on a node that is drained, and one of an engine that was to give requests away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray

from placement.migration.evacuation import MoveTimes
from rlhfless_ray.functions import node_groups
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import NoRoom, WorkerPool
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.inflight_migrations import MigrationRequest
from rlhfless_ray.rollout.live_rollout import Plugin
from rlhfless_ray.rollout.migration_policy import MigrationPolicy
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.types import Request, WeightVersion
from tests.rollout_drivers import driver_of

WEIGHTS = WeightVersion(1, ())


class Call:
    """A method of an actor."""

    def __init__(self, sent: list[Any]) -> None:
        self.sent = sent

    def options(self, **_: Any) -> Call:
        return self

    def remote(self, *given: Any) -> Any:
        self.sent.append(given)
        return object()


class Pool:
    kind = "rollout"
    width = 1
    ledger = SimpleNamespace(preempted=lambda *_: None)
    lease_one = WorkerPool.lease_one

    def __init__(self, nodes: list[str], draining: set[str]) -> None:
        self.sent: list[Any] = []
        self.notice_s: float | None = None
        self.log: list[str] = []
        self.working = [self.engine(node) for node in nodes]
        self.leases = SimpleNamespace(
            nodes=SimpleNamespace(find_lost=lambda nodes: [], draining=lambda: draining, notice_s=lambda node: self.notice_s),
            deadline_s=60.0,
        )

    def engine(self, node: str) -> Any:
        call = Call(self.sent)
        actor = SimpleNamespace(rollout=call, enqueue=call, load=call)
        return SimpleNamespace(
            id=f"engine-{len(self.log)}",
            actor=actor,
            slot=SimpleNamespace(node=node, device=0),
            leases=[0],
            loading=None,
            version=1,
            width=1,
            started=True,
            state=None,
        )

    def end_lost(self, instance: Any, why: str, cause: FailureCause) -> None:
        self.log.append("lost")
        self.working.remove(instance)

    def replace(self, instance: Any, why: str, cause: FailureCause, make_room: Any = None, waits: bool = True) -> Any:
        if make_room is not None:
            make_room()
        self.log.append("replaced")
        self.working[self.working.index(instance)] = new = self.engine("new")
        return new

    def prewarm(self, slot: Any) -> None:
        self.log.append("prewarmed")


def rollout_on(pool: Any, requests: int, weights: WeightVersion = WEIGHTS, **more: Any) -> RolloutDriver:
    """Return a driver with engines that have no request yet."""
    asked = [Request(key, (1, 2), key, 1000, 1.0) for key in range(requests)]
    driver = driver_of(pool, asked, weights, expected=1000.0, **more)
    driver.rollout.begin()
    return driver


class Early(EarlyWork):
    """Early work of stages that only write down what is asked of them."""

    def __init__(self, poll: Any, broker: Any, refs: Any) -> None:
        self.poll, self.broker, self.refs = poll, broker, refs  # type: ignore[method-assign]


@pytest.mark.parametrize(("draining", "log"), [({"a"}, ["lost"]), (set[str](), ["replaced"])])
def test_an_engine_that_dies_on_a_drained_node_is_not_replaced_while_others_work(draining: set[str], log: list[str]) -> None:
    """Its lease goes with the node: to wait for another one, while the run itself may hold all there are, would end the run."""
    pool = Pool(["a", "b"], draining)
    migration = MigrationPolicy("auto", 0.7)
    migration.start_s = -1.0
    rollout = rollout_on(pool, 2, migration=migration)
    first, second = (rollout.calls.number(engine) for engine in pool.working)
    rollout.source.assign(first, np.array([0]))
    rollout.source.assign(second, np.array([1]))
    call = rollout.calls.find(first)
    assert call is not None
    rollout.calls.running = {ref: one for ref, one in rollout.calls.running.items() if one is not call}
    rollout.lost.handle_loss(call, FailureCause.DIED, "killed")
    assert pool.log == log and rollout.token_log.owner.tolist() == [second, second]


def test_a_rollout_that_may_not_wait_for_a_slot_ends_with_its_last_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an update the learner may hold every slot that is left, and keeps it until the rollout ends."""
    pool, told = Pool(["a"], set()), list[Any]()
    rollout = rollout_on(pool, 1, waits=False)
    rollout.source.stop = lambda: told.append("stopped")  # type: ignore[method-assign]
    rollout.source.assign(rollout.calls.number(pool.working[0]), np.array([0]))

    def replace(*_: Any, waits: bool) -> Any:
        told.append(waits)
        raise NoRoom("no slot is free")

    monkeypatch.setattr(pool, "replace", replace)
    [call] = rollout.calls.running.values()
    rollout.calls.running.clear()
    with pytest.raises(NoRoom):
        rollout.lost.handle_loss(call, FailureCause.NODE_LOST, "its node is gone")
    assert told == [False, "stopped"]


def test_requests_of_the_last_working_engine_go_to_one_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the only slot that is left, as where a node was lost with all engines but this one: no other slot would ever come."""
    pool = Pool(["a", "b"], set())
    rollout = rollout_on(pool, 1)
    first, second = (rollout.calls.number(engine) for engine in pool.working)
    rollout.source.assign(first, np.array([0]))
    pool.working[1].loading = "not loaded yet"
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    call = rollout.calls.find(first)
    assert call is not None
    rollout.calls.running.clear()
    rollout.lost.handle_loss(call, FailureCause.NODE_LOST, "killed")
    assert pool.log == ["lost", "prewarmed"] and rollout.token_log.owner.tolist() == [second]


def test_slots_that_engines_left_are_released_before_a_successor_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for the next phase or at work for it, and one of them may be the only slot that is left."""
    monkeypatch.setattr("rlhfless_ray.session.early_work.wait_any", lambda refs, *_, **how: refs)
    pool, at_work = Pool(["a"], set()), ["scoring", "a pass"]

    def poll(seconds: float) -> None:
        assert seconds == 0, "nothing more is begun"
        pool.log.append(at_work.pop() if at_work and "released" in pool.log else "looked at")

    broker = SimpleNamespace(release=lambda: pool.log.append("released"))
    early: list[Plugin] = [Early(poll, broker, lambda: list(at_work))]
    rollout = rollout_on(pool, 1, plugins=early)
    first = rollout.calls.number(pool.working[0])
    rollout.source.assign(first, np.array([0]))
    call = rollout.calls.find(first)
    assert call is not None
    rollout.calls.running.clear()
    rollout.lost.handle_loss(call, FailureCause.NODE_LOST, "killed")
    assert pool.log == ["looked at", "released", "a pass", "released", "scoring", "released", "replaced"]


def test_a_successor_waits_for_the_runs_own_slots_only_if_no_other_is_granted() -> None:
    log: list[str] = []

    def replaced(usable: list[str], granted: list[list[str]]) -> Any:
        log.clear()
        leases = SimpleNamespace(without_lost=lambda held: usable)

        def lease_one(need: bool, wait_s: float = 0.0) -> list[str]:
            log.append("needed" if need else "tried")
            return granted.pop(0)

        pool: Any = SimpleNamespace(leases=leases, _handle_loss=lambda *_: [], assign_leases=lambda taken: taken, lease_one=lease_one)
        return WorkerPool.replace(pool, cast(Any, None), make_room=lambda: log.append("made room"))

    assert replaced(["own"], []) == ["own"] and not log
    assert replaced([], [["other"]]) == ["other"] and log == ["tried"]
    assert replaced([], [[], ["its own"]]) == ["its own"] and log == ["tried", "made room", "needed"]


def test_moves_are_cancelled_when_source_and_target_have_died() -> None:
    """Who waited for it would wait till its end: no move is decided on meanwhile, and a notice for its node is not heeded."""
    pool = Pool(["a", "b"], set())
    rollout = rollout_on(pool, 1)
    first, second = (rollout.calls.number(engine) for engine in list(pool.working))
    rollout.source.assign(first, np.array([0]))
    rollout.rollout.migrations.start(MigrationRequest(np.array([0]), first, second, "test"))
    pool.working.pop()  # where it was to go died too
    call = rollout.calls.find(first)
    assert call is not None and 0 in rollout.rollout.migrations.leaving
    rollout.calls.running.clear()
    rollout.lost.handle_loss(call, FailureCause.DIED, "killed")
    assert pool.log == ["replaced"] and not rollout.rollout.migrations.leaving
    assert rollout.token_log.owner.tolist() == [rollout.calls.number(pool.working[0])]


def test_moves_are_cancelled_when_the_source_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights were lost on their way: the order to cut was for a call that is over."""
    monkeypatch.setattr("rlhfless_ray.rollout.driver.lost_on_the_way", lambda ref: True)
    pool = Pool(["a", "b"], set())
    rollout = rollout_on(pool, 1, weights=WeightVersion(1, ("ref",), 0, ("a",), ("copy",)))
    first, second = (rollout.calls.number(engine) for engine in pool.working)
    rollout.source.assign(first, np.array([0]))
    rollout.rollout.migrations.start(MigrationRequest(np.array([0]), first, second, "test"))
    call = rollout.calls.find(first)
    assert call is not None
    rollout.calls.running.clear()
    assert rollout.load_copy(call) and rollout.calls.find(first) is not None
    assert not rollout.rollout.migrations.leaving


def test_evacuation_waits_until_ray_grants_a_slot_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has registered a group when it is asked of it first, and granted it a little later: to look once is never to get it."""
    monkeypatch.setattr("rlhfless_ray.rollout.lost_engines.GRANT_S", 10.0)  # this machine may be slow too
    looks: list[str] = []

    def table(group: str) -> dict[str, Any]:
        looks.append(group)
        return {"state": "CREATED" if looks.count(group) > 2 else "PENDING", "bundles_to_node_id": {0: "b"}}

    monkeypatch.setattr(node_groups, "placement_group", lambda bundles, name, **_: name)
    monkeypatch.setattr(node_groups, "placement_group_table", table)
    monkeypatch.setattr(node_groups, "remove_placement_group", lambda group: None)
    monkeypatch.setattr("rlhfless_ray.functions.pool_core.ray.nodes", lambda: [{"NodeID": "b", "Alive": True, "Resources": {"CPU": 1}}])
    pool: Any = Pool(["a"], {"a"})
    pool.find_labels, pool.leases = dict, LeaseManager("cpu", Ledger("cpu", 1.0), 60.0, "test")
    pool.leases.nodes.notices, pool.leases.without_lost = lambda: {"a": 0.0}, lambda leases: leases

    def assign_leases(leases: list[Any]) -> Any:
        pool.working.append(pool.engine(leases[0].slot.node))
        return pool.working[-1]

    pool.assign_leases = assign_leases
    rollout = rollout_on(pool, 1)
    rollout.source.assign(rollout.calls.number(pool.working[0]), np.array([0]))
    rollout.lost.evacuate()
    assert [engine.slot.node for engine in pool.working] == ["a", "b"]


def test_an_engine_with_long_notice_works_on_and_leaves_before_its_end() -> None:
    """Between two engines of which one will go: with two minutes nothing moves yet, with a second everything does."""
    pool = Pool(["a", "b"], {"a"})
    rollout = rollout_on(pool, 4)
    first, second = (rollout.calls.number(engine) for engine in pool.working)
    rollout.source.assign(first, np.array([0, 1]))
    rollout.source.assign(second, np.array([2, 3]))
    pool.notice_s = 120.0
    rollout.lost.evacuate()
    assert not rollout.rollout.migrations.leaving and not rollout.rollout.result.decisions
    pool.notice_s = 1.2
    rollout.lost.evacuate()
    rollout.lost.evacuate()
    leaving = rollout.rollout.migrations.leaving
    assert {key: route.target for key, route in leaving.items()} == {0: second, 1: second}
    assert rollout.rollout.result.decisions == ["2 moved: the node is removed in 1.2 s: 0 by pages, 2 by prefill"]


def test_pages_of_a_node_that_goes_are_sent_only_as_far_as_its_notice_reaches() -> None:
    pool = Pool(["a", "b"], {"a"})
    rollout = rollout_on(pool, 4)
    rollout.rollout.move_times = lambda: MoveTimes((0.05, 1e-2), (0.06, 1e-3))
    first, _ = (rollout.calls.number(engine) for engine in pool.working)
    rollout.source.assign(first, np.arange(4))
    rollout.token_log.length[:] = [0, 150, 100, 120]  # contexts, which are too short for a copy before the cut
    pool.notice_s = 1.25  # leaves 0.19 s for tokens of pages
    rollout.lost.evacuate()
    tickets = {key: route.ticket for key, route in rollout.rollout.migrations.leaving.items()}
    assert [tickets[key] > 0 for key in range(4)] == [False, True, False, False]
