"""Check that a cluster has the nodes that a recipe names by their labels, with as many slots as a run needs there at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.pools import OWN, has_labels, pool_of
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.lease import most_instances
from rlhfless_ray.functions.pool_messages import NODE_LABEL
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.engine_pools import engine_pools


def check_nodes(recipe: Recipe, nodes: Sequence[JsonObject], slots: Mapping[str, int], resource: str, *, grows: bool) -> None:
    """Raise UserError if labelled nodes are missing, or too small.

    Args:
        nodes: Ray's list.
        slots: node id → slots, of the nodes that are alive.
        grows: whether an autoscaler may bring further nodes, whose labels are not known.
    """
    labels = {node["NodeID"]: {**(node.get("Labels") or {}), NODE_LABEL: node["NodeID"]} for node in nodes}
    pools = engine_pools(recipe.rollout, recipe.price, resource)
    found: dict[str, dict[str, int]] = {pool.name: {} for pool in pools}
    for node, count in slots.items():
        found[pool_of(labels[node], pools).name][node] = count
    if recipe.rollout.nodes:
        _check_engines(recipe, found[pools[0].name])
    for number, pool in enumerate(pools[:-1] if recipe.rollout.pools else ()):
        if not found[pool.name] and not grows:
            raise UserError(
                f"rollout.pools.{number}: no node has the labels {dict(pool.labels)} of pool {pool.name}, and no autoscaler of this "
                "cluster may bring one; start such a node, or leave the pool out"
            )
    needed = {"learner": True, "critic": recipe.algorithm.has_critic, "reference": recipe.has_reference}
    for name in [name for name, there in needed.items() if there and not grows]:
        section = getattr(recipe, name)
        there = slots if not recipe.rollout.pools or not found[OWN] else found[OWN]
        if section.nodes:
            there = {node: count for node, count in slots.items() if has_labels(labels[node], section.nodes)}
        if section.ranks > sum(there.values()):
            where = f"nodes labelled {section.nodes}" if section.nodes else "the nodes that no pool of rollout.pools has"
            raise UserError(
                f"{name}.nodes: {name}.ranks = {section.ranks} needs as many slots at once, but {where} have {sum(there.values())}; start "
                "such nodes, or name other labels"
            )


def _check_engines(recipe: Recipe, slots: Mapping[str, int]) -> None:
    """Check the nodes that `rollout.nodes` names."""
    rollout = recipe.rollout
    if rollout.min_actors * rollout.least_width > sum(slots.values()):
        raise UserError(
            f"rollout.nodes: engines need {rollout.min_actors * rollout.least_width} slots on nodes labelled {rollout.nodes}, but these "
            f"have {sum(slots.values())}; start such nodes, or name other labels"
        )
    check_room(recipe, slots)


def check_room(recipe: Recipe, slots: Mapping[str, int]) -> None:
    """Raise UserError if nodes with these slots have no room for the fewest engines, each of which is on one node."""
    width = recipe.rollout.least_width
    if recipe.rollout.min_actors > (most := most_instances(slots, width)):
        raise UserError(
            f"rollout.min_actors: {recipe.rollout.min_actors} engines of rollout.tensor_parallel = {width} slots, all of one node, are "
            f"more than the {most} that the nodes have room for; lower one of them"
        )
