"""`rlhfless plan MODEL --gpus N --device KIND`: a recipe to paste, with its predicted step, price and memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.cli.device_recipe import DeviceRecipe, device_of, device_recipe, device_room, written_tree
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe

if TYPE_CHECKING:
    from placement.catalog.catalog import Described
    from placement.simulate.fleet_search import Fleet
    from placement.simulate.setting import Setting
    from placement.speed.roofline import Device
    from rlhfless_ray.preflight.memory_needs import Room

FIRST_WORKLOAD = "gsm8k"
DATA_ENDINGS = (".json", ".jsonl", ".csv", ".yaml", ".yml", ".txt", ".log")


def names_model(path: Path) -> bool:
    """Return whether the first argument of `plan` is a model: a folder with a config.json, or a name that is no file."""
    if path.is_dir():
        return (path / "config.json").is_file()
    return path.name == "config.json" or not (path.exists() or path.suffix in DATA_ENDINGS)


def show_model_plan(
    model: str, overrides: Sequence[str], device: str | None, gpus: int | None, workload: str, steps: int, as_json: bool
) -> None:
    """Print the recipe of GRPO with a model on so many devices. All other lines are comments, so the output is a recipe file.

    workload: name of built-in response lengths. Raises UserError if the model does not fit, or an input is not known.
    """
    from placement.catalog import catalog

    if device is None or gpus is None:
        known = ", ".join(name for name in catalog.read("devices") if not name.startswith("CPU"))
        raise UserError(f"plan {model}: it names a model, so give its devices with --gpus and --device, one of {known}")
    kind = device_of(device)
    room = device_room(kind, gpus)
    try:
        found = catalog.described(model)
        tree = written_tree(found.path, overrides)
        recipe = Recipe.parse(tree, where=f"plan {model}")
        fleets = fleets_for(recipe, found, kind, gpus, workload)
    except ValueError as error:
        raise UserError(str(error)) from None
    planned, fleet = _fastest(fleets, lambda fleet: device_recipe(tree, overrides, found, kind, room, fleet.width))
    if as_json:
        rows = [{**asdict(fleet), "cost": fleet.cost} for fleet in (fleet, *_spot(fleets, fleet))]
        print(json.dumps({"predicted": rows, "memory": planned.memory, "recipe": planned.tree}, indent=1))
        return
    sequences = recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
    print(f"# {found.name} on {gpus} × {fleet.device}, with lengths of {workload} (--workload): {sequences} responses a step")
    for line in (*predicted_lines(fleet, _spot(fleets, fleet), steps), f"memory: {planned.memory}", *filter(None, [fleet.warning])):
        print(f"# {line}")
    print(f"\n{planned.text}", end="")


def predicted_lines(fleet: Fleet, spot: Sequence[Fleet], steps: int) -> list[str]:
    """Describe the predicted step of a fleet and its price, on demand and on spot."""
    lines = [f"step: {fleet.time_s:.4g} s, of which {fleet.rollout_s:.4g} s rollout; {fleet.actors} engines of width {fleet.width}"]
    for one in (fleet, *spot):
        kind = "spot" if one.spot else "on demand"
        cost = f"{one.cost:.3g} $ a step, {steps * one.cost:,.2f} $ for {steps} steps"
        lines.append(
            f"price: {cost} ({kind}, {one.price_per_hour:.2f} $/h a GPU)" if one.price_per_hour else "price: no list price is known"
        )
    return lines


def predicted_run(recipe: Recipe, device: Device, room: Room) -> list[str]:
    """Describe what memory and a step of a recipe take on these devices, with lengths of FIRST_WORKLOAD."""
    from placement.catalog.catalog import Described
    from rlhfless_ray.preflight.memory_check import job_of
    from rlhfless_ray.preflight.memory_fit import fit
    from rlhfless_ray.preflight.run_memory import RunMemory

    job = job_of(recipe, fetch=False)
    if not isinstance(job, RunMemory) or "policy" not in job.models:
        name = recipe.policy.path
        return [
            f"{room.slots} × {device.name}: `{name}` is not here, so memory and step are not predicted; `hf download {name} config.json`"
        ]
    lines = [f"{room.slots} × {device.name}, with lengths of {FIRST_WORKLOAD}"]
    try:
        fitted = fit(job.with_longest_texts(), lambda: room)
        lines.append(f"memory: {DeviceRecipe({}, fitted, room).memory}")
        model = Described(recipe.policy.path, recipe.policy.path, job.models["policy"].config)
        width = recipe.rollout.least_width
        fleets = fleets_for(recipe, model, device, room.slots, FIRST_WORKLOAD)
        nearest = min((one for one in fleets if not one.spot), key=lambda one: abs(one.width - width))
        lines += predicted_lines(nearest, _spot(fleets, nearest), recipe.run.steps)
    except (UserError, ValueError) as error:
        lines.append(str(error))
    return lines


def _fastest(fleets: Sequence[Fleet], recipe_for: Callable[[Fleet], DeviceRecipe]) -> tuple[DeviceRecipe, Fleet]:
    """Return the recipe of the fastest fleet on demand that passes the checks of a run. Raises the last refusal if none does."""
    refusal = UserError("no fleet")
    for fleet in fleets:
        if not fleet.spot:
            try:
                return recipe_for(fleet), fleet
            except UserError as error:
                refusal = error
    raise refusal


def _spot(fleets: Sequence[Fleet], chosen: Fleet) -> list[Fleet]:
    return [fleet for fleet in fleets if fleet.spot and fleet.width == chosen.width]


def fleets_for(recipe: Recipe, model: Described, device: Device, gpus: int, workload: str) -> list[Fleet]:
    """Return the steps of this recipe on these devices, fastest first. Raises ValueError."""
    from placement.simulate.fleet_search import fleets_of, prices_of

    found = fleets_of(_setting(recipe, model, device, workload), device, gpus, prices_of(device) or [(False, 0.0)])
    return sorted(found, key=lambda fleet: fleet.time_s)


def _setting(recipe: Recipe, model: Described, device: Device, workload: str) -> Setting:
    from placement import simulate
    from placement.catalog import catalog

    if recipe.lora.rank:
        raise ValueError(
            "lora.rank: a plan from a model predicts training of every weight; for adapters use `rlhfless plan --memory RECIPE`"
        )
    return simulate.parse(
        {
            "name": "plan",
            "device": asdict(device),
            "model": {"name": model.name, **model.config},
            "nodes": 1,
            "devices_per_node": 1,
            "algorithm": "ppo" if recipe.algorithm.has_critic else "grpo",
            "prompts": recipe.prompts.batch_prompts,
            "samples": recipe.rollout.samples_per_prompt,
            "updates": recipe.algorithm.updates_per_step,
            "epochs": 1,
            "steps_per_epoch": 2,
            "prompt_limit": recipe.prompts.max_prompt_tokens,
            "response_limit": recipe.rollout.max_tokens,
            "lengths": catalog.match_name("workload", workload, [name for name in catalog.read("lengths") if name != "shares"]),
        }
    )
