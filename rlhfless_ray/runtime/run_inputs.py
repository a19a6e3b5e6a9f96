"""Read what a run needs from files, and check everything that can be checked without Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.agent.episode_source import EpisodeSource
from rlhfless_ray.agent.preflight_agent import dry_play
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.vllm_install import check_vllm
from rlhfless_ray.learn.model_checks import check_division
from rlhfless_ray.learn.output_scale import output_scale
from rlhfless_ray.preflight.check_policy import check_policy
from rlhfless_ray.preflight.memory_check import check_ahead, local_room, room_ahead, starts_ray
from rlhfless_ray.preflight.memory_fit import Fit, fit
from rlhfless_ray.preflight.memory_needs import Lengths, lengths_of
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.prompts.load_prompts import PromptSet, check_vocabulary
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.preflight_reward import check_references, dry_call
from rlhfless_ray.reward.source import Source
from rlhfless_ray.rollout.speculation import check_speculation, read_drafter
from rlhfless_ray.run.folder import check_writable
from rlhfless_ray.runtime.load_reward import load_reward
from rlhfless_ray.weights.adapter import check_targets
from rlhfless_ray.weights.known_differences import check_differences, check_engines
from rlhfless_ray.weights.load_policy import (
    check_classifier,
    check_family,
    initial_policy,
    other_model,
    policy_tokenizer,
    read_model,
    text_config,
)
from rlhfless_ray.weights.model_folder import config_of, parameter_count, read_folder
from rlhfless_ray.weights.quantized_base import refuse_quantized
from rlhfless_ray.weights.tensor_file import Files, checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class RunInputs:
    """Inputs of a run, read and checked before Ray starts."""

    files: Files  # of the initial policy's folder. `start_learner` replaces them after a warm start and on a resume
    owes_warm_start: bool
    critic_files: Files | None  # None: the critic begins as the policy
    reference: Path | None  # folder of another reference model
    drafter_files: Files | None
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    reward_source: Source
    speculation_note: str | None
    cursor: Cursor  # over the training rows
    memory_fit: Fit[RunMemory]
    contents: dict[str, str]  # key → checksum of what it names, see `recipe.changes`
    lengths: Lengths  # of all prompts, in tokens


def read_inputs(recipe: Recipe, load_prompts: Callable[[Recipe, Any, Files], PromptSet], *, computes: bool) -> tuple[Recipe, RunInputs]:
    """Read and check a run's models, prompts and reward. Returns the recipe with the settings that they decide.

    `load_prompts`: reads the prompts, given the tokenizer and the policy's files. `computes`: whether engines and learner compute a policy.
    Raises UserError for mistakes in the recipe, the data or the files it names.
    """
    find_room = cache(partial(room_ahead, recipe))
    check_ahead(recipe, find_room=find_room)
    files, owes_warm_start = initial_policy(recipe)
    config = config_of(files)
    if recipe.policy.path and computes:
        check_family(files, trusts_code=recipe.policy.trust_remote_code)
    resource = local_room(recipe).resource if starts_ray(recipe) else ""
    if resource and computes:
        check_vllm(resource)
    check_engines(recipe, config, resource)
    check_policy(recipe, config)
    critic_files = read_model(Path(recipe.critic.path), "critic.path") if recipe.critic.path else None
    if critic_files is not None:
        refuse_quantized(config_of(critic_files), "critic.path")
    if recipe.lora.rank:
        check_targets(recipe.lora.target_modules, files, critic_files or {})
    if recipe.learns and recipe.algorithm.has_critic and (recipe.critic.path or recipe.policy.path):
        check_classifier(critic_files or files, "critic.path" if recipe.critic.path else "policy.path")
    if recipe.critic.normalize:
        output_scale(config_of(critic_files or files), "critic.path", "critic.normalize")
    tokenizer = policy_tokenizer(recipe, files)
    reference = other_model(recipe.reference.path, "reference.path", tokenizer) if recipe.reference.path else None
    of_reference = config_of(read_folder(reference)) if reference else None
    check_division(recipe, config, of_reference, config_of(critic_files) if critic_files else None)
    recipe, speculation_note = check_speculation(recipe, files)
    drafter_files = read_drafter(recipe, tokenizer, files)
    prompts = load_prompts(recipe, tokenizer, files)
    check_images(recipe, prompts)
    check_vocabulary(prompts, tokenizer, text_config(files).get("vocab_size"))
    reward_source = load_reward(recipe, tokenizer)
    if isinstance(reward_source, EpisodeSource):
        dry_play(recipe, reward_source, prompts.train, files)
    if recipe.learns and (note := check_references(reward_source, [*prompts.train, *prompts.heldout])):
        prompts = replace(prompts, notes=(*prompts.notes, note))
    dry_call(reward_source, prompts.train, tokenizer, recipe.reward.timeout_s, recipe.answer_column)
    contents = checksums_of(recipe, prompts, reward_source)
    if recipe.save.path:
        check_writable(Path(recipe.save.path), "save.path")
    recipe, cursor = row_order(recipe, prompts)
    lengths = lengths_of(prompts.train, prompts.heldout)
    memory_fit = fit(RunMemory.of(recipe, lengths, policy=(config, parameter_count(files))), find_room)
    if computes:
        check_differences(recipe, config, lengths.longest_prompt)
    return memory_fit.job.recipe, RunInputs(
        files,
        owes_warm_start,
        critic_files,
        reference,
        drafter_files,
        tokenizer,
        prompts,
        reward_source,
        speculation_note,
        cursor,
        memory_fit,
        contents,
        lengths,
    )


def check_images(recipe: Recipe, prompts: PromptSet) -> None:
    """Raise UserError for settings under which prompts with images are not supported."""
    if not any(prompt.pictures for prompt in (*prompts.train, *prompts.heldout)):
        return
    refused = {
        "agent.path": bool(recipe.agent.path),
        "rollout.engine: stock": recipe.rollout.engine == "stock",
        "learner.zero_stage: 3": recipe.learns and recipe.learner.zero_stage == 3,
        "algorithm.advantage.estimator: gae": recipe.learns and recipe.algorithm.has_critic,
    }
    if found := next((key for key, is_set in refused.items() if is_set), None):
        raise UserError(f"{found}: prompts with images are not supported with it; change it, or empty prompts.image_column")


def row_order(recipe: Recipe, prompts: PromptSet) -> tuple[Recipe, Cursor]:
    """Return the cursor over the training rows, and the recipe with the number of steps that its episodes take."""
    rows, batch, episodes = len(prompts.train), recipe.prompts.batch_prompts, recipe.run.episodes
    mixes = recipe.rollout.partial != "off"  # groups outlive the end of an episode, and only the last step has fewer prompts
    checksum = prompts.checksum("prompt" if recipe.prompts.task else recipe.prompts.prompt_column)
    stops = episodes is not None and not mixes
    cursor = Cursor(rows, batch, recipe.prompts.shuffle, recipe.run.seed, stops_at_epoch_end=stops, checksum=checksum)
    if episodes is None:
        return recipe, cursor
    steps = -(-episodes * rows // batch) if mixes else episodes * cursor.batches_per_epoch
    return recipe.with_settings({"run.steps": steps}), cursor


def checksums_of(recipe: Recipe, prompts: PromptSet, reward_source: Source) -> dict[str, str]:
    """Return {key: checksum} of files and rows that keys of the recipe name, whose content changes what is learned or counted."""
    file = getattr(reward_source, "file", None)
    found = {"agent.path" if recipe.agent.path else "reward.function": checksum(file.text.encode())} if file is not None else {}
    if recipe.prompts.task:
        return found  # the rows follow from the recipe
    column = recipe.prompts.prompt_column
    found |= dict.fromkeys(("prompts.path", "prompts.paths"), prompts.checksum(column))
    if recipe.answer_column:
        found["prompts.answer_column"] = prompts.checksum(recipe.answer_column)
    heldout = replace(prompts, train=prompts.heldout)
    return {**found, "evaluate.path": "/".join(map(heldout.checksum, filter(None, (column, recipe.answer_column))))}
