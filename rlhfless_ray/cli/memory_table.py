"""`rlhfless plan --memory`: show the least and the predicted memory of a recipe's functions, and this machine's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.preflight.memory_needs import ModelSize, Need
    from rlhfless_ray.recipe import Recipe


def show_memory(path: Path, overrides: list[str], as_json: bool) -> None:
    """Print tables of needs, per process and together. Raises UserError if a need does not fit this machine.

    Prompts are not read: for predictions each counts as long as prompts.max_prompt_tokens and the policy's context allow.
    """
    from rlhfless_ray.preflight.memory_check import GPU, check, check_kernels_and_width, local_room
    from rlhfless_ray.preflight.memory_fit import AUTO_KEYS, fit
    from rlhfless_ray.preflight.memory_needs import Lengths, device_needs, gb, host_needs
    from rlhfless_ray.weights.known_differences import check_engines

    recipe, models = _load(path, overrides)
    prompt, response = _longest_prompt(recipe, models["policy"].config), recipe.rollout.max_tokens
    check_kernels_and_width(recipe)
    room = local_room(recipe)
    check_engines(recipe, models["policy"].config, room.resource)
    least = device_needs(recipe, models) if room.resource == GPU else host_needs(recipe, models, room.has_driver)
    if not as_json:
        policy = f"{models['policy'].parameters / 1e6:,.0f} M parameters in {recipe.policy.dtype}"
        _print_table(f"Least memory of {policy}", "at least", least)
    problem = check(recipe, models, lambda: room)
    fitted = fit(recipe, models, lambda: room, Lengths(prompt, 1))
    kv = fitted.kv_on(room.resource)
    if as_json:
        report = {
            "resource": room.resource,
            "memory_bytes": room.bytes,
            "needs": [_row(need) for need in least],
            "predicted": [_row(need) for need in fitted.needs],
            "settings": {
                **{key: getattr(fitted.recipe.learner, key) for key in AUTO_KEYS},
                **({} if room.resource == GPU else {"kv_cache_mb": fitted.recipe.rollout.engine_kv_mb}),
            },
            "reason": "; ".join(filter(None, [kv, fitted.reason])),
        }
        print(json.dumps(report, indent=1))
        return
    _print_table(f"Predicted peaks, with prompts of {prompt} and responses of {response} tokens", "about", fitted.needs)
    limit = recipe.prompts.max_prompt_tokens
    context = f"a run refuses prompts of more than {prompt} tokens: the policy's context has no room for longer ones beside the response"
    for line in filter(None, (problem, kv, fitted.reason, fitted.note, context if prompt < limit else "")):
        print(line)
    if room.bytes is not None and not fitted.note:
        print(f"every need fits {'a GPU' if room.resource == GPU else 'this machine'} of {gb(room.bytes)}")


def _load(path: Path, overrides: list[str]) -> tuple[Recipe, dict[str, ModelSize]]:
    """Return the recipe and its models. Raises UserError for settings that the policy cannot have."""
    from rlhfless_ray.learn.model_checks import check_division
    from rlhfless_ray.preflight.check_policy import check_policy
    from rlhfless_ray.preflight.memory_needs import models_of
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.recipe_file import OTHER_KINDS, read_tree
    from rlhfless_ray.weights.check_config import check_config
    from rlhfless_ray.weights.load_policy import check_family, model_folder
    from rlhfless_ray.weights.model_folder import read_folder

    tree = read_tree(path, overrides, model=Recipe)
    for key, (what, command) in OTHER_KINDS.items():
        if key in tree:
            raise UserError(f"--memory {path}: `{key}` makes it a {what}, whose memory is checked when `rlhfless {command}` starts it")
    recipe = Recipe.load(path, overrides)
    models = models_of(recipe)
    if "policy" not in models and recipe.policy.path:
        read_folder(model_folder(recipe.policy.path, "policy.path"))  # says what is wrong with it
    if not recipe.policy.path:
        models |= _scratch_models(recipe)
    if "policy" not in models:
        raise UserError(f"--memory {path}: the size of its policy is not known; set policy.path to a model folder")
    config = models["policy"].config
    check_config(config, "policy.path")
    check_family({"config.json": json.dumps(config).encode()}, trusts_code=recipe.policy.trust_remote_code)
    check_policy(recipe, config)
    check_division(recipe, config, *(models[name].config if name in models else None for name in ("reference", "critic")))
    return recipe, models


def _scratch_models(recipe: Recipe) -> dict[str, ModelSize]:
    """Return the models of a policy that a run makes from scratch."""
    from placement.memory import parameter_count
    from rlhfless_ray.preflight.memory_fit import policy_models
    from rlhfless_ray.weights.load_policy import initial_policy

    config = json.loads(bytes(initial_policy(recipe)[0]["config.json"]))
    parameters = parameter_count(config)
    return {} if parameters is None else policy_models(recipe, config, parameters)


def _longest_prompt(recipe: Recipe, config: dict[str, Any]) -> int:
    """Return the tokens of the longest prompt that a run takes. Raises UserError if the policy's context has no room for any."""
    from rlhfless_ray.prompts.load_prompts import check_episodes
    from rlhfless_ray.weights.load_policy import context_tokens

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


def _row(need: Need) -> dict[str, Any]:
    return {"what": need.who, "one_process": need.alone, "on_host": need.on_host, "bytes": need.bytes, "parts": dict(need.parts)}


def _print_table(title: str, column: str, needs: list[Need]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rlhfless_ray.preflight.memory_needs import MIN_LISTED_BYTES, gb

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
            parts = ", ".join(f"{gb(size)} {what}" for what, size in need.parts if size >= MIN_LISTED_BYTES)
            table.add_row(f"  {need.who}", gb(need.bytes), parts)
    Console().print(table)
