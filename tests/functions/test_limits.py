"""How many engines a plan may have on the nodes that are there when it is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from placement.pools import OWN, PoolKind, has_labels
from rlhfless_ray.functions import engine_pools
from rlhfless_ray.functions.engine_pools import EMPTY_S, EnginePools
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.node_pools import NodePools
from rlhfless_ray.functions.pool_messages import NODE_LABEL

SPOT = {"market": "spot"}


def lease(node: str, number: int) -> Lease:
    return Lease(f"{node}{number}", Slot(node, number))


def test_engines_are_limited_by_slots_of_one_node_by_held_leases_and_by_the_recipe() -> None:
    limits = Limits({"a": 3, "b": 2}, {1: 4, 2: 3})
    assert limits.engines(1) == 4 and limits.engines(2) == 2
    assert limits.engines(1, [lease("a", 0), lease("a", 1)]) == 3
    assert limits.engines(2, [lease("a", 0), lease("b", 0)]) == 1
    assert limits.engines(1, [lease("elsewhere", 0)]) == 4
    assert limits.engines(4) == 0, "the recipe has no such width"


def test_a_rollout_waits_for_fewer_engines_only_on_the_learners_own_node() -> None:
    assert Limits({"a": 1}, {1: 4}, least=2).fewest(1) == 2
    assert Limits({"a": 1}, {1: 4}, least=2, is_own=True).fewest(1) == 1
    assert Limits({"a": 3}, {1: 4}, least=2, is_own=True).fewest(1) == 2


def test_limits_of_pools_add_up_to_the_cap_of_each() -> None:
    limits = Limits({"a": 4, "b": 4, "home": 2}, {1: 8, 2: 8}, pools={"a": "spot", "b": "spot", "home": OWN}, caps={"spot": 5})
    assert limits.by_pool(1) == {OWN: 2, "spot": 5} and limits.engines(1) == 7
    assert limits.by_pool(2) == {OWN: 1, "spot": 2} and limits.engines(2) == 3
    assert limits.by_pool(1, [lease("home", 0), lease("a", 0)]) == {OWN: 1, "spot": 5}
    assert Limits({}, {1: 8}).by_pool(1) == {OWN: 0}, "`own` is always among them"


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"a": 2}, {"a": 2}, ""),
        ({"a": 2}, {"a": 2, "b": 2}, "2 slots joined: the pool may be 4"),
        ({"a": 2}, {"a": 2, "b": 1}, "1 slot joined: the pool may be 3"),
        ({"a": 2, "b": 3}, {"a": 2}, "3 slots left: the pool may be 2"),
        ({"a": 2, "b": 2}, {"a": 2, "c": 1}, "1 slot joined and 2 slots left: the pool may be 3"),
        ({"a": 2}, {"a": 2, "b": 9}, "9 slots joined: the pool may be 6 (rollout.max_actors)"),
        ({"a": 2}, {}, "2 slots left: the pool may be 0"),
    ],
)
def test_a_change_of_the_nodes_is_told_with_the_engines_that_it_allows(before: dict, now: dict, text: str) -> None:
    assert Limits(now, {1: 6}).since(Limits(before, {1: 6}), 1) == text


class Cluster:
    """Nodes that come and go: name → slots and labels."""

    def __init__(self, **nodes: tuple[int, dict[str, str]]) -> None:
        self.nodes = nodes
        self.said: list[str] = []

    def slots(self, labels: dict[str, str]) -> dict[str, int]:
        return {name: count for name, (count, own) in self.nodes.items() if has_labels({**own, NODE_LABEL: name}, labels)}

    def engine_nodes(self, labels: dict[str, str], home: str | None, width: int = 1) -> EnginePools:
        kinds = [PoolKind("rollout", labels), PoolKind(OWN, max_slots=0)] if labels else [PoolKind(OWN)]
        return self.engine_pools(kinds, home, width)

    def engine_pools(self, kinds: list[PoolKind], home: str | None = None, width: int = 1) -> EnginePools:
        nodes: Any = SimpleNamespace(slots=self.slots)
        return EnginePools(NodePools(nodes, kinds), width, lambda: home, self.said.append)


def test_limits_follow_the_nodes_with_the_labels() -> None:
    cluster = Cluster(home=(2, {}), spot=(3, SPOT))
    found = cluster.engine_nodes(SPOT, "home")
    assert found.limits({1: 8}, 1) == Limits({"spot": 3}, {1: 8}, 1, pools={"spot": "rollout"})
    cluster.nodes["more"] = (4, SPOT)
    assert found.limits({1: 8}, 1).engines(1) == 7 and found.labels() == SPOT
    del cluster.nodes["spot"]
    assert found.limits({1: 8}, 1).engines(1) == 4 and not cluster.said


def test_without_a_node_of_the_label_engines_work_on_the_learners_node_until_one_joins() -> None:
    cluster = Cluster(home=(2, {}), other=(9, {}))
    found = cluster.engine_nodes(SPOT, "home")
    for _ in range(2):
        assert found.labels() == {NODE_LABEL: "home"} and cluster.slots(found.labels()) == {"home": 2}
    alone = found.limits({1: 8}, 3)
    assert alone.engines(1) == 2 and alone.fewest(1) == 2 and len(cluster.said) == 1
    assert "no node labelled {'market': 'spot'} is left" in cluster.said[0] and "in this run's own slots" in cluster.said[0]
    cluster.nodes["spot"] = (1, SPOT)
    back = found.limits({1: 8}, 3)
    assert back.engines(1) == 1 and back.fewest(1) == 3 and found.labels() == SPOT
    assert cluster.said[1:] == ["rollout.nodes: engines work on nodes labelled {'market': 'spot'} again"]
    assert alone.since(back, 1) == "only the run's own node is left: the pool may be 2"
    assert back.since(alone, 1) == "nodes with the labels of rollout.nodes are back: the pool may be 1"


@pytest.mark.parametrize(("home", "width"), [(None, 1), ("home", 4)])
def test_engines_wait_for_a_node_of_the_label_if_the_learners_node_has_no_slots_for_one(home: str | None, width: int) -> None:
    cluster = Cluster(home=(2, {}))
    found = cluster.engine_nodes(SPOT, home, width)
    assert found.labels() == SPOT and found.limits({width: 8}, 1).engines(width) == 0
    assert len(cluster.said) == 1 and "engines wait for one, each for functions.lease_deadline_s at most" in cluster.said[0]


def test_if_the_learners_node_is_lost_too_engines_work_on_the_largest_that_is_left() -> None:
    cluster = Cluster(a=(1, {}), b=(2, {}), c=(2, {}))
    assert cluster.engine_nodes(SPOT, "lost", 2).labels() == {NODE_LABEL: "b"}
    cluster.nodes.clear()
    assert cluster.engine_nodes(SPOT, "lost").labels() == SPOT


def test_without_labels_all_nodes_are_for_engines_and_nothing_is_said() -> None:
    cluster = Cluster(home=(2, {}), spot=(3, SPOT))
    assert cluster.engine_nodes({}, None).limits({1: 8}, 1) == Limits({"home": 2, "spot": 3}, {1: 8}, 1) and not cluster.said


KINDS = [PoolKind("spot", SPOT, max_slots=2), PoolKind("large", {"gpu": "A100"}), PoolKind(OWN)]


def test_every_node_is_in_one_pool_and_engines_may_work_in_all() -> None:
    cluster = Cluster(home=(2, {}), a=(3, SPOT), b=(1, {**SPOT, "gpu": "A100"}), c=(4, {"gpu": "A100"}))
    found = cluster.engine_pools(KINDS, "home")
    assert found.slots() == {"spot": {"a": 3, "b": 1}, "large": {"c": 4}, OWN: {"home": 2}} and found.labels() == {}
    assert found.limits({1: 20}, 1).by_pool(1) == {"spot": 2, "large": 4, OWN: 2}
    for pool, nodes in found.slots().items():
        assert cluster.slots(found.pools.labels_of(pool)) == nodes, pool
    found.working = lambda: ["a", "a"]
    assert set(cluster.slots(found.labels())) == {"home", "c"}, "spot has the engines that it may have"


def test_lost_node_keeps_its_pool_and_others_are_own() -> None:
    cluster = Cluster(home=(2, {}), a=(3, SPOT))
    pools = cluster.engine_pools(KINDS).pools
    assert pools.pool_of("a").name == "spot"
    del cluster.nodes["a"]
    assert pools.pool_of("a").name == "spot" and pools.pool_of("home").name == pools.pool_of("never seen").name == OWN


def test_pool_without_nodes_is_a_warning_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(engine_pools, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster = Cluster(home=(2, {}), c=(4, {"gpu": "A100"}))
    found = cluster.engine_pools(KINDS, "home")
    for seconds in (0.0, 1.0, EMPTY_S / 2, EMPTY_S):
        now[0] = 1000.0 + seconds
        assert found.limits({1: 8}, 1).engines(1) == 6
    assert len(cluster.said) == 2 and all("no node of pool spot is there" in said for said in cluster.said)
    cluster.nodes["a"] = (3, SPOT)
    found.slots()
    assert cluster.said[2:] == ["rollout.pools: pool spot has nodes again"]
