"""`rlhfless plan --memory`: show the least and the predicted memory of a recipe's processes, here or on devices of another machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from placement.catalog.catalog import shipped_model
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.model_checks import check_division
from rlhfless_ray.preflight.check_policy import check_policy
from rlhfless_ray.preflight.memory_check import check, check_kernels_and_width, local_room
from rlhfless_ray.preflight.memory_fit import fit
from rlhfless_ray.preflight.memory_needs import JobMemory, Lengths, Need, Room, gb
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.preflight.stage_memory import StageMemory
from rlhfless_ray.prompts.load_prompts import check_episodes
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.recipe_file import is_stage
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.weights.check_config import check_config
from rlhfless_ray.weights.known_differences import check_engines
from rlhfless_ray.weights.load_policy import check_family, context_tokens, first_supervised_policy, initial_policy, model_folder
from rlhfless_ray.weights.model_folder import config_of, parameter_count, read_folder


def show_memory(path: Path, overrides: list[str], as_json: bool, there: Room | None = None) -> None:
    """Print tables of needs, per process and together, and the recipe keys that make them fit.

    there: memory of devices that are not here; None: this machine's. Prompts and rows are not read: for predictions each counts as long
    as it may be. Raises UserError if a need does not fit.
    """
    job, longest, notes = _load_stage(path, overrides) if is_stage(path, overrides) else load_run(path, overrides, there)
    room = there or local_room(job.recipe)
    least, policy = job.least(room), job.models["policy"]
    if not as_json:
        _print_table(f"Least memory of {policy.parameters / 1e6:,.0f} M parameters in {job.recipe.policy.dtype}", "at least", least)
    problem = check(job, lambda: room)
    fitted = fit(longest, lambda: room)
    reason = "; ".join(filter(None, [fitted.kv_on(room.resource), fitted.reason]))
    settings = _settings(fitted.job, room)
    if as_json:
        report = {
            "resource": room.resource,
            "memory_bytes": room.bytes,
            "needs": [_row(need) for need in least],
            "predicted": [_row(need) for need in fitted.needs],
            "settings": settings,
            "reason": reason,
        }
        print(json.dumps(report, indent=1))
        return
    _print_table(f"Predicted peaks, with {longest.texts}", "about", fitted.needs)
    for line in filter(None, (problem, reason, fitted.note, *notes)):
        print(line)
    if room.bytes is not None and not fitted.note:
        where = "such a GPU" if there else "a GPU" if room.on_gpu else "this machine"
        print(f"every need fits {where} of {gb(room.bytes)}")
    keys = {("rollout." if key == "kv_cache_mb" else "learner.") + key: value for key, value in settings.items()}
    print(f"keys: {' '.join(f'{key}={json.dumps(value).strip(chr(34))}' for key, value in keys.items())}")


def _settings(job: JobMemory, room: Room) -> JsonObject:
    kv = {} if room.on_gpu or not isinstance(job, RunMemory) else {"kv_cache_mb": job.recipe.rollout.engine_kv_mb}
    return {**{key: getattr(job.recipe.learner, key) for key in job.auto_keys}, **kv}


def load_run(path: Path, overrides: list[str], there: Room | None = None) -> tuple[RunMemory, RunMemory, list[str]]:
    """Read a recipe, see `checked_run`. The configurations of shipped models are known without a hub."""
    recipe = Recipe.load(path, overrides)
    files = None if recipe.policy.path else initial_policy(recipe)[0]
    return checked_run(recipe, f"--memory {path}", there, None if files is None else (config_of(files), parameter_count(files)))


def checked_run(
    recipe: Recipe, where: str, there: Room | None = None, policy: tuple[JsonObject, int] | None = None
) -> tuple[RunMemory, RunMemory, list[str]]:
    """Return a run's memory before its prompts are read, the same with the longest prompts, and notes.

    there: memory of devices that are not here. policy: configuration and parameters of a policy that is not read from a folder.
    Raises UserError for settings that the policy or the machine cannot have; `where` begins a message about an unknown size.
    """
    is_shipped = not Path(recipe.policy.path).exists() and shipped_model(recipe.policy.path) is not None
    job = RunMemory.of(recipe, fetch=policy is None and not is_shipped, policy=policy)
    _check_size(where, job)
    config = job.models["policy"].config
    check_config(config, "policy.path")
    check_family({"config.json": json.dumps(config).encode()}, trusts_code=recipe.policy.trust_remote_code)
    check_policy(recipe, config)
    check_division(recipe, config, *(job.models[name].config if name in job.models else None for name in ("reference", "critic")))
    prompt, limit = _longest_prompt(recipe, config), recipe.prompts.max_prompt_tokens
    if there is None:
        check_kernels_and_width(recipe)
    check_engines(recipe, config, (there or local_room(recipe)).resource)
    context = f"a run refuses prompts of more than {prompt} tokens: the policy's context has no room for longer ones beside the response"
    return job, replace(job, lengths=Lengths(prompt)), [context] if prompt < limit else []


def _load_stage(path: Path, overrides: list[str]) -> tuple[StageMemory, StageMemory, list[str]]:
    """Return a supervised stage's memory before its rows are read, and the same with the longest rows."""
    recipe = SupervisedRecipe.load(path, overrides)
    files = None if recipe.policy.path else first_supervised_policy(recipe)
    job = StageMemory.of(recipe, policy=None if files is None else (config_of(files), parameter_count(files)))
    _check_size(f"--memory {path}", job)
    return job, job.with_longest_texts(), []


def _check_size(where: str, job: JobMemory) -> None:
    """Raise UserError if the size of the policy is not known."""
    if "policy" not in job.models:
        read_folder(model_folder(job.recipe.policy.path, "policy.path"))  # says what is wrong with it
        raise UserError(f"{where}: the size of its policy is not known; set policy.path to a model folder")


def _longest_prompt(recipe: Recipe, config: JsonObject) -> int:
    """Return the tokens of the longest prompt that a run takes. Raises UserError if the policy's context has no room for any."""
    limit, rollout = recipe.prompts.max_prompt_tokens, recipe.rollout
    context = context_tokens({"config.json": json.dumps(config).encode()})
    check_episodes(recipe, context)
    if context is None or rollout.longest_tokens(limit) <= context:
        return limit
    if rollout.max_tokens >= context:
        raise UserError(
            f"rollout.max_tokens: a prompt and a response of {rollout.max_tokens} tokens exceed the policy's context of {context} tokens; "
            "lower it"
        )
    return context - rollout.max_tokens


def _row(need: Need) -> JsonObject:
    return {"what": need.who, "one_process": need.alone, "on_host": need.on_host, "bytes": need.bytes, "parts": dict(need.parts)}


def _print_table(title: str, column: str, needs: Iterable[Need]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column(column, justify="right")
    table.add_column("parts")
    kinds = (((True, False), "one process"), ((False, False), "at the same time"), ((True, True), "in host memory"))
    for kind, heading in kinds:
        chosen = [need for need in needs if (need.alone, need.on_host) == kind]
        if chosen:
            table.add_row(f"[bold]{heading}")
        for need in chosen:
            table.add_row(f"  {need.who}", gb(need.bytes), need.listed_parts)
    Console().print(table)
