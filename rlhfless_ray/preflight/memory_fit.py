"""Predict the peak memory of a run's functions, and choose the settings that are `auto` so that they fit.

Predictions are estimates (`placement.peak_memory`). They determine `auto` settings, and refuse a run only if no choice of these fits.
A recipe without `auto` settings is refused only by lower bounds (`preflight.memory_check`).
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from placement import memory, peak_memory
from placement.peak_memory import MicroBatch, UpdateSettings
from placement.speed.roofline import FEW_SEQUENCES
from rlhfless_ray.learn.overlap_rules import obstacle
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.local.process_memory import LARGE_PARAMETERS
from rlhfless_ray.preflight.memory_check import CPU, GPU, SMALL_BYTES, DoesNotFit, Room, advice, sentence
from rlhfless_ray.preflight.memory_needs import (
    SURE_SEQUENCES,
    Lengths,
    ModelSize,
    Need,
    TrainingGroup,
    gb,
    kv_mb,
    models_of,
    policy_models,
    reference_parameters,
    training_groups,
)
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.rollout_sections import DEFAULT_KV_MB
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

AnyRecipe = TypeVar("AnyRecipe", Recipe, SupervisedRecipe)
GROWN_KV_SHARE = 0.1  # largest share of the memory that settings may take for all KV caches beyond 256 MB each
AUTO_KEYS = {  # of section `learner`, with the field of `UpdateSettings` that each takes
    "micro_batch_tokens": "micro_batch_tokens",
    "gradient_checkpointing": "checkpointing",
    "overlap": "overlap",
    "optimizer_offload": "offload",
}


@dataclass(frozen=True)
class Fit:
    """A recipe whose `auto` settings are decided.

    `needs`: predicted peaks. `reason`: why a setting that was `auto` is not its default; empty if all are. `note`: message for the user.
    `kv`: what the KV cache of an engine on CPU holds; empty unless its size was `auto` and is known.
    `give_back_at_once`: whether parked engines must release weights and KV cache at once, because an update does not fit beside them.
    Otherwise they keep both until gaps are known to be long.
    """

    recipe: Recipe
    needs: list[Need]
    reason: str = ""
    note: str = ""
    kv: str = ""
    give_back_at_once: bool = False

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

    def kv_on(self, resource: str) -> str:
        """Return `kv` if slots are of this resource. Everything small is fitted before it is known, and on GPUs the size has no effect."""
        return "" if resource == GPU else self.kv

    def statement(self, least_mb: Mapping[str, float], resource: str) -> str:
        """Describe the predicted memory of the working functions, and the settings chosen for it, in one line."""
        least = {name: f" (at least {mb / 1000:.1f})" for name, mb in least_mb.items()}
        called = {"engines": "one engine"}
        each = [f"{called.get(name, name)} {mb / 1000:.1f} GB{least.get(name, '')}" for name, mb in self.predicted_mb.items()]
        at_work = f"predicted memory at work: {', '.join(each)}" if each else ""
        return "; ".join(filter(None, [at_work, self.kv_on(resource), self.reason]))


def models_with(recipe: Recipe, config: dict[str, Any], parameters: int) -> dict[str, ModelSize]:
    """Return the models. `config`, `parameters`: the policy's, used if it has no folder."""
    return policy_models(recipe, config, parameters) | models_of(recipe)


# ---- predictions ------------------------------------------------------------------------------------------------


def predicted_needs(
    recipe: Recipe, models: dict[str, ModelSize], lengths: Lengths, room: Room, *, engines_keep: bool = False
) -> list[Need]:
    """Predict the peak of each function's process while it works, and on CPU slots the peaks of everything in memory at once.

    Settings that are `auto` count as their defaults. Rewards are part of the driver's figure. `engines_keep`: whether parked engines keep
    weights and KV cache.
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
    engine = peak_memory.engine_parts(policy.parameters, width, recipe.rollout.engine_kv_mb * 2**20, members, drafter_bytes)
    needs.append(Need("an engine", policy.key, engine, True, predicted=True, function="engines"))
    engine_bytes, engines = needs[-1].bytes, _engines_at_once(recipe, room.slots)
    others = [("in driver and object store", peak_memory.DRIVER_BYTES + policy.parameters * width + _kept_bytes(recipe, policy))]
    if recipe.has_reference:
        batch = micro_batch(recipe, lengths, recipe.reference.ranks)
        model = models.get("reference", policy)
        parts = peak_memory.pass_parts(model.config, reference_parameters(recipe, model), width, batch)
        ranks = recipe.reference.ranks
        needs.append(Need("a reference rank", model.key, parts, True, predicted=True, function="reference", processes=ranks))
        others.append(("in the parked reference", ranks * peak_memory.PASS_BYTES))
    at_work = _engines_beside_update(recipe, engines, room.slots)
    parked_bytes = engine_bytes if engines_keep else members * peak_memory.ENGINE_BYTES
    waiting = (("in engines", at_work * engine_bytes), ("in parked engines", (engines - at_work) * parked_bytes))
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


def _engines_at_once(recipe: Recipe, slots: int) -> int:
    return min(recipe.rollout.max_actors, max(1, slots // recipe.rollout.least_width))


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


def _kept_bytes(recipe: Recipe, policy: ModelSize) -> int:
    """Return the bytes of the learner's state that the driver's node keeps in memory."""
    average = memory.AVERAGE_BYTES * policy.parameters if recipe.ema.beta is not None else 0
    if recipe.lora.rank or not snapshot_every_steps(recipe, policy.parameters):
        return average
    return average + 2 * memory.snapshot_bytes(policy.parameters, memory.VALUE_BYTES[recipe.policy.dtype])


# ---- settings ---------------------------------------------------------------------------------------------------


def fit(recipe: Recipe, models: dict[str, ModelSize], find_room: Callable[[], Room], lengths: Lengths) -> Fit:
    """Choose the settings that are `auto`: of all values that fit, those that cost the least time.

    `find_room` is called unless everything is small. Raises DoesNotFit if a setting is `auto` and no value of it fits.
    """
    find_room = functools.cache(find_room)
    fixed = recipe.rollout.kv_cache_mb != "auto"
    found = (_fit_update if fixed else _fit_with_kv)(recipe, models, find_room, lengths)
    kept = predicted_needs(found.recipe, models, lengths, _room_of_all(found.recipe), engines_keep=True)
    if all(need.bytes <= SMALL_BYTES for need in kept):
        return found
    room = find_room()
    kept = predicted_needs(found.recipe, models, lengths, room, engines_keep=True)
    too_much = room.first_without_room(_of_updates(kept), used_memory_share(recipe, room)) is not None
    return replace(found, give_back_at_once=too_much and room.resource == CPU)


def _fit_with_kv(recipe: Recipe, models: dict[str, ModelSize], find_room: Callable[[], Room], lengths: Lengths) -> Fit:
    """Choose the settings that are `auto`, where the size of the KV cache is one of them, see `fit`."""
    whole, first, least = _kv_sizes(recipe, models["policy"], lengths)
    try:
        found = _fit_update(_with_kv(recipe, first), models, find_room, lengths)
        is_short = bool(found.note) and first != least and find_room().resource == CPU
    except DoesNotFit:
        if first == least:
            raise
        is_short = True
    if is_short:
        found = _fit_update(_with_kv(recipe, least), models, find_room, lengths)
    return _with_larger_kv(found, whole, models, find_room, lengths)


def _with_kv(recipe: Recipe, mb: int) -> Recipe:
    return recipe.with_settings({"rollout.kv_cache_mb": mb})


def _kv_sizes(recipe: Recipe, policy: ModelSize, lengths: Lengths) -> tuple[int, int, int]:
    """Return sizes of an engine's KV cache in MB: for a whole step, for the choice of the other settings, and the least."""
    evaluate = recipe.evaluate
    evaluated = min(evaluate.prompts * evaluate.samples_per_prompt, recipe.rollout.max_running)
    step = kv_mb(recipe, policy, _sequences_at_once(recipe), lengths)
    if not step:
        return DEFAULT_KV_MB, DEFAULT_KV_MB, DEFAULT_KV_MB
    # an evaluation of more prompts than a step has gets no more than the default for it
    whole = max(step, min(DEFAULT_KV_MB, kv_mb(recipe, policy, evaluated, lengths)))
    least = min(whole, kv_mb(recipe, policy, SURE_SEQUENCES, lengths))
    return whole, min(whole, max(least, DEFAULT_KV_MB)), least


def _sequences_at_once(recipe: Recipe) -> int:
    """Return how many sequences of a step an engine holds if it has all of them. Between the turns of an agent they keep their KV."""
    rollout = recipe.rollout
    share = rollout.begun_share if rollout.partial != "off" else 1
    samples = math.ceil(share * recipe.prompts.batch_prompts) * rollout.samples_per_prompt
    return samples if recipe.agent.path else min(samples, rollout.max_running)


def _with_larger_kv(found: Fit, whole: int, models: dict[str, ModelSize], find_room: Callable[[], Room], lengths: Lengths) -> Fit:
    """Raise the KV cache of each engine to `whole` MB, or to as much as fits while all engines work and during an update.

    It grows by GROWN_KV_SHARE of the memory at most, because other runs on the machine may grow theirs. What a larger cache brings was
    not measured.
    """
    recipe, policy, sequences = found.recipe, models["policy"], _sequences_at_once(found.recipe)

    def needs_with(mb: int, room: Room) -> list[Need]:
        changed = _with_kv(recipe, mb)
        return predicted_needs(changed.with_settings({"rollout.min_actors": _engines_at_once(changed, room.slots)}), models, lengths, room)

    def lacks_room(mb: int) -> bool:
        return room.first_without_room(needs_with(mb, room), used_memory_share(recipe, room)) is not None

    room, chosen, share = _room_of_all(recipe), recipe.rollout.engine_kv_mb, recipe.cluster.memory_share_note
    why = f"more does not fit beside the rest{share}"
    if all(need.bytes <= SMALL_BYTES for need in needs_with(whole, room)):
        chosen = whole
    elif (room := find_room()).resource == CPU and room.bytes is not None:
        budget = used_memory_share(recipe, room) * room.bytes  # of the largest node: it may have all engines
        grown_mb = int(GROWN_KV_SHARE * budget / _engines_at_once(recipe, room.slots)) >> 20
        most = min(whole, max(chosen, DEFAULT_KV_MB) + grown_mb)
        chosen += bisect.bisect_left(range(chosen + 1, most + 1), True, key=lacks_room)
        if chosen == most:
            why = f"beyond {DEFAULT_KV_MB} MB each, engines take at most {gb(GROWN_KV_SHARE * budget)} of {gb(room.bytes)}{share}"
    changed = _with_kv(recipe, chosen)
    found = replace(found, recipe=changed, needs=predicted_needs(changed, models, lengths, room))
    if room.resource == GPU or not kv_mb(recipe, policy, 1, lengths):
        return found
    held = bisect.bisect_right(range(1, sequences + 1), chosen, key=lambda count: kv_mb(recipe, policy, count, lengths))
    tokens = f"sequences of {recipe.longest_tokens(lengths.longest_prompt)} tokens"
    if held == sequences:
        return replace(found, kv=f"rollout.kv_cache_mb={chosen} (auto: all {sequences} {tokens} at once)")
    why = "the memory is not known here" if room.bytes is None else why
    few = ", which is almost no KV cache" if held < FEW_SEQUENCES else ""
    limited = f"rollout.kv_cache_mb={chosen} (auto: {held} of {sequences} {tokens} at once{few}, because {why})"
    return replace(found, reason="; ".join(filter(None, [found.reason, limited])))


def _room_of_all(recipe: Recipe) -> Room:
    """Return room of unknown size with a slot for everything that the recipe may have at work."""
    return Room(CPU, recipe.rollout.max_actors * recipe.rollout.least_width + recipe.learner.ranks, None)


def _fit_update(recipe: Recipe, models: dict[str, ModelSize], find_room: Callable[[], Room], lengths: Lengths) -> Fit:
    """Choose the settings of section `learner` that are `auto`, see `fit`."""
    auto = [key for key in AUTO_KEYS if getattr(recipe.learner, key) == "auto"]
    whole = with_choice(recipe, auto, UpdateSettings())
    needs = predicted_needs(whole, models, lengths, _room_of_all(recipe))
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


def _fits(recipe: Recipe, models: dict[str, ModelSize], room: Room, lengths: Lengths) -> bool:
    auto = [key for key in AUTO_KEYS if getattr(recipe.learner, key) == "auto"]
    return any(room.first_without_room(_of_updates(needs)) is None for _, needs in _tried(recipe, models, lengths, room, auto))


def _tried(
    recipe: Recipe, models: dict[str, ModelSize], lengths: Lengths, room: Room, auto: list[str]
) -> Iterator[tuple[Recipe, list[Need]]]:
    """Yield the recipe with each choice of the settings that are `auto`, and its predicted needs."""
    for choice in peak_memory.choices(may_offload=room.resource == GPU and recipe.learner.zero_stage > 0):
        changed = with_choice(recipe, auto, choice)
        yield changed, predicted_needs(changed, models, lengths, room)


def _of_updates(needs: list[Need]) -> list[Need]:
    """Return the needs that the settings of an update change."""
    return [need for need in needs if need.of_update]


def with_choice(recipe: AnyRecipe, auto: list[str], choice: UpdateSettings) -> AnyRecipe:
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
