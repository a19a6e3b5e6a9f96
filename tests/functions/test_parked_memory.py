"""Parked processes give memory back without a lease, when they are expected to lie or have lain for long; the ledger bills the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger, Prices
from rlhfless_ray.functions.private_slots import PrivateSlots
from rlhfless_ray.functions.warm_memory_budget import FIRST_MB, WarmMemoryBudget
from rlhfless_ray.functions.worker_pool import WorkerPool

pytestmark = pytest.mark.ray

WAIT_S = 120.0


def holder_class() -> type:
    class Holder:
        def __init__(self) -> None:
            self.parks = 0

        def open(self, threads: int) -> dict:
            return {"memory_mb": 100.0, "spans": []}

        def park(self) -> dict:
            self.parks += 1
            if self.parks > 3:
                raise MemoryError("no")
            return {"memory_mb": 25.0, "spans": []}

        def parked(self) -> int:
            return self.parks

    return Holder


@pytest.fixture
def pool(ray_cluster: None) -> Iterator[WorkerPool]:
    ledger = Ledger("cpu", Prices(slot_per_hour=lambda node: 3600.0, parked_share=1.0))
    leases = LeaseManager("cpu", ledger, 60.0, f"parked{time.time_ns()}")
    holder = holder_class()
    made = WorkerPool("work", lambda slot: start_actor(holder, slot, "cpu", {}), leases, 600.0, give_back_after_s=5.0)
    yield made
    made.close()
    leases.release_all()


def opened(pool: WorkerPool) -> Any:
    """An instance at work, whose start was told, as a stage does it."""
    pool.resize(1, [], need=1)
    (instance,) = pool.working
    instance.memory_mb = instance.start_result(WAIT_S)["memory_mb"]
    return instance


def parks(instance: Any) -> int:
    return ray.get(instance.actor.parked.remote(), timeout=WAIT_S)


def parked_rows(pool: WorkerPool) -> list[tuple[float, float]]:
    """(memory, money per second) of each."""
    return [(row.memory_mb, round(row.money / row.seconds, 2)) for row in pool.ledger.rows if row.activity == "parked"]


def test_short_gaps_keep_everything(pool: WorkerPool) -> None:
    instance = opened(pool)
    pool.gaps_s.extend([1.0, 2.0, 60.0])
    spare = pool.park_all()
    pool.end_expired()
    assert parks(instance) == 0
    pool.resize(1, spare, need=1)
    assert parked_rows(pool) == [(100.0, 1.0)]


def test_long_gaps_give_back_at_once_and_are_billed_from_then_on_by_what_stays(pool: WorkerPool) -> None:
    instance = opened(pool)
    for _ in range(2):
        pool.gaps_s.extend([9.0] * 5)
        spare = pool.park_all()
        ray.get(instance.giving_back, timeout=WAIT_S)
        pool.end_expired()
        pool.resize(1, spare, need=1)
        assert instance.kept_mb is None and instance.memory_mb == 100.0
    assert parks(instance) == 2 and parked_rows(pool) == [(25.0, 0.25)] * 2


def test_without_time_to_wait_memory_is_given_back_before_any_gap_is_known(pool: WorkerPool) -> None:
    instance = opened(pool)
    pool.give_back_after_s = 0.0
    spare = pool.park_all()
    assert instance.giving_back is not None and instance.version is None
    ray.get(instance.giving_back, timeout=WAIT_S)
    pool.end_expired()
    pool.resize(1, spare, need=1)
    assert parks(instance) == 1 and parked_rows(pool) == [(25.0, 0.25)]


def test_one_that_lay_for_long_gives_back_later(pool: WorkerPool) -> None:
    instance = opened(pool)
    pool.leases.release(pool.park_all())
    instance.parked_since_s -= 10.0
    pool.end_expired()
    ray.get(instance.giving_back, timeout=WAIT_S)
    pool.end_expired()
    pool.end_expired()
    assert parks(instance) == 1
    pool.ledger.close()
    assert parked_rows(pool) == [(100.0, 1.0), (25.0, 0.25)]


def test_a_prewarmed_process_tells_what_it_holds(pool: WorkerPool) -> None:
    (lease,) = pool.leases.take(1, "other")
    instance = pool.prewarm(lease.slot)
    ray.get(instance.giving_back, timeout=WAIT_S)
    pool.resize(1, [lease], need=1)
    assert pool.working == [instance] and parked_rows(pool) == [(25.0, 1.0)]


def test_no_more_is_started_ahead_or_kept_than_a_node_has_memory_for(pool: WorkerPool) -> None:
    """100 MB as they work, 25 where they only wait; of one that has not told it is not known yet."""
    said: list[str] = []
    budget = WarmMemoryBudget(FIRST_MB + 60.0, lambda node: 0.0, said.append, PrivateSlots("cpu", "alone"))
    pool.parked_memory = budget
    budget.watch(pool)
    leases = pool.leases.take(3, "other", need=3)
    node = leases[0].slot.node
    first = pool.prewarm(leases[0].slot)
    assert first is not None and pool.prewarm(leases[1].slot) is None and pool.prewarm(leases[2].slot) is None
    (message,) = said
    assert "hold 1120 MB, so it is not started ahead: functions.parked_mb allows 620 MB" in message
    ray.get(first.giving_back, timeout=WAIT_S)
    pool.end_expired()
    second = pool.prewarm(leases[1].slot)
    assert second is not None, "the first has told how little it holds"
    spare = pool.resize(2, leases, need=2)
    for instance in pool.working:
        instance.memory_mb = instance.start_result(WAIT_S)["memory_mb"]
    budget.most_mb = 199.0
    spare += pool.park(first) + pool.park(second)
    assert pool.parked == [second] and "2 parked processes on a node held 200 MB, so those that waited" in said[1] and len(said) == 2
    assert budget._held_mb(node) == 100.0
    pool.leases.release(spare)


def test_without_an_amount_it_is_half_of_the_node(pool: WorkerPool) -> None:
    from rlhfless_ray.functions.cluster_nodes import node_slots

    (node,) = node_slots("cpu")
    (told,) = [one["Resources"]["memory"] for one in ray.nodes()]
    assert pool.leases.nodes.memory_mb(node) == told / 2**20 and pool.leases.nodes.memory_mb("elsewhere") == float("inf")
    said: list[str] = []
    pool.parked_memory = WarmMemoryBudget(None, lambda _: 2 * FIRST_MB, said.append, PrivateSlots("cpu", "alone"))
    pool.parked_memory.watch(pool)
    slot = Slot(node, 0)
    assert pool.prewarm(slot) is not None and pool.prewarm(slot) is None and "(50% of its memory)" in said[0]


def test_one_that_cannot_says_why(pool: WorkerPool) -> None:
    instance = opened(pool)
    pool.gaps_s.extend([9.0] * 5)
    ray.get([instance.actor.park.remote() for _ in range(3)], timeout=WAIT_S)
    pool.park_all()
    ray.wait([instance.giving_back], timeout=WAIT_S)
    with pytest.raises(RunError, match=r"could not release memory: no"):
        pool.end_expired()


def test_one_that_died_meanwhile_is_no_error(pool: WorkerPool) -> None:
    instance = opened(pool)
    pool.gaps_s.extend([9.0] * 5)
    ray.kill(instance.actor)
    with pytest.raises(RayActorError):  # killing takes its time
        for _ in range(1000):
            ray.get(instance.actor.park.remote(), timeout=WAIT_S)
    pool.park_all()
    ray.wait([instance.giving_back], timeout=WAIT_S)
    pool.end_expired()
    assert instance.kept_mb is None
