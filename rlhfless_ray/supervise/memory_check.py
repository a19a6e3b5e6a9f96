"""Check whether the models of a supervised stage fit the memory, before anything starts.

A refusal rests on the lower bounds of `placement.memory` alone. Of activations the inputs of all layers count for the longest row, once
the rows are read: they are kept even where activations are recomputed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from placement import memory
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.model_checks import slicing_refusal
from rlhfless_ray.preflight.memory_check import CPU, GPU, SMALL_BYTES, DoesNotFit, Room, sentence
from rlhfless_ray.preflight.memory_needs import ModelSize, Need, gb
from rlhfless_ray.recipe.learn_sections import even_ranks
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe


def check_stage(recipe: SupervisedRecipe, find_room: Callable[[], Room], fetch: bool = True, row_tokens: int = 0) -> str:
    """Raise DoesNotFit if the least memory of the ranks is not available.

    Args:
        recipe: The stage.
        find_room: Returns the available memory. It is called unless all needs are small.
        fetch: Ask the Hugging Face hub for the configuration of a model that is not on this machine.
        row_tokens: Tokens of the longest row; 0: not known yet.

    Returns:
        A note if the available memory is unknown, else an empty text.
    """
    models = models_of_stage(recipe, fetch)
    if "policy" not in models:
        return ""
    if all(need.bytes <= SMALL_BYTES for kind in (CPU, GPU) for need in stage_needs(recipe, models, kind, 1, row_tokens)):
        return ""
    room = find_room()
    need = _shortage(recipe, models, room, row_tokens)
    if room.bytes is None:
        least = max(need.bytes for need in stage_needs(recipe, models, room.resource, room.slots, row_tokens))
        return f"the memory of a {'GPU' if room.resource == GPU else 'node'} is not known here; a rank needs at least {gb(least)}"
    if need is not None:
        raise DoesNotFit(f"{need.key}: {sentence(need, room)}; {_advice(recipe, models, room, row_tokens)}")
    return ""


def stage_training(recipe: SupervisedRecipe, policy: ModelSize, resource: str, slots: int) -> tuple[int, memory.Training]:
    """Return the number of the model's parameters, and how the ranks train it.

    The number of ranks is the one that needs least: on GPUs the most that share copies evenly, and the fewest on cores.
    """
    learner = recipe.learner
    most = even_ranks(min(learner.ranks, slots), learner.tensor_parallel)
    ranks = max(recipe.min_ranks, most) if resource == GPU else recipe.min_ranks
    parameters = policy.body if recipe.task == "rm" else policy.parameters
    whole = memory.end_parameters(policy.config) - (policy.parameters - parameters)
    division = (learner.on_ranks(ranks).tensor_parallel, whole, learner.on_ranks(ranks).sequence_parallel)
    width = memory.VALUE_BYTES[recipe.policy.dtype]
    return parameters, memory.Training(ranks, learner.zero_stage, width, learner.offloads_optimizer, recipe.lora.rank > 0, *division)


def teacher_bytes(teacher: ModelSize, training: memory.Training) -> int:
    """Return the bytes of a teacher's weights on one rank."""
    return replace(training, undivided=memory.end_parameters(teacher.config)).own(teacher.parameters) * training.value_bytes


def stage_needs(recipe: SupervisedRecipe, models: dict[str, ModelSize], resource: str, slots: int = 1, row_tokens: int = 0) -> list[Need]:
    """Return the needs of one rank, and where slots are cores also of all ranks. `row_tokens`: see `check_stage`."""
    policy = models["policy"]
    parameters, training = stage_training(recipe, policy, resource, slots)
    ranks, width = training.ranks, training.value_bytes
    own_tokens = -(-row_tokens // training.sequence_parallel)
    rank = memory.rank_memory(parameters, training, memory.activation_bytes(policy.config, own_tokens, width))
    teacher: tuple[tuple[str, int], ...] = ()
    if "teacher" in models:
        teacher = (("teacher", teacher_bytes(models["teacher"], training)),)
    at_peak = (*(rank.on_device if resource == GPU else rank.training), *teacher)
    loading = (("weights while loading", rank.weights), *teacher)
    if "reference" in models:  # its log-probabilities are computed before the optimizer's state is made
        loading = (*loading, ("reference", models["reference"].parameters * width))
    if row_tokens:
        at_peak = tuple((f"activations of a row of {row_tokens} tokens" if what == "activations" else what, x) for what, x in at_peak)
    needs = [Need("a rank", policy.key, parts, True) for parts in (loading, at_peak)]
    if resource != GPU:
        several = "the rank" if ranks == 1 else f"the stage with its {ranks} ranks"
        needs += [Need(several, policy.key, tuple((what, ranks * size) for what, size in parts)) for parts in (loading, at_peak)]
    return needs


def models_of_stage(recipe: SupervisedRecipe, fetch: bool = True) -> dict[str, ModelSize]:
    """Return the models whose sizes are known: the policy, and another reference or the teacher."""
    from rlhfless_ray.weights.load_policy import cached_folder, small_files

    models = {}
    for who in ("policy", "reference", "teacher"):
        text, key = getattr(recipe, who).path, f"{who}.path"
        path = Path() if not text else small_files(text, key) if fetch else cached_folder(text)
        model = ModelSize.of(path, key) if text and path.is_dir() else None
        if model is not None:
            models[who] = model
    return models


def _shortage(recipe: SupervisedRecipe, models: dict[str, ModelSize], room: Room, row_tokens: int) -> Need | None:
    return room.first_without_room(stage_needs(recipe, models, room.resource, room.slots, row_tokens))


def _advice(recipe: SupervisedRecipe, models: dict[str, ModelSize], room: Room, row_tokens: int) -> str:
    """Return the fewest changes of settings with which everything fits."""
    changes = list(_changes(recipe, models, room))
    for count in (1, 2, 3):
        for some in itertools.combinations(changes, count):
            merged = {key: value for change in some for key, value in change.items()}
            try:
                changed = SupervisedRecipe.parse(recipe.with_settings(merged).model_dump(mode="json"))
            except UserError:
                continue
            if _shortage(changed, models, room, row_tokens) is None:
                return "it may fit with " + " and ".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in merged.items())
    shorter = "shorter rows (data.max_tokens), " if row_tokens and _shortage(recipe, models, room, 0) is None else ""
    return f"no setting makes it fit: take {shorter}a smaller model, or {'GPUs' if room.resource == GPU else 'nodes'} with more memory"


def _changes(recipe: SupervisedRecipe, models: dict[str, ModelSize], room: Room) -> Iterator[dict[str, Any]]:
    """Yield settings that save memory: first those that change the result only by rounding."""
    learner = recipe.learner
    if room.resource == GPU:
        if room.slots > learner.ranks or learner.zero_stage < 3:
            yield {"learner.ranks": max(room.slots, learner.ranks), "learner.zero_stage": 3}
        for size in (2**k for k in range(1, room.slots.bit_length())):
            if size > learner.sequence_parallel and slicing_refusal(models["policy"].config, size) is None:
                yield {"learner.ranks": max(learner.ranks, room.slots) // size * size, "learner.sequence_parallel": size}
        if not learner.offloads_optimizer:
            yield {"learner.optimizer_offload": True, "learner.zero_stage": max(1, learner.zero_stage)}
    elif recipe.min_ranks > 1:
        yield {"learner.ranks": 1}
    if recipe.policy.dtype == "float32":
        yield {"policy.dtype": "bfloat16", "learner.zero_stage": max(1, learner.zero_stage)}
    if not recipe.lora.rank:
        yield {"lora.rank": 16}
