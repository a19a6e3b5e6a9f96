"""Refuse a job that cannot fit the memory, before anything starts. A refusal rests on lower bounds alone."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.engine_settings import check_kernels
from rlhfless_ray.local.machine_memory import memory_bytes, visible_gpus
from rlhfless_ray.preflight.divisions import divisions, on_more_ranks
from rlhfless_ray.preflight.memory_needs import CPU, GPU, JobMemory, Need, Room, Settings, gb
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.preflight.stage_memory import StageMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

if TYPE_CHECKING:
    from rlhfless_ray.local.cluster import RayCluster

SMALL_BYTES = 4e9  # smaller needs fit every node and device in use, so the cluster is not queried
ASK_S = 60.0  # timeout of queries of nodes' memory


class DoesNotFit(UserError):
    """A model needs more memory than there is."""


def job_of(recipe: Recipe | SupervisedRecipe, *, fetch: bool = True) -> JobMemory:
    """Return the memory of a recipe's processes, before prompts or rows are read. `fetch`: see `models_of`."""
    if isinstance(recipe, SupervisedRecipe):
        return StageMemory.of(recipe, fetch=fetch)
    if recipe.run.episodes is not None:  # they determine the steps once the prompts are read: at least one
        recipe = recipe.with_settings({"run.steps": 1})
    return RunMemory.of(recipe, fetch=fetch)


def check_ahead(recipe: Recipe | SupervisedRecipe, fetch: bool = True, find_room: Callable[[], Room] | None = None) -> None:
    """Check the memory before the models are read, because reading alone may take more than the driver has. `fetch`: see `models_of`.

    Raises DoesNotFit, or UserError, see `check_kernels_and_width`.
    """
    check(job_of(recipe, fetch=fetch), find_room or (lambda: room_ahead(recipe)))
    if isinstance(recipe, Recipe):
        check_kernels_and_width(recipe)


def check_kernels_and_width(recipe: Recipe) -> None:
    """If the run starts a private cluster, raise UserError for settings that its slots cannot have."""
    if starts_ray(recipe):
        room = local_room(recipe)
        check_kernels(recipe, room.resource)
        if max(recipe.rollout.least_width, recipe.reward.tensor_parallel) > 1:
            from rlhfless_ray.local.cluster import check_width

            check_width(recipe, room.slots, room.resource)


def check(job: JobMemory, find_room: Callable[[], Room]) -> str:
    """Raise DoesNotFit if the least memory of the job's processes is not available.

    Returns a note if the available memory is unknown, else an empty text. `find_room` is called unless all needs are small.
    """
    if all(need.bytes <= SMALL_BYTES for room in job.rooms for need in job.least(room)):
        return ""
    room = find_room()
    if room.bytes is None:
        alone = [need for need in job.least(room) if need.alone]
        largest = {need.who: max(one.bytes for one in alone if one.who == need.who) for need in alone}
        needed = ", ".join(f"{who} {gb(size)}" for who, size in largest.items())
        return f"the memory of a {room.device} is not known here; the run needs at least: {needed}"
    job = _with_fitting_width(_with_fitting_division(job, room), room)
    need = shortage(job, room)
    if need is not None:
        advice = advise(job, room, lambda changed: shortage(changed, room) is None)
        raise DoesNotFit(f"{need.key}: {room.shortage(need)}; {advice}")
    return ""


def shortage(job: JobMemory, room: Room) -> Need | None:
    """Return the first need that does not fit, or None."""
    return room.first_without_room(job.least(room))


def _with_fitting_division(job: JobMemory, room: Room) -> JobMemory:
    """Return the job with the first division of the learner's state that fits, of those that are left open."""
    more: JobMemory | None = job
    while more is not None:
        for division in divisions(more):
            if shortage(_with_fitting_width(divided := more.with_settings(division), room), room) is None:
                return divided
        more = on_more_ranks(more, room.slots)
    return job


def _with_fitting_width(job: JobMemory, room: Room) -> JobMemory:
    """Return the job with the narrowest engines that fit, if their width is automatic."""
    if not isinstance(job, RunMemory) or job.recipe.rollout.tensor_parallel != "auto" or not room.on_gpu:
        return job
    for width in job.engine_widths(room):
        changed = job.with_settings({"rollout.tensor_parallel": width})
        if all(room.holds(need) for need in changed.least(room) if need.is_engine):
            return changed
    return job


def advise(job: JobMemory, room: Room, fits: Callable[[JobMemory], bool], first: Iterable[Settings] = ()) -> str:
    """Return advice: the fewest changes of settings with which everything fits. `first`: changes to try before others."""
    changes = [*first, *job.savings(room)]
    for count in (1, 2, 3):
        for some in itertools.combinations(changes, count):
            merged = {key: value for change in some for key, value in change.items()}
            agree = all(merged[key] == value for change in some for key, value in change.items())
            if agree and fits(changed := job.with_settings(merged)) and _is_valid(changed):
                return "it may fit with " + " and ".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in merged.items())
    return f"no setting makes it fit: take {job.advice_without(room)}"


def _is_valid(job: JobMemory) -> bool:
    try:
        type(job.recipe).parse(job.recipe.model_dump(mode="json"))
    except UserError:
        return False
    return True


# ---- available memory -------------------------------------------------------------------------------------------


def starts_ray(recipe: Recipe | SupervisedRecipe) -> bool:
    """Return whether the run starts a private cluster."""
    joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    return not joined and not recipe.cluster.address and not os.environ.get("RAY_ADDRESS")


def local_room(recipe: Recipe | SupervisedRecipe, resource: str | None = None) -> Room:
    """Return the memory of a private cluster on this machine. `resource`: kind of its slots, if known."""
    gpus = visible_gpus()
    gpu = resource == GPU if resource else bool(gpus) and recipe.functions.slot != CPU
    slots = gpus if gpu else recipe.cluster.private_cpus or len(os.sched_getaffinity(0))
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
