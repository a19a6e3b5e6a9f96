"""Pools of nodes in a recipe: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from placement.pools import OWN, PoolKind
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.engine_pools import engine_pools

pytestmark = pytest.mark.pure
TREE: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}
SPOT = {"market": "spot"}


def pools_of(rollout: dict[str, Any], price: dict[str, float] | None = None) -> tuple[PoolKind, ...]:
    recipe = Recipe.parse({**TREE, "rollout": rollout, "price": {"cpu_slot_per_hour": 4.0, **(price or {})}})
    return engine_pools(Recipe.parse(recipe.model_dump()).rollout, recipe.price, "cpu")


def test_without_pools_all_nodes_are_own() -> None:
    assert pools_of({}) == (PoolKind(OWN, price_per_hour=4.0),)


def test_rollout_nodes_is_one_pool_with_its_price() -> None:
    one, own = pools_of({"nodes": SPOT}, {"rollout_slot_per_hour": 1.0})
    assert (one.labels, one.price_per_hour) == (SPOT, 1.0) and own.max_slots == 0
    assert pools_of({"nodes": SPOT})[0].price_per_hour == 4.0


def test_pools_keep_their_order_and_own_is_last() -> None:
    given = [
        {"name": "cheap", "labels": SPOT, "price_per_hour": 1.0, "preempt_per_hour": 0.5, "notice_s": 30, "max": 3, "width": 2},
        {"name": "A100"},
    ]
    cheap, large, own = pools_of({"pools": given})
    assert cheap == PoolKind("cheap", SPOT, 1.0, 0.5, 30.0, 3, 2)
    assert (large.labels, large.price_per_hour) == ({"ray.io/accelerator-type": "A100"}, 4.0) and own.max_slots is None


def test_labels_follow_from_name_of_a_market() -> None:
    assert [pool.labels for pool in pools_of({"pools": [{"name": "spot"}]})] == [{"ray.io/market-type": "spot"}, {}]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"pools": [{"name": "a", "labels": SPOT, "price_per_hour": -1}]}, r"`rollout.pools.0.price_per_hour`: .* \(got -1\)"),
        ({"pools": [{"name": "a", "labels": SPOT}, {"name": "a"}]}, "two pools are named a"),
        (
            {"pools": [{"name": "a", "labels": SPOT}, {"name": "b", "labels": {**SPOT, "zone": "a"}}]},
            "every node of pool b is one of pool a",
        ),
        ({"pools": [{"name": "own", "labels": SPOT}]}, "`own` is the pool of the nodes that no other pool has"),
        ({"pools": [{"name": "AMD-Instinct-MI210"}]}, "there is no engine for AMD-Instinct-MI210"),
        ({"pools": [{"name": "a", "labels": SPOT}], "nodes": SPOT}, "rollout.nodes: it names the only pool"),
        ({"pools": [{"labels": SPOT}]}, "`rollout.pools.0.name`"),
    ],
)
def test_mistake_is_one_sentence(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        pools_of(rollout)
    assert "\n" not in str(caught.value)


def test_rollout_price_needs_rollout_nodes() -> None:
    with pytest.raises(UserError, match=r"give rollout.pools their own prices"):
        pools_of({"pools": [{"name": "spot"}]}, {"rollout_slot_per_hour": 1.0})
