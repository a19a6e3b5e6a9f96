"""Check whether the models of a supervised stage fit the memory, before anything starts.

A refusal rests on the lower bounds of `placement.memory` alone. Activations do not count.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from placement import memory
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.memory_check import CPU, GPU, SMALL_BYTES, DoesNotFit, Room, sentence
from rlhfless_ray.run.memory_needs import Model, Need, gb


def check_stage(recipe: SupervisedRecipe, find_room: Callable[[], Room], fetch: bool = True) -> str:
    """Raise DoesNotFit if the least memory of the ranks is not available.

    Args:
        recipe: The stage.
        find_room: Returns the available memory. It is called unless all needs are small.
        fetch: Ask the Hugging Face hub for the configuration of a model that is not on this machine.

    Returns:
        A note if the available memory is unknown, else an empty text.
    """
    models = _models(recipe, fetch)
    if "policy" not in models or all(need.bytes <= SMALL_BYTES for kind in (CPU, GPU) for need in stage_needs(recipe, models, kind)):
        return ""
    room = find_room()
    need = _shortage(recipe, models, room)
    if room.bytes is None:
        least = max(need.bytes for need in stage_needs(recipe, models, room.resource, room.slots))
        return f"the memory of a {'GPU' if room.resource == GPU else 'node'} is not known here; a rank needs at least {gb(least)}"
    if need is not None:
        raise DoesNotFit(f"{need.key}: {sentence(need, room)}; {_advice(recipe, models, room)}")
    return ""


def stage_needs(recipe: SupervisedRecipe, models: dict[str, Model], resource: str, slots: int = 1) -> list[Need]:
    """Return the needs of one rank, and where slots are cores also of all ranks.

    The number of ranks is the one that needs least: the most on GPUs, which share optimizer state, and the fewest on cores.
    """
    policy, learner, width = models["policy"], recipe.learner, memory.VALUE_BYTES[recipe.policy.dtype]
    ranks = max(recipe.min_ranks, min(learner.ranks, slots)) if resource == GPU else recipe.min_ranks
    parameters = policy.body if recipe.task == "rm" else policy.parameters
    whole = memory.end_parameters(policy.config) - (policy.parameters - parameters)
    division = (learner.tensor_parallel, whole)
    training = memory.Training(ranks, learner.zero_stage, width, learner.offloads_optimizer, recipe.lora.rank > 0, *division)
    rank = memory.rank_memory(parameters, training)
    teacher = (("teacher", models["teacher"].parameters * width),) if "teacher" in models else ()
    at_peak = (*(rank.on_device if resource == GPU else rank.training), *teacher)
    loading = (("weights while loading", rank.opening), *teacher)
    if "reference" in models:  # its log-probabilities are computed before the optimizer's state is made
        loading = (*loading, ("reference", models["reference"].parameters * width))
    needs = [Need("a rank", policy.key, parts, True) for parts in (loading, at_peak)]
    if resource != GPU:
        several = "the rank" if ranks == 1 else f"the stage with its {ranks} ranks"
        needs += [Need(several, policy.key, tuple((what, ranks * size) for what, size in parts)) for parts in (loading, at_peak)]
    return needs


def _models(recipe: SupervisedRecipe, fetch: bool) -> dict[str, Model]:
    """Return the models whose sizes are known: the policy, and another reference or the teacher."""
    from rlhfless_ray.weights.load_policy import cached_folder, small_files

    models = {}
    for who in ("policy", "reference", "teacher"):
        text, key = getattr(recipe, who).path, f"{who}.path"
        path = Path() if not text else small_files(text, key) if fetch else cached_folder(text)
        model = Model.of(path, key) if text and path.is_dir() else None
        if model is not None:
            models[who] = model
    return models


def _shortage(recipe: SupervisedRecipe, models: dict[str, Model], room: Room) -> Need | None:
    return room.first_without_room(stage_needs(recipe, models, room.resource, room.slots))


def _advice(recipe: SupervisedRecipe, models: dict[str, Model], room: Room) -> str:
    """Return the fewest changes of settings with which everything fits."""
    changes = list(_changes(recipe, room))
    for count in (1, 2, 3):
        for some in itertools.combinations(changes, count):
            merged = {key: value for change in some for key, value in change.items()}
            try:
                changed = SupervisedRecipe.parse(recipe.with_settings(merged).model_dump(mode="json"))
            except UserError:
                continue
            if _shortage(changed, models, room) is None:
                return "it may fit with " + " and ".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in merged.items())
    return f"no setting makes it fit: take a smaller model, or {'GPUs' if room.resource == GPU else 'nodes'} with more memory"


def _changes(recipe: SupervisedRecipe, room: Room) -> Iterator[dict[str, Any]]:
    """Yield settings that save memory: first those that change the result only by rounding."""
    learner = recipe.learner
    if room.resource == GPU:
        if room.slots > learner.ranks or learner.zero_stage < 3:
            yield {"learner.ranks": max(room.slots, learner.ranks), "learner.zero_stage": 3}
        if not learner.offloads_optimizer:
            yield {"learner.optimizer_offload": True, "learner.zero_stage": max(1, learner.zero_stage)}
    elif recipe.min_ranks > 1:
        yield {"learner.ranks": 1}
    if recipe.policy.dtype == "float32":
        yield {"policy.dtype": "bfloat16", "learner.zero_stage": max(1, learner.zero_stage)}
    if not recipe.lora.rank:
        yield {"lora.rank": 16}
