"""The pools of nodes that a recipe names for its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.pools import OWN, PoolKind
from rlhfless_ray.recipe.pool_sections import PoolConfig
from rlhfless_ray.recipe.rollout_sections import RolloutConfig
from rlhfless_ray.recipe.run_sections import PriceConfig

ONE_POOL = "rollout"  # name of the pool that `rollout.nodes` describes


def mistakes_in_pools(rollout: RolloutConfig) -> Iterator[str]:
    """Check that pools can be told apart."""
    names, labels = [pool.name for pool in rollout.pools], [pool.node_labels for pool in rollout.pools]
    if rollout.pools and rollout.nodes:
        yield "rollout.nodes: it names the only pool, and rollout.pools names several; put its labels into one of them"
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield f"rollout.pools: two pools are named {twice}; give one another name"
    for later, own in enumerate(labels):
        if earlier := next((names[i] for i in range(later) if labels[i].items() <= own.items()), None):
            yield f"rollout.pools: every node of pool {names[later]} is one of pool {earlier} before it; change the labels or the order"


def engine_pools(rollout: RolloutConfig, price: PriceConfig, resource: str) -> tuple[PoolKind, ...]:
    """Return the pools on which engines may work, `OWN` last. `resource`: "cpu" or "gpu".

    `rollout.nodes` means one pool, beside which engines work on other nodes only while it has room for none. `rollout.pools` are used
    together with all other nodes.
    """
    usual = price.slot_per_hour(resource)
    if rollout.nodes:
        special = price.rollout_slot_per_hour
        return PoolKind(ONE_POOL, rollout.nodes, usual if special is None else special), PoolKind(OWN, {}, usual, max_slots=0)
    return (*_named(rollout.pools, usual), PoolKind(OWN, {}, usual))


def _named(pools: Sequence[PoolConfig], usual: float) -> Iterator[PoolKind]:
    for pool in pools:
        price = usual if pool.price_per_hour is None else pool.price_per_hour
        yield PoolKind(pool.name, pool.node_labels, price, pool.preempt_per_hour, pool.notice_s, pool.max, pool.width)
