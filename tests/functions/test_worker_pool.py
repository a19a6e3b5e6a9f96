"""Pools of real actors under real leases: warm and cold starts, parking, keep-alive, replacement."""

import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnschedulableError
from ray.util.placement_group import placement_group_table

from placement.scaling.resize_policy import Release
from rlhfless_ray.engine.token_deltas import STOP, TokenDeltas
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import State, start_actor
from rlhfless_ray.functions.lease import LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.recipe import AgentConfig, FunctionsConfig, RolloutConfig
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Request, Span, WeightVersion
from tests.conftest import lives
from tests.rollout_drivers import driver_of

pytestmark = pytest.mark.ray


def worker_class() -> type:
    """A function without content: pools are tested here, not engines. Local, so that Ray ships it by value."""

    class Worker:
        def open(self, threads: int) -> dict:
            return {"memory_mb": 1.0, "spans": []}

        def pid(self) -> int:
            return os.getpid()

        def devices(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    return Worker


@pytest.fixture(params=["cpu", "gpu"])
def pool(request, ray_cluster):
    ledger = Ledger(request.param, 1.0)
    leases = LeaseManager(request.param, ledger, 60.0, f"pool{time.time_ns()}")
    pool = WorkerPool("work", lambda slot: start_actor(worker_class(), slot, request.param, {}), leases, keep_alive_s=600.0)
    yield pool
    pool.close()
    leases.release_all()


def pids(pool: WorkerPool) -> set[int]:
    return set(ray.get([instance.actor.pid.remote() for instance in pool.working], timeout=120))


def test_resize_takes_spare_leases_first_and_returns_the_rest(pool):
    spare = pool.leases.take(3, "other")
    left = pool.resize(2, spare, need=2)
    assert len(pool.working) == 2 and len(left) == 1 and pool.leases.granted == 3
    left = pool.resize(3, left, need=3)
    assert left == [] and len(pool.working) == 3 and pool.leases.granted == 3


def test_what_is_expected_is_asked_for_once_and_paid_from_then(pool):
    pool.resize(2, [], need=2)
    pool.leases.release(pool.resize(1, [], need=1))
    before_s = time.time()
    pool.expect(2)
    (request,) = pool.expected
    assert pool.leases.granted == 2 and list(pool.leases.pending) == [request.id]
    [asked] = pool.leases.source.pool.groups.asked
    while placement_group_table(asked.ref)["state"] != "CREATED":
        assert time.time() < before_s + 60
        time.sleep(0.01)
    granted_s = time.time()
    pool.resize(2, [], need=2)
    assert pool.leases.granted == 3 and not pool.leases.pending and not pool.expected
    paid_s = pool.ledger.started_s + min(row.from_s for row in pool.ledger.rows if row.lease == request.id)
    assert before_s - 1e-5 <= paid_s <= granted_s


def test_what_was_expected_too_much_is_withdrawn(pool):
    pool.resize(2, [], need=2)
    pool.leases.release([*pool.resize(1, [], need=1), *pool.park_all()])
    pool.expect(2)
    assert len(pool.expected) == 2 == len(pool.leases.pending)
    pool.resize(1, [], need=1)
    assert len(pool.leases.held) == 1 and not pool.leases.pending
    pool.expect(1)
    assert not pool.expected, "who has it hands it over"


def test_what_was_expected_and_withdrawn_since_is_asked_for_anew(pool):
    """As by a learner that was lost, which goes first."""
    pool.resize(2, [], need=2)
    pool.leases.release(pool.resize(1, [], need=1))
    pool.expect(2)
    pool.leases.withdraw(list(pool.leases.pending.values()))
    pool.resize(2, [], need=2)
    assert len(pool.working) == 2 and pool.leases.granted == 3 and not pool.leases.pending


def test_shrinking_parks_and_growing_again_is_a_warm_start_of_the_same_process(pool):
    pool.resize(2, [], need=2)
    before = pids(pool)
    spare = pool.resize(1, [], need=1)
    assert len(spare) == 1 and len(pool.parked) == 1 and pool.parked[0].state is State.PARKED
    pool.resize(2, spare, need=2)
    assert pids(pool) == before and pool.cold_starts == 2


def test_a_parked_instance_holds_no_lease_and_its_memory_is_in_the_ledger(pool):
    pool.resize(1, [], need=1)
    ray.get(pool.working[0].opened, timeout=120)
    pool.leases.release(pool.park_all())
    assert not pool.leases.held and pool.parked[0].leases == []
    time.sleep(0.05)
    pool.resize(1, [], need=1)
    assert any(row.activity == "parked" and row.slots == 0 for row in pool.ledger.rows)


def test_keep_alive_ends_parked_processes_only(pool):
    pool.resize(2, [], need=2)
    gone = ray.get(pool.working[1].actor.pid.remote(), timeout=120)
    pool.leases.release(pool.resize(1, [], need=1))
    pool.keep_alive_s = 0.0
    time.sleep(0.01)
    assert pool.end_expired() == 1 and not pool.parked and len(pool.working) == 1
    deadline = time.monotonic() + 60
    while lives(gone) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(gone)


def test_a_killed_instance_is_replaced_under_its_lease(pool):
    pool.resize(1, [], need=1)
    old = pool.working[0]
    lease = old.leases[0]
    pid = ray.get(old.actor.pid.remote(), timeout=120)
    os.kill(pid, 9)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(old.actor.pid.remote(), timeout=120)
    new = pool.replace(old)
    assert ray.get(new.actor.pid.remote(), timeout=120) != pid
    assert new.leases == [lease] and old.state is State.GONE and pool.working == [new] and pool.faults.used == 1


def test_a_node_that_is_lost_while_a_process_starts_on_it_is_no_error_of_the_run(pool):
    """Ray does not say of such a process that it died, but that it cannot be placed."""
    nowhere = Slot("ab" * 28, 0)
    prewarmed = pool.prewarm(nowhere)
    prewarmed.giving_back = prewarmed.actor.pid.remote()
    ray.wait([prewarmed.giving_back], timeout=60)
    with pytest.raises(ActorUnschedulableError):
        ray.get(prewarmed.giving_back)
    pool.end_expired()
    pool.end(prewarmed)
    pool.resize(1, [], need=1)
    instance = pool.working[0]
    instance.actor, instance.slot = pool.start(nowhere), nowhere
    instance.opened = instance.actor.open.remote(1)
    context = RunContext(SimpleNamespace(functions=FunctionsConfig()), SlotBroker(pool.leases), None, None, None, None)
    assert not context.record_start_or_replace(pool, instance, context.record_start)
    assert not pool.working and not pool.leases.held and pool.faults.counts == {FailureCause.NODE_LOST: 1} and pool.faults.used == 0


def test_a_process_that_cannot_be_placed_on_a_node_that_is_there_came_too_late(pool):
    """Ray refuses it once the node is drained, which the last list of drained nodes may not have yet."""
    pool.resize(1, [], need=1)
    instance = pool.working[0]
    ray.get(instance.actor.pid.remote(), timeout=120)
    assert pool.cause(instance) is FailureCause.HUNG, "it works: that it could start is no reason"
    instance.actor = pool.start(Slot("ab" * 28, 0))
    instance.opened = instance.actor.open.remote(1)
    ray.wait([instance.opened], timeout=60)
    assert pool.cause(instance) is FailureCause.NODE_DRAINED


def test_an_instance_sees_its_own_device_only(pool):
    if pool.leases.resource == "cpu":
        pytest.skip("cores are not devices")
    pool.resize(3, [], need=3)
    seen = ray.get([instance.actor.devices.remote() for instance in pool.working], timeout=120)
    assert seen == [str(instance.slot.device) for instance in pool.working] and len(set(seen)) == 3


def engine_class() -> type:
    """An engine on a device, which records what it is asked, in order, and what would go wrong on real hardware."""

    class Engine:
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.weights = None

        def open(self, threads: int) -> dict:
            return {"memory_mb": 1.0, "spans": []}

        def load(self, version: int, weights: object, expected: int) -> list:
            self.calls.append(f"load {version}")
            self.weights = version
            return []

        def rollout(self, epoch: int, requests: list, interval_s: float, threads: int):
            assert self.weights is not None, "generated without weights"
            self.calls.append(f"rollout {len(requests)}")
            yield (
                TokenDeltas.of(self.weights, [(r.key, 0, 1, STOP) for r in requests], [0] * len(requests), np.zeros(len(requests))),
                EngineSteps(),
                [],
            )

        def park(self) -> dict:
            self.calls.append("park")
            self.weights = None
            return {"memory_mb": 7.0, "spans": [Span("transfer", "give memory back", time.time() - 0.001, time.time())]}

        def told(self) -> list[str]:
            return self.calls

    return Engine


@pytest.fixture
def engines(ray_cluster):
    """A pool of engines on devices; what they are asked and what is released is in `order`."""
    ledger = Ledger("gpu", 1.0)
    leases = LeaseManager("gpu", ledger, 60.0, f"pool{time.time_ns()}")
    pool = WorkerPool("rollout", lambda slot: start_actor(engine_class(), slot, "gpu", {}), leases, 600.0, on_device=True)
    yield pool
    pool.close()
    leases.release_all()


def roll_out(pool: WorkerPool, version: int, give_back=lambda *_: None, shares: int = 1) -> None:
    requests = [Request(key, (1,), 0, 4, 1.0) for key in range(4)]
    driver_of(
        pool,
        requests,
        WeightVersion(version, ()),
        expected=1.0,
        needed_next=0,
        decide=lambda tail_s, needed: Release(0, "not needed"),
        give_back=give_back,
    ).run(np.array_split(np.arange(4), shares), deadline_s=120.0)


def test_an_engine_that_left_its_device_loads_again_what_it_had(engines):
    """An evaluation and the step after it use one version; in between the device was given back, weights and all."""
    for _ in range(2):
        engines.resize(1, [])
        roll_out(engines, 0)
        engines.leases.release(engines.park_all())
    asked = ray.get(engines.parked[0].actor.told.remote(), timeout=120)
    assert asked == ["load 0", "rollout 4", "park", "load 0", "rollout 4", "park"]
    assert [row.memory_mb for row in engines.ledger.rows if row.activity == "parked"] == [7.0]  # the second lasts
    assert any(row.activity == "transfer" and row.slots == 1 for row in engines.ledger.rows)  # billed, as a lease is held


def test_only_what_uses_the_device_waits_until_an_engine_has_left_it(engines):
    engines.waits_to_leave = False
    engines.resize(1, [])
    roll_out(engines, 0)
    (engine,) = engines.working
    (lease,) = engines.park_all()

    def assign(kind: str, on_device: bool) -> None:
        actor = SimpleNamespace(open=SimpleNamespace(remote=lambda threads: None))
        WorkerPool(kind, lambda slot: actor, engines.leases, 600.0, on_device=on_device).assign_leases([lease])

    assert engine.leaving is not None and lease.leaving is not None
    assign("score", on_device=False)
    assert engine.leaving is not None and lease.leaving is not None
    assign("learn", on_device=True)
    assert engine.leaving is None and lease.leaving is None and engine.kept_mb == 7.0


def test_an_engine_that_works_again_need_not_have_left_its_device(engines):
    engines.waits_to_leave = False
    engines.resize(1, [])
    for _ in range(2):
        roll_out(engines, 0)
        (engine,) = engines.working
        engines.resize(1, engines.park_all())
        assert engines.working == [engine] and engine.leaving is None and engine.leases[0].leaving is None
    roll_out(engines, 0)
    engines.leases.release(engines.park_all())
    assert engine.leaving is None, "a device is empty before it is given back"
    assert ray.get(engine.actor.told.remote(), timeout=120) == ["load 0", "rollout 4", "park"] * 3


def test_a_drained_engine_leaves_its_device_before_its_lease_goes(engines):
    """As the runtime does it: parked, then released, while another works on."""
    engines.resize(2, [], need=2)
    drained = engines.working[1]
    order: list[str] = []

    def release(leases: list) -> None:
        order.extend([*ray.get(drained.actor.told.remote(), timeout=120), "release"])
        engines.leases.release(leases)

    terms = SimpleNamespace(cold_start=SimpleNamespace(observe=lambda *_: None), include=lambda terms: None)
    autoscaler = SimpleNamespace(terms=terms, safely=None, steps=SimpleNamespace(takes=lambda measure: True))
    recipe: Any = SimpleNamespace(functions=FunctionsConfig(), rollout=RolloutConfig(), agent=AgentConfig())
    leases: Any = SimpleNamespace(release=release, ledger=engines.leases.ledger)
    context = RunContext(recipe, SlotBroker(leases), None, None, autoscaler, None)  # type: ignore[arg-type]
    stage = RolloutStage(context, engines, None, None, 0)  # type: ignore[arg-type]
    ray.get(drained.opened, timeout=120)
    roll_out(engines, 3, shares=1, give_back=stage.give_back)
    assert order == ["load 3", "park", "release"] and drained.version is None and drained in engines.parked
    assert [instance.version for instance in engines.working] == [3]
