"""`rlhfless plan --fleet`: choose GPU type, count, engine width, and on-demand or spot, for whole steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.cli.tables import rows_to_show, table_console
from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from placement import Objective
    from placement.simulate.fleet_search import Fleet, FleetSearch
    from rlhfless_ray.cli.device_recipe import DeviceRecipe

MAX_FLEET = 1024  # devices; the search doubles up to there
MAX_TABLE_ROWS = 12


def show_fleets(
    lengths: Path,
    model: str | None,
    device: str | None,
    most: int,
    objective: Objective,
    *,
    column: str | None,
    steps: int,
    spot_discount: float | None,
    calibrate: float,
    as_json: bool,
) -> None:
    """Print the fleets that no other beats on time and cost, the cheapest fleet of every other device, and why devices do not fit."""
    from placement import NotFeasible, choose

    if model is None:
        raise UserError("--fleet needs --model: a known model, or its Hugging Face config.json")
    if not 1 <= most <= MAX_FLEET:
        raise UserError(f"--fleet: must be 1 to {MAX_FLEET}, got {most}")
    if steps < 1:
        raise UserError(f"--steps: must be at least 1, got {steps}")
    if spot_discount is not None and not 0 <= spot_discount < 1:
        raise UserError(f"--spot-discount: must be a share from 0 to below 1, got {spot_discount:g}")
    if not calibrate > 0:
        raise UserError(f"--calibrate: must be above 0, got {calibrate:g}")
    try:
        fleets = search(lengths, model, device, most, column, spot_discount).calibrated(calibrate)
        if not fleets.best:
            raise UserError("nothing fits: " + "; ".join(f"{name}: {why}" for name, why in fleets.refused.items()))
        choice = choose(fleets.best, objective, "$")
    except (NotFeasible, ValueError) as error:
        raise UserError(str(error)) from None
    recipe = _recipe_for(fleets.best[choice.index], model, device, lengths, column)
    if as_json:
        rows = [{**asdict(fleet), "cost": fleet.cost, "run_cost": steps * fleet.cost} for fleet in fleets.best]
        tree = recipe if isinstance(recipe, str) else recipe.tree
        data = {"best": rows, "chosen": choice.index, "reason": choice.reason, "refused": fleets.refused, "recipe": tree}
        print(json.dumps(data, indent=1))
    else:
        _show(fleets, choice.index, choice.reason, steps)
        print(recipe if isinstance(recipe, str) else f"memory: {recipe.memory}\n\n{recipe.text}", end="")


def _recipe_for(fleet: Fleet, model: str, device: str | None, lengths: Path, column: str | None) -> DeviceRecipe | str:
    """Return a recipe for a fleet with as many and as long responses, or why a run would refuse it."""
    from placement.catalog import catalog
    from placement.forecast.recorded_lengths import read_lengths
    from rlhfless_ray.cli.device_recipe import device_of, device_recipe, device_room, written_tree

    recorded, kind, found = read_lengths(lengths, column), device_of(device or fleet.device), catalog.described(model)
    prompts = int(recorded.group.max()) + 1
    batch = {
        "prompts.batch_prompts": prompts,
        "prompts.max_prompt_tokens": int(max(1, recorded.prompt_tokens.max())),
        "rollout.samples_per_prompt": len(recorded.tokens) // prompts,
        "rollout.max_tokens": int(recorded.tokens.max()),
    }
    settings = [f"{key}={value}" for key, value in batch.items()]
    try:
        return device_recipe(written_tree(found.path, settings), settings, found, kind, device_room(kind, fleet.count), fleet.width)
    except UserError as error:
        return f"no recipe for it: {error}\n"


def search(lengths: Path, model: str, device: str | None, most: int, column: str | None, spot_discount: float | None) -> FleetSearch:
    """Search for one GRPO step with these responses. Raises ValueError with one sentence for bad input."""
    from placement import simulate
    from placement.catalog import catalog
    from placement.forecast.recorded_lengths import read_lengths
    from placement.simulate.fleet_search import search_fleets

    recorded = read_lengths(lengths, column)
    prompts = int(recorded.group.max()) + 1
    if len(recorded.tokens) < 2 * prompts:
        raise ValueError(
            f"{lengths}: --fleet plans GRPO steps, which need two or more responses to each prompt; name each response's prompt in "
            "a column `prompt`"
        )
    names = [name for name in catalog.read("devices") if name != "CPU-core"] if device is None else [device]
    devices = [catalog.device(name) for name in names]
    setting = simulate.parse(
        {
            "name": "fleet",
            "device": names[0],
            "model": model,
            "nodes": 1,
            "devices_per_node": 1,
            "algorithm": "grpo",
            "prompts": prompts,
            "samples": len(recorded.tokens) // prompts,
            "epochs": 1,
            "steps_per_epoch": 1,
            "prompt_limit": int(max(1, recorded.prompt_tokens.max())),
            "response_limit": int(recorded.tokens.max()),
            "trace": str(lengths.resolve()),
            "trace_column": column,
        }
    )
    return search_fleets(setting, devices, most, spot_discount)


def _show(search: FleetSearch, chosen: int, reason: str, steps: int) -> None:
    from rich.table import Table

    console, table = table_console(), Table()
    for name in ("", "GPUs", "width", "price", "step (s)", "rollout (s)", f"{steps} steps (h)", "$ a step", f"$ {steps} steps"):
        table.add_column(name, justify="right", no_wrap=True)
    best = [search.best[i] for i in rows_to_show(len(search.best), MAX_TABLE_ROWS, chosen)]
    cheapest = {fleet.device: fleet for fleet in sorted(search.fleets, key=lambda fleet: -fleet.cost)}
    others = [fleet for fleet in cheapest.values() if fleet.device not in {row.device for row in best}]
    for fleet in sorted([*best, *others], key=lambda fleet: fleet.cost):
        is_chosen = fleet is search.best[chosen]
        table.add_row(*_row(fleet, steps, "→" if is_chosen else ""), style="bold" if is_chosen else None)
    console.print(table)
    console.print(f"chosen: {reason}; {len(search.best)} of {len(search.fleets)} fleets are not beaten on both time and cost")
    if warning := search.best[chosen].warning:
        console.print(warning)
    for name, why in search.refused.items():
        console.print(f"{name}: {why}")


def _row(fleet: Fleet, steps: int, mark: str) -> list[str]:
    kind = "spot" if fleet.spot else "on demand"
    return [
        mark,
        f"{fleet.count} × {fleet.device}",
        str(fleet.width),
        f"{kind} {fleet.price_per_hour:.2f} $/h",
        f"{fleet.time_s:.4g}",
        f"{fleet.rollout_s:.4g}",
        f"{steps * fleet.time_s / 3600:.3g}",
        f"{fleet.cost:.3g}",
        f"{steps * fleet.cost:,.2f}",
    ]
