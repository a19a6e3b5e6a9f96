"""Engines of a plan lease slots pool by pool, and other slots make up for those that a pool has not granted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.pools import OWN, PoolKind
from rlhfless_ray.functions import cluster_nodes
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger, Prices
from rlhfless_ray.functions.node_pools import NodePools
from rlhfless_ray.functions.private_slots import PrivateSlots
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.staff_pools import lacking, order_in_pools, staff_pools
from tests.functions.fake_ray import FakeRay

pytestmark = pytest.mark.pure
KINDS = [PoolKind("spot", {"market": "spot"}, price_per_hour=1.0), PoolKind(OWN, price_per_hour=4.0)]
NODES = {"home": (3, {}), "a": (2, {"market": "spot"}), "b": (1, {"market": "spot"})}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(NODES, "cpu")
    fake.install(monkeypatch)
    monkeypatch.setattr(cluster_nodes, "ray", SimpleNamespace(nodes=fake.list))
    return fake


@pytest.fixture
def engines(cluster: FakeRay) -> Iterator[WorkerPool]:
    nodes = ClusterNodes("cpu")
    nodes.notices = set  # type: ignore[assignment]
    pools = NodePools(nodes, KINDS)
    prices = Prices(slot_per_hour=lambda node: pools.pool_of(node).price_per_hour, pool=lambda node: pools.pool_of(node).name)
    leases = LeaseManager("cpu", Ledger("cpu", prices), 5.0, "x", PrivateSlots("cpu", "x"), nodes, pools)
    start = lambda slot: SimpleNamespace(open=SimpleNamespace(remote=lambda threads: None))  # noqa: E731
    yield WorkerPool("rollout", start, leases, 60.0)
    leases.release_all()


def where(engines: WorkerPool) -> Counter[str]:
    return Counter(engines.leases.pools.pool_of(one.slot.node).name for one in engines.working)


def staff(engines: WorkerPool, free: list[Any], *planned: str) -> list[Any]:
    return staff_pools(engines, free, planned, 0.1, lambda instance: None)


def test_each_pool_gives_the_slots_that_the_plan_wants_of_it(engines: WorkerPool) -> None:
    assert staff(engines, [], "spot", OWN, "spot") == []
    assert where(engines) == {"spot": 2, OWN: 1} and not lacking(engines, ("spot", OWN, "spot"))
    assert not engines.leases.pending


def test_free_leases_of_planned_pools_are_used_and_others_are_left(engines: WorkerPool) -> None:
    free = engines.leases.take(2, "learn", labels=lambda: engines.leases.pools.labels_of(OWN))
    assert staff(engines, free, "spot", "spot", OWN) == free[1:]
    assert where(engines) == {"spot": 2, OWN: 1}


def test_slots_that_a_pool_has_not_are_made_up_for_by_a_resize(engines: WorkerPool) -> None:
    free = engines.leases.take(2, "learn", labels=lambda: engines.leases.pools.labels_of(OWN))
    left = staff(engines, free, *["spot"] * 5)
    assert where(engines) == {"spot": 3} and left == free
    assert engines.resize(5, left) == []
    assert where(engines) == {"spot": 3, OWN: 2}


def test_bill_names_pool_and_price(engines: WorkerPool) -> None:
    staff(engines, [], "spot", OWN)
    time.sleep(0.02)  # rows have microseconds
    engines.leases.release_all()
    rates = {row.pool: 3600 * row.money / row.seconds for row in engines.leases.ledger.rows if row.slots}
    assert rates == {"spot": pytest.approx(1.0, rel=0.01), OWN: pytest.approx(4.0, rel=0.01)}


def test_shares_go_to_engines_of_the_pool_that_the_plan_has_for_them(engines: WorkerPool) -> None:
    planned = (OWN, "spot", "spot")
    staff(engines, [], *planned)
    order = order_in_pools(engines, planned, np.array([9.0, 5.0, 7.0]), np.zeros(3))
    nodes = [engines.leases.pools.pool_of(engines.working[number].slot.node).name for number in order]
    assert tuple(nodes) == planned and sorted(order) == [0, 1, 2]
    assert order_in_pools(engines, ("spot",) * 3, np.ones(3), np.zeros(3)) == [], "a pool has granted fewer"
