"""`rlhfless plan --memory`: what a recipe's functions need at least, and what this machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.run.memory_check import Need


def show_memory(path: Path, overrides: list[str], as_json: bool) -> None:
    """Print a table of needs, per process and together. Raises UserError if a need does not fit this machine."""
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.run.memory_check import GPU, check, device_needs, gb, host_needs, local_room, models_of

    recipe = Recipe.load(path, overrides)
    models = models_of(recipe)
    if "policy" not in models:
        raise UserError(f"--memory {path}: the size of its policy is not known; set policy.path to a model folder")
    room = local_room(recipe)
    needs = device_needs(recipe, models) if room.resource == GPU else host_needs(recipe, models, room.has_driver)
    if as_json:
        rows = [{"what": need.who, "one_process": need.alone, "bytes": need.bytes, "parts": dict(need.parts)} for need in needs]
        print(json.dumps({"resource": room.resource, "memory_bytes": room.bytes, "needs": rows}, indent=1))
    else:
        _print_table(f"{models['policy'].parameters / 1e6:,.0f} M parameters in {recipe.policy.dtype}", needs)
    if (problem := check(recipe, models, lambda: room)) and not as_json:
        print(problem)
    if not as_json and room.bytes is not None:
        print(f"every need fits {'a GPU' if room.resource == GPU else 'this machine'} of {gb(room.bytes)}")


def _print_table(policy: str, needs: list[Need]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rlhfless_ray.run.memory_check import MIN_LISTED_BYTES, gb

    table = Table(title=f"Least memory of {policy}", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("at least", justify="right")
    table.add_column("of it")
    for alone, heading in ((True, "one process"), (False, "at the same time")):
        chosen = [need for need in needs if need.alone == alone]
        if chosen:
            table.add_row(f"[bold]{heading}")
        for need in chosen:
            parts = ", ".join(f"{gb(size)} {what}" for what, size in need.parts if size >= MIN_LISTED_BYTES)
            table.add_row(f"  {need.who}", gb(need.bytes), parts)
    Console().print(table)
