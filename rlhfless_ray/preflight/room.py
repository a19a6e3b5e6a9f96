"""Find out which memory there is: on this machine, or on the nodes of a cluster."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rlhfless_ray.local.machine_memory import memory_bytes, visible_gpus
from rlhfless_ray.preflight.need import CPU, GPU, Room
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

if TYPE_CHECKING:
    from rlhfless_ray.local.cluster import RayCluster

ASK_S = 60.0  # timeout of queries of nodes' memory


def starts_ray(recipe: Recipe | SupervisedRecipe) -> bool:
    """Return whether the run starts a private cluster."""
    joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    return not joined and not recipe.cluster.address and not os.environ.get("RAY_ADDRESS")


def local_room(recipe: Recipe | SupervisedRecipe, resource: str | None = None) -> Room:
    """Return the memory of a private cluster on this machine. `resource`: kind of its slots, if known."""
    gpus = visible_gpus()
    gpu = resource == GPU if resource else bool(gpus) and recipe.functions.slot != CPU
    slots = gpus if gpu else recipe.cluster.cpus or len(os.sched_getaffinity(0))
    there = memory_bytes(gpu)
    return Room(GPU if gpu else CPU, slots, there, there, has_driver=not gpu, host_bytes=memory_bytes(False) if gpu else None)


def ray_room(resource: str, slots: int) -> Room:
    """Return the memory of the joined Ray cluster. Queries every node, or one node per kind of GPU."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gpu = resource == GPU
    kinds: dict[str, str] = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("GPU" if gpu else "CPU", 0) >= 1:
            kind = next((name for name in node["Resources"] if gpu and name.startswith("accelerator_type:")), node["NodeID"])
            kinds.setdefault(kind, node["NodeID"])
    ask = ray.remote(num_cpus=0, max_retries=0)(memory_bytes)
    refs = [ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(gpu) for node in kinds.values()]
    try:
        sizes = ray.get(refs, timeout=ASK_S)
    except (RayError, GetTimeoutError):
        sizes = [None]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return Room(resource, slots, None)
    return Room(resource, slots, max(known), sum(known))


def cluster_room(cluster: RayCluster, recipe: Recipe | SupervisedRecipe, resource: str) -> Room:
    """Return the memory of a started RayCluster."""
    from rlhfless_ray.functions.cluster_nodes import cluster_slots

    return local_room(recipe, resource) if cluster.private else ray_room(resource, cluster_slots(resource))


def room_ahead(recipe: Recipe | SupervisedRecipe) -> Room:
    """Return the memory of the cluster that a run would use, before it starts."""
    from rlhfless_ray.local.cluster import RayCluster

    if starts_ray(recipe):
        return local_room(recipe)
    cluster = RayCluster(recipe)  # joined for this query only
    try:
        cluster.start()
        return cluster_room(cluster, recipe, cluster.resource())
    finally:
        cluster.stop()
