"""Check whether a recipe's models fit the memory, before anything starts.

A refusal rests on the lower bounds of `placement.memory` alone.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement import memory
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.engine_settings import check_kernels
from rlhfless_ray.learn.model_checks import refusal
from rlhfless_ray.local.machine_memory import memory_bytes, visible_gpus
from rlhfless_ray.preflight.memory_needs import (
    SURE_SEQUENCES,
    UNREAD,
    Lengths,
    ModelSize,
    Need,
    device_needs,
    gb,
    host_needs,
    kv_mb,
    models_of,
)
from rlhfless_ray.recipe import Recipe

if TYPE_CHECKING:
    from rlhfless_ray.local.cluster import RayCluster
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

SMALL_BYTES = 4e9  # smaller needs fit every node and device in use, so the cluster is not queried
ASK_S = 60.0  # timeout of queries of nodes' memory
CPU, GPU = "cpu", "gpu"


class DoesNotFit(UserError):
    """A model needs more memory than there is."""


@dataclass(frozen=True)
class Room:
    """The available memory.

    `bytes`: of the largest GPU, or of the largest node if slots are cores; None if unknown. `total_bytes`: of all such nodes.
    `has_driver`: the driver is on the only node. `host_bytes`: host memory beside the GPUs of the only node; None if unknown.
    """

    resource: str
    slots: int
    bytes: int | None
    total_bytes: int | None = None
    has_driver: bool = False
    host_bytes: int | None = None

    def holds(self, need: Need, used_share: float = 1.0) -> bool:
        """Return whether the memory holds this need. `used_share`: share of the memory that may be used."""
        if need.on_host:
            return self.host_bytes is None or need.bytes <= self.host_bytes
        if self.bytes is None:
            return True
        there = self.bytes * need.share if need.alone or self.resource == GPU else self.total_bytes or self.bytes
        return need.bytes <= used_share * there

    def first_without_room(self, needs: Iterable[Need], used_share: float = 1.0) -> Need | None:
        if self.resource != GPU and self.bytes == self.total_bytes:
            needs = [need for need in needs if not need.alone]  # on one node, processes together need more than each alone
        return next((need for need in needs if not self.holds(need, used_share)), None)


# ---- whether it fits --------------------------------------------------------------------------------------------


def shortage(recipe: Recipe, models: dict[str, ModelSize], room: Room, lengths: Lengths = UNREAD) -> Need | None:
    """Return the first need that does not fit, or None."""
    needs = device_needs(recipe, models, lengths) if room.resource == GPU else host_needs(recipe, models, room.has_driver, lengths)
    return room.first_without_room(needs)


def check(recipe: Recipe, models: dict[str, ModelSize], find_room: Callable[[], Room], lengths: Lengths = UNREAD) -> str:
    """Raise DoesNotFit if the least memory of the recipe's functions is not available.

    Returns a note if the available memory is unknown, else an empty text. `find_room` is called unless all needs are small.
    """
    devices = device_needs(recipe, models, lengths)
    if all(need.bytes <= SMALL_BYTES for need in [*devices, *host_needs(recipe, models, True, lengths)]):
        return ""
    room = find_room()
    if room.bytes is None:
        needed = ", ".join(f"{need.who} {gb(need.bytes)}" for need in devices)
        return f"the memory of a {'GPU' if room.resource == GPU else 'node'} is not known here; the run needs at least: {needed}"
    recipe = _with_fitting_width(recipe, models, room, lengths)
    need = shortage(recipe, models, room, lengths)
    if need is not None:
        raise DoesNotFit(
            f"{need.key}: {sentence(need, room)}; "
            + advice(recipe, models, room, lengths, lambda changed: shortage(changed, models, room, lengths) is None)
        )
    return ""


def _with_fitting_width(recipe: Recipe, models: dict[str, ModelSize], room: Room, lengths: Lengths) -> Recipe:
    """Return the recipe with the narrowest engines that fit, if their width is automatic."""
    if recipe.rollout.tensor_parallel != "auto" or room.resource != GPU or "policy" not in models:
        return recipe
    widths = memory.engine_widths(models["policy"].config, room.slots) or [1]
    changed = [recipe.with_settings({"rollout.tensor_parallel": width}) for width in widths]
    fitting = (one for one in changed if all(room.holds(need) for need in device_needs(one, models, lengths) if need.is_engine))
    return next(fitting, recipe)


def sentence(need: Need, room: Room) -> str:
    if need.on_host:
        return f"{need.who} need {need} of host memory, and this machine has {gb(room.host_bytes or 0)}"
    assert room.bytes is not None
    if room.resource == GPU:
        part = f", of which {gb(room.bytes * need.share)} may be used (rollout.gpu_memory_share={need.share:g})" if need.share < 1 else ""
        where = "one device" if need.devices == 1 else f"each of its {need.devices} devices"
        return f"{need.who} needs {need} on {where}, and a GPU here has {gb(room.bytes)}{part}"
    if need.alone:
        return f"{need.who} needs {need} of memory, and the largest node has {gb(room.bytes)}"
    there = f"this machine has {gb(room.bytes)}" if room.has_driver else f"the nodes have {gb(room.total_bytes or room.bytes)} together"
    return f"{need.who} needs {need} of memory at once, and {there}"


def advice(
    recipe: Recipe,
    models: dict[str, ModelSize],
    room: Room,
    lengths: Lengths,
    fits: Callable[[Recipe], bool],
    first: Iterable[dict[str, Any]] = (),
) -> str:
    """Return advice: the fewest changes of settings with which everything fits. `first`: changes to try before others."""
    changes = [*first, *_changes(recipe, models, room, lengths)]
    for count in (1, 2, 3):
        for some in itertools.combinations(changes, count):
            merged = {key: value for change in some for key, value in change.items()}
            changed = recipe.with_settings(merged)
            if sum(map(len, some)) == len(merged) and fits(changed) and _is_valid(changed):
                return "it may fit with " + " and ".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in merged.items())
    return f"no setting makes it fit: take a smaller model, or {'GPUs' if room.resource == GPU else 'nodes'} with more memory"


def _changes(recipe: Recipe, models: dict[str, ModelSize], room: Room, lengths: Lengths) -> Iterator[dict[str, Any]]:
    """Yield settings that save memory: first those that change the training result only by rounding."""
    learner, rollout = recipe.learner, recipe.rollout
    counts = sorted({*(2**k for k in range(room.slots.bit_length()) if 2**k <= room.slots), room.slots})
    for count in counts:
        if count > learner.ranks:
            if learner.zero_stage in (1, 2):
                yield {"learner.ranks": count}
            yield {"learner.ranks": count, "learner.zero_stage": 3}
        if recipe.algorithm.has_critic and count > recipe.critic.ranks:
            yield {"critic.ranks": count}
    if room.resource == GPU:
        if not learner.offloads_optimizer:
            yield {"learner.optimizer_offload": True, **({} if learner.zero_stage else {"learner.zero_stage": 2})}
        if rollout.gpu_memory_share < 0.95:
            yield {"rollout.gpu_memory_share": 0.95}
        widths = memory.engine_widths(models["policy"].config, room.slots) if "policy" in models else None
        yield from ({"rollout.tensor_parallel": count} for count in widths or () if count > rollout.least_width)
        for count in counts:
            if recipe.has_reference and _divides(count, models.get("reference", models.get("policy"))):
                yield {"reference.ranks": count, "reference.tensor_parallel": count}
            if _divides(count, models.get("reward")):
                yield {"reward.tensor_parallel": count}
    else:
        for key, value in (
            ("learner.ranks", learner.ranks),
            ("critic.ranks", recipe.critic.ranks),
            ("reference.ranks", recipe.reference.ranks),
            ("rollout.min_actors", rollout.min_actors),
        ):
            if value > 1:
                yield {key: 1}
        least = kv_mb(recipe, models["policy"], SURE_SEQUENCES, lengths) if "policy" in models else 0
        if rollout.kv_cache_mb != "auto" and 0 < least < rollout.kv_cache_mb:
            yield {"rollout.kv_cache_mb": least}
    if recipe.policy.dtype == "float32":
        yield {"policy.dtype": "bfloat16", **({} if learner.zero_stage else {"learner.zero_stage": 1})}
    shorter = rollout.max_tokens // 2
    while shorter and room.resource == GPU:
        yield {"rollout.max_tokens": shorter}
        shorter //= 2
    if not recipe.lora.rank:
        yield {"lora.rank": 16}
    if rollout.rolls_out_ahead and room.resource != GPU:
        yield {"rollout.max_lag_steps": 0}


def _divides(width: int, model: ModelSize | None) -> bool:
    """Return whether several processes can share a copy of the model."""
    return width > 1 and model is not None and refusal(model.config, width) is None


def _is_valid(recipe: Recipe) -> bool:
    try:
        Recipe.parse(recipe.model_dump(mode="json"))
    except UserError:
        return False
    return True


# ---- available memory -------------------------------------------------------------------------------------------


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


def check_ahead(recipe: Recipe, fetch: bool = True, find_room: Callable[[], Room] | None = None) -> None:
    """Check the memory before the models are read, because reading alone may take more than the driver has. `fetch`: see `models_of`.

    Raises DoesNotFit, or UserError, see `check_kernels_and_width`.
    """
    if recipe.run.episodes is not None:  # they determine the steps once the prompts are read: at least one
        recipe = recipe.with_settings({"run.steps": 1})
    check(recipe, models_of(recipe, fetch), find_room or (lambda: room_ahead(recipe)))
    check_kernels_and_width(recipe)


def check_kernels_and_width(recipe: Recipe) -> None:
    """If the run starts a private cluster, raise UserError for settings that its slots cannot have."""
    if starts_ray(recipe):
        room = local_room(recipe)
        check_kernels(recipe, room.resource)
        if max(recipe.rollout.least_width, recipe.reward.tensor_parallel) > 1:
            from rlhfless_ray.local.cluster import check_width

            check_width(recipe, room.slots, room.resource)


def starts_ray(recipe: Recipe | SupervisedRecipe) -> bool:
    """Return whether the run starts a private cluster."""
    joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    return not joined and not recipe.cluster.address and not os.environ.get("RAY_ADDRESS")


def room_ahead(recipe: Recipe) -> Room:
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


def cluster_room(cluster: RayCluster, recipe: Recipe | SupervisedRecipe, resource: str) -> Room:
    """Return the memory of a started RayCluster."""
    from rlhfless_ray.functions.cluster_nodes import cluster_slots

    return local_room(recipe, resource) if cluster.private else ray_room(resource, cluster_slots(resource))


def check_on(cluster: RayCluster, resource: str, recipe: Recipe, lengths: Lengths) -> str:
    """Call `check` on the run's cluster with the prompts' real lengths."""
    return check(recipe, models_of(recipe), lambda: cluster_room(cluster, recipe, resource), lengths)
