"""Instances of several leases: all of one node, all or none, on the same devices when they wake."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import LeaseManager, most_instances
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import WorkerPool

pytestmark = pytest.mark.ray

DEADLINE_S = 3.0


def worker_class() -> type:
    class Worker:
        def open(self, threads: int) -> dict[str, Any]:
            return {"memory_mb": 1.0, "spans": [], "threads": threads}

        def park(self) -> dict[str, Any]:
            return {"memory_mb": 1.0, "spans": []}

        def devices(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    return Worker


@pytest.fixture(params=["cpu", "gpu"])
def pool(request: Any, ray_cluster: None) -> Iterator[WorkerPool]:
    ledger = Ledger(request.param, 1.0)
    leases = LeaseManager(request.param, ledger, DEADLINE_S, f"wide{time.time_ns()}")
    pool = WorkerPool("work", lambda slot: start_actor(worker_class(), slot, request.param, {}), leases, 600.0, width=2, on_device=True)
    yield pool
    pool.close()
    leases.release_all()


def another(pool: WorkerPool) -> LeaseManager:
    """Return the leases of another run."""
    return LeaseManager(pool.leases.resource, Ledger(pool.leases.resource), 60.0, f"others{time.time_ns()}")


def test_an_instance_has_all_its_leases_and_wakes_on_the_same_devices(pool: WorkerPool) -> None:
    assert pool.resize(2, [], need=2) == []
    assert [len(instance.leases) for instance in pool.working] == [2, 2] and len(pool.ledger.open) == 4
    opened = ray.get([instance.opened for instance in pool.working], timeout=60)
    assert [one["threads"] for one in opened] == [2, 2]
    if pool.leases.resource == "gpu":
        seen = ray.get([instance.actor.devices.remote() for instance in pool.working], timeout=60)
        assert sorted(seen) == ["0,1", "2,3"] and seen == [instance.slot.device for instance in pool.working]
    own = {instance.id: {lease.slot.device for lease in instance.leases} for instance in pool.working}
    free = pool.park_all()
    assert len(free) == 4 and pool.resize(2, free[::-1], need=2) == []  # another function may give them back in any order
    assert pool.cold_starts == 2
    if pool.leases.resource == "gpu":
        assert {instance.id: {lease.slot.device for lease in instance.leases} for instance in pool.working} == own


def test_a_spare_lease_is_completed_and_what_is_not_enough_is_left_alone(pool: WorkerPool) -> None:
    spare = pool.leases.take(1, "other")
    assert pool.begin(1, spare, lambda _: None) == spare and not pool.working
    assert pool.resize(1, spare, need=1) == [] and len(pool.leases.held) == 2
    other = pool.leases.take(1, "other")
    assert pool.resize(2, other, need=1, wait_s=0.2) == [] and len(pool.working) == 2, "the fourth slot completes it"
    pool.leases.release(pool.park(pool.working[-1]))
    others = another(pool)
    others.take(1, "other")
    assert pool.resize(2, [], need=1, wait_s=0.2) == [] and len(pool.working) == 1, "half an instance is none"
    assert not pool.leases.pending and len(pool.leases.held) == 2
    others.release_all()


def test_what_is_needed_and_never_granted_is_named_and_released(pool: WorkerPool) -> None:
    others = another(pool)
    others.take(3, "other")
    spare = pool.leases.take(1, "other")
    with pytest.raises(RunError, match=r"work needs 1 × 2 × .* of one node and got 0 within 3 s; the cluster has 4"):
        pool.resize(1, spare, need=1)
    assert not pool.leases.held and not pool.leases.pending
    others.release_all()


def test_a_lost_instance_is_replaced_under_its_leases_and_one_that_is_expected_is_asked_for_whole(pool: WorkerPool) -> None:
    pool.resize(1, [], need=1)
    lost, held = pool.working[0], set(pool.leases.held)
    ray.kill(lost.actor)
    assert len(pool.replace(lost).leases) == 2 and set(pool.leases.held) == held
    pool.leases.release(pool.park_all())
    pool.expect(1)
    assert len(pool.expected) == 1
    pool.resize(1, [], need=1)
    assert len(pool.leases.held) == 2 and not pool.leases.pending and pool.cold_starts == 2


def test_slots_of_different_nodes_make_no_instance() -> None:
    assert most_instances({"a": 3, "b": 1}, 2) == 1 and most_instances({"a": 4, "b": 4}, 3) == 2 and most_instances({"a": 1}, 1) == 1
