"""Choose the settings of a stage's updates that are `auto`, so that its longest rows fit the memory.

Predictions are estimates (`placement.peak_memory`), as in `preflight.memory_fit`. They choose settings and never refuse a stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from placement import peak_memory
from placement.peak_memory import MicroBatch, UpdateSettings
from rlhfless_ray.preflight.memory_check import CPU, GPU, SMALL_BYTES, Room, sentence
from rlhfless_ray.preflight.memory_fit import AUTO_KEYS, used_memory_share, with_choice
from rlhfless_ray.preflight.memory_needs import ModelSize, Need
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.memory_check import models_of_stage, stage_training, teacher_bytes


def fit_stage(recipe: SupervisedRecipe, find_room: Callable[[], Room], row_tokens: int) -> tuple[SupervisedRecipe, str]:
    """Return the recipe without `auto` settings of updates, and why they are not the defaults. `find_room`, `row_tokens`: see
    `check_stage`.

    Only `micro_batch_tokens` may stay `auto`, which is 8192, because ranks on cores then pack rows into smaller micro-batches.
    """
    auto = [key for key in AUTO_KEYS if key != "overlap" and getattr(recipe.learner, key) == "auto"]
    whole, models = _with_choice(recipe, auto, UpdateSettings()), models_of_stage(recipe)
    if not auto or "policy" not in models:
        return whole, ""
    if all(stage_peak(whole, models, row_tokens, Room(kind, 1, None)).bytes <= SMALL_BYTES for kind in (CPU, GPU)):
        return whole, ""
    room = find_room()
    default, used_share = stage_peak(whole, models, row_tokens, room), used_memory_share(recipe, room)
    if room.holds(default, used_share):
        return whole, ""
    tried = [(changed, stage_peak(changed, models, row_tokens, room)) for changed in _tried(recipe, auto, room)]
    fitting = (one for one in tried if room.holds(one[1], used_share))
    chosen, need = next(fitting, None) or min(tried, key=lambda one: one[1].bytes)
    changed = [key for key in auto if getattr(chosen.learner, key) != getattr(whole.learner, key)]
    settings = " and ".join(f"learner.{key}={json.dumps(getattr(chosen.learner, key))}" for key in changed)
    doubt = "" if room.holds(need) else f", and the memory may not be enough: {sentence(need, room)}"
    return chosen, f"{settings or 'learner'}: with the defaults {default.who} would take {default}{doubt}"


def _tried(recipe: SupervisedRecipe, auto: list[str], room: Room) -> Iterator[SupervisedRecipe]:
    choices = peak_memory.choices(may_offload=room.resource == GPU and recipe.learner.zero_stage > 0)
    return (_with_choice(recipe, auto, choice) for choice in choices if choice.overlap == "auto")


def _with_choice(recipe: SupervisedRecipe, auto: list[str], choice: UpdateSettings) -> SupervisedRecipe:
    is_default = choice.micro_batch_tokens == UpdateSettings().micro_batch_tokens
    return with_choice(recipe, [key for key in auto if key != "micro_batch_tokens" or not is_default], choice)


def stage_peak(recipe: SupervisedRecipe, models: dict[str, ModelSize], row_tokens: int, room: Room) -> Need:
    """Predict the memory of a rank's update, where slots are cores that of all ranks."""
    policy, on_gpu = models["policy"], room.resource == GPU
    parameters, training = stage_training(recipe, policy, room.resource, room.slots)
    together = training.tensor_parallel * training.sequence_parallel  # ranks with the same rows
    step = -(-recipe.data.batch_rows * row_tokens * together // training.ranks)
    tokens = min(max(recipe.learner.max_micro_batch_tokens, row_tokens), step)
    targets = 0 if recipe.task == "rm" else tokens
    batch = MicroBatch(tokens, row_tokens, targets, is_only=tokens == step, is_masked=recipe.task in ("rm", "dpo"))
    checkpointing, lora_rank = recipe.learner.recomputes_activations, recipe.lora.rank
    parts: tuple[tuple[str, int], ...]
    parts = peak_memory.trainer_parts(
        policy.config, parameters, training, batch, checkpointing=checkpointing, lora_rank=lora_rank, on_gpu=on_gpu
    )
    if teacher := models.get("teacher"):
        parts = (*parts, ("teacher", teacher_bytes(teacher, training) + peak_memory.logits_bytes(teacher.config, targets)))
    if on_gpu or training.ranks == 1:
        return Need("a rank", policy.key, parts, on_gpu, predicted=True)
    parts = tuple((what, training.ranks * size) for what, size in parts)
    return Need(f"the stage with its {training.ranks} ranks", policy.key, parts, predicted=True)
