"""Predict the peak memory of a run's functions, and choose the settings that are `auto` so that they fit.

Predictions are estimates (`placement.peak_memory`). They determine `auto` settings, and refuse a run only if no choice of these fits.
A recipe without `auto` settings is refused only by lower bounds (`run.memory_check`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from placement import memory, peak_memory
from placement.peak_memory import Choice, MicroBatch
from rlhfless_ray.learn.overlap_rules import obstacle
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.local.process_memory import LARGE_PARAMETERS
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.memory_check import CPU, GPU, SMALL_BYTES, DoesNotFit, Room, advice, sentence
from rlhfless_ray.run.memory_needs import (
    Lengths,
    Model,
    Need,
    TrainingGroup,
    gb,
    models_of,
    policy_models,
    reference_parameters,
    training_groups,
)

AnyRecipe = TypeVar("AnyRecipe", Recipe, SupervisedRecipe)
AUTO_KEYS = {  # of section `learner`, with the field of `Choice` that each takes
    "micro_batch_tokens": "micro_batch_tokens",
    "gradient_checkpointing": "checkpointing",
    "overlap": "overlap",
    "optimizer_offload": "offload",
}


@dataclass(frozen=True)
class Fit:
    """A recipe whose `auto` settings are decided.

    `needs`: predicted peaks. `reason`: why a setting that was `auto` is not its default; empty if all are. `note`: message for the user.
    """

    recipe: Recipe
    needs: list[Need]
    reason: str = ""
    note: str = ""

    @property
    def predicted_mb(self) -> dict[str, float]:
        """Return the predicted peak in MB of each working function, of all its processes together; of engines, that of one."""
        return {need.function: need.processes * need.bytes / 1e6 for need in self.needs if need.function}

    def step_mb(self, engines: int) -> dict[str, float]:
        """Return predicted peaks in MB to compare with a step's measured ones. Empty on GPUs, whose memory is not measured.

        `engines`: number of engines that worked.
        """
        together = [need.bytes / 1e6 for need in self.needs if not need.alone]
        found = self.predicted_mb
        return {**found, "engines": engines * found["engines"], "total": max(together)} if together else {}

    def statement(self, least_mb: Mapping[str, float]) -> str:
        """Describe the predicted memory of the working functions, and the settings chosen for it, in one line."""
        least = {name: f" (at least {mb / 1000:.1f})" for name, mb in least_mb.items()}
        each = ", ".join(f"{name} {mb / 1000:.1f} GB{least.get(name, '')}" for name, mb in self.predicted_mb.items())
        return f"predicted memory at work: {each}; one engine" + (f"; {self.reason}" if self.reason else "")


def models_with(recipe: Recipe, config: dict[str, Any], parameters: int) -> dict[str, Model]:
    """Return the models. `config`, `parameters`: the policy's, used if it has no folder."""
    return policy_models(recipe, config, parameters) | models_of(recipe)


# ---- predictions ------------------------------------------------------------------------------------------------


def predicted_needs(recipe: Recipe, models: dict[str, Model], lengths: Lengths, room: Room) -> list[Need]:
    """Predict the peak of each function's process while it works, and on CPU slots the peaks of everything in memory at once.

    Settings that are `auto` count as their defaults. Rewards are part of the driver's figure.
    """
    on_gpu, width, policy = room.resource == GPU, memory.VALUE_BYTES[recipe.policy.dtype], models["policy"]
    needs, idle, updates, parked = [], {}, {}, []
    for group in training_groups(recipe, models, lengths):
        name, ranks = group.name, group.ranks
        parts = peak_memory.trainer_parts(
            group.model.config,
            group.parameters,
            group.training,
            micro_batch(recipe, lengths, ranks // group.training.sequence_parallel, has_logits=name == "learner"),
            checkpointing=recipe.learner.recomputes_activations,
            lora_rank=recipe.lora.rank,
            on_gpu=on_gpu,
        )
        needs.append(Need(f"a {name} rank", group.model.key, parts, True, predicted=True, function=name, processes=ranks, of_update=True))
        parked.append((f"in the {name}", ranks * group.rank.idle))
        in_store = 0 if on_gpu else _bytes_in_store(group)
        idle[name], updates[name] = ranks * (group.rank.idle + peak_memory.LEARNER_BYTES) - in_store, (needs[-1], in_store)
    if on_gpu:
        return [*needs, Need("parked ranks", policy.key, tuple(parked), True, predicted=True, on_host=True)] if parked else needs
    members, drafter = recipe.rollout.least_width, models.get("drafter")
    drafter_bytes = drafter.parameters * width if drafter else 0
    engine = peak_memory.engine_parts(policy.parameters, width, recipe.rollout.kv_cache_mb * 2**20, members, drafter_bytes)
    needs.append(Need("an engine", policy.key, engine, True, predicted=True, function="engines"))
    engine_bytes, engines = needs[-1].bytes, min(recipe.rollout.max_actors, max(1, room.slots // members))
    others = [("in driver and object store", peak_memory.DRIVER_BYTES + policy.parameters * width + _kept_bytes(recipe, policy))]
    if recipe.has_reference:
        batch = micro_batch(recipe, lengths, recipe.reference.ranks)
        model = models.get("reference", policy)
        parts = peak_memory.pass_parts(model.config, reference_parameters(recipe, model), width, batch)
        ranks = recipe.reference.ranks
        needs.append(Need("a reference rank", model.key, parts, True, predicted=True, function="reference", processes=ranks))
        others.append(("in the parked reference", ranks * peak_memory.PASS_BYTES))
    at_work = _engines_beside_update(recipe, engines, room.slots)
    waiting = (("in engines", at_work * engine_bytes), ("in parked engines", (engines - at_work) * members * peak_memory.ENGINE_BYTES))
    for name, (rank, in_store) in updates.items():
        beside = [(f"in the {other}", kept) for other, kept in idle.items() if other != name]
        own = ((what, rank.processes * size - (in_store if what == "weights" else 0)) for what, size in rank.parts)
        parts = (*own, *beside, *waiting, *others)
        needs.append(Need(f"the {name}'s update", rank.key, parts, predicted=True, of_update=True))
    count = recipe.rollout.min_actors
    parts = (("in engines", count * engine_bytes), *((f"in the {n}", s) for n, s in idle.items()), *others)
    needs.append(Need("the rollout", policy.key, tuple(parts), predicted=True))
    return needs


def _bytes_in_store(group: TrainingGroup) -> int:
    """Return the bytes of the weights that the ranks read from their published version, see `TrainerRank.read_published`.

    The optimizer step writes the rank's own again once it has freed the gradients, which take more.
    """
    training = group.training
    is_large = group.parameters >= LARGE_PARAMETERS
    reads = (
        group.name == "learner" and is_large and training.zero_stage in (1, 2) and not training.adapters and training.tensor_parallel == 1
    )
    return group.ranks * group.rank.weights if reads else 0


def _engines_beside_update(recipe: Recipe, engines: int, slots: int) -> int:
    """Return how many of `engines` engines may work while gradients are computed."""
    ranks, rollout = recipe.learner.ranks, recipe.rollout
    if rollout.rolls_out_ahead:  # the learner holds at least one slot per rank at the same time
        return min(engines, max(rollout.min_actors, (slots - ranks) // rollout.least_width))
    return 0 if obstacle(recipe) else max(0, engines - ranks)  # a rank takes the slot of an engine that has finished


def micro_batch(recipe: Recipe, lengths: Lengths, ranks: int, *, has_logits: bool = True) -> MicroBatch:
    """Return the largest micro-batch of a rank, where every response is as long as it may be."""
    prompt, longest = lengths.longest_prompt, recipe.longest_tokens(lengths.longest_prompt)
    samples = -(-recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt // ranks)
    tokens = min(max(recipe.learner.max_micro_batch_tokens, longest), samples * longest)
    row = min(tokens, prompt + recipe.rollout.samples_per_prompt * (longest - prompt))
    return MicroBatch(tokens, max(longest, row), tokens if has_logits else 0, is_only=tokens == samples * longest)


def _kept_bytes(recipe: Recipe, policy: Model) -> int:
    """Return the bytes of the learner's state that the driver's node keeps in memory."""
    average = memory.AVERAGE_BYTES * policy.parameters if recipe.ema.beta is not None else 0
    if recipe.lora.rank or not snapshot_every_steps(recipe, policy.parameters):
        return average
    return average + 2 * memory.snapshot_bytes(policy.parameters, memory.VALUE_BYTES[recipe.policy.dtype])


# ---- settings ---------------------------------------------------------------------------------------------------


def fit(recipe: Recipe, models: dict[str, Model], find_room: Callable[[], Room], lengths: Lengths) -> Fit:
    """Choose the settings that are `auto`: of all values that fit, those that cost the least time.

    `find_room` is called unless everything is small. Raises DoesNotFit if a setting is `auto` and no value of it fits.
    """
    auto = [key for key in AUTO_KEYS if getattr(recipe.learner, key) == "auto"]
    whole = with_choice(recipe, auto, Choice())
    slots = recipe.rollout.max_actors * recipe.rollout.least_width + recipe.learner.ranks
    needs = predicted_needs(whole, models, lengths, Room(CPU, slots, None))
    if all(need.bytes <= SMALL_BYTES for need in needs):
        return Fit(whole, needs)
    room = find_room()
    needs, used_share = predicted_needs(whole, models, lengths, room), used_memory_share(recipe, room)
    too_large = room.first_without_room(_of_updates(needs), used_share)
    if too_large is None:
        return Fit(whole, needs, note=_host_note(needs, room))
    assert room.bytes is not None
    there = room.bytes if too_large.alone else room.total_bytes or room.bytes
    budget = f"{used_share:.0%} of {gb(there)}{recipe.cluster.memory_share_note}"
    reason = f"auto: with the defaults {too_large.who} would take about {gb(too_large.bytes)}, more than {budget}"

    def fitted(changed: Recipe, needs: list[Need]) -> Fit:
        others = [key for key in auto if getattr(changed.learner, key) != getattr(whole.learner, key)]
        return Fit(changed, needs, f"{_settings(changed, others)} ({reason})" if others else "", _host_note(needs, room))

    tried = list(_tried(recipe, models, lengths, room, auto))
    for changed, needs in tried:
        if room.first_without_room(_of_updates(needs), used_share) is None:
            return fitted(changed, needs)
    changed, needs = min(tried, key=lambda one: max(need.bytes for need in _of_updates(one[1])))
    short = room.first_without_room(_of_updates(needs))
    if short is None:
        return fitted(changed, needs)
    tried_too = f", also with {_settings(changed, auto)}" if auto else ""
    other = advice(recipe, models, room, lengths, lambda changed: _fits(changed, models, room, lengths), _smaller(recipe))
    problem = f"{short.key}: {sentence(short, room)}{tried_too}; {other}"
    if set(auto) - {"overlap"}:
        raise DoesNotFit(problem)
    return replace(fitted(changed, needs), note=f"the memory may not be enough: {problem}")


def used_memory_share(recipe: AnyRecipe, room: Room) -> float:
    """Return the share of the memory that a run's settings may take. Functions take turns on a GPU, also those of several runs."""
    return peak_memory.USED_SHARE * (1.0 if room.resource == GPU else recipe.cluster.memory_share)


def _host_note(needs: list[Need], room: Room) -> str:
    """Return a message if the state of parked ranks is larger than the host memory beside their GPUs."""
    short = room.first_without_room(need for need in needs if need.on_host)
    return f"the memory may not be enough: {short.key}: {sentence(short, room)}" if short else ""


def _fits(recipe: Recipe, models: dict[str, Model], room: Room, lengths: Lengths) -> bool:
    auto = [key for key in AUTO_KEYS if getattr(recipe.learner, key) == "auto"]
    return any(room.first_without_room(_of_updates(needs)) is None for _, needs in _tried(recipe, models, lengths, room, auto))


def _tried(recipe: Recipe, models: dict[str, Model], lengths: Lengths, room: Room, auto: list[str]) -> Iterator[tuple[Recipe, list[Need]]]:
    """Yield the recipe with each choice of the settings that are `auto`, and its predicted needs."""
    for choice in peak_memory.choices(may_offload=room.resource == GPU and recipe.learner.zero_stage > 0):
        changed = with_choice(recipe, auto, choice)
        yield changed, predicted_needs(changed, models, lengths, room)


def _of_updates(needs: list[Need]) -> list[Need]:
    """Return the needs that the settings of an update change."""
    return [need for need in needs if need.of_update]


def with_choice(recipe: AnyRecipe, auto: list[str], choice: Choice) -> AnyRecipe:
    """Return the recipe with a choice of the settings of section `learner` that are `auto`."""
    return recipe.with_settings({f"learner.{key}": getattr(choice, AUTO_KEYS[key]) for key in auto})


def _smaller(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield settings of an update that save memory and differ from the recipe's."""
    learner = recipe.learner
    tokens = learner.max_micro_batch_tokens // 2
    while learner.micro_batch_tokens != "auto" and tokens >= peak_memory.LEAST_WHOLE_TOKENS:
        yield {"learner.micro_batch_tokens": tokens}
        tokens //= 2
    if learner.gradient_checkpointing is False:
        yield {"learner.gradient_checkpointing": True}


def _settings(recipe: Recipe, keys: list[str]) -> str:
    return " and ".join(f"learner.{key}={json.dumps(getattr(recipe.learner, key)).strip(chr(34))}" for key in keys)
