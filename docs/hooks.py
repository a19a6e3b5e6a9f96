"""Generate the reference pages from the code while mkdocs builds the site.

A line `<!-- generate: NAME -->` in a page is replaced by the Markdown that the function NAME of `GENERATORS` returns.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).parent
MARKER = re.compile(r"^<!-- generate: ([\w-]+) -->$", re.MULTILINE)
MEMBERS = {
    "Evaluation": "[read]",
    "GenerationRecipe": "[read, of]",
    "Recipe": "[load, parse, to_yaml]",
    "RunView": "[read]",
    "Runtime": "[objective]",
    "SupervisedRecipe": "[load, parse, to_yaml]",
    "Workflow": "[load, parse, plan]",
}  # the others are for the loop and the stages
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page. Raises KeyError for a marker without a generator."""
    return MARKER.sub(lambda match: _generated(match[1]), markdown)


def _generated(name: str) -> str:
    kind, _, what = name.partition("-")
    if kind == "table":
        table = yaml.safe_load((DOCS / "tables.yaml").read_text(encoding="utf-8"))[what]
        return _rows([table["columns"], ["---"] * len(table["columns"]), *table["rows"]])
    if kind == "simulator":
        from benchmarks.simulator_page import tables

        return {name.replace(" ", "-"): text for name, text in tables().items()}[what]
    return GENERATORS[name]()


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def recipe_keys() -> str:
    """Return one table for each section of the recipe: key, type, default, meaning."""
    from rlhfless_ray.recipe import Recipe

    return _sections(Recipe)


def supervised_keys() -> str:
    """Return the same for the recipe of a supervised stage."""
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

    return _sections(SupervisedRecipe)


def _sections(recipe: type[BaseModel]) -> str:
    parts: list[str] = []
    for name, info in recipe.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            parts += _section(name, info.annotation, level=2)
    return "\n".join(parts)


def _section(path: str, model: Any, level: int) -> list[str]:
    lines = ["", f"{'#' * level} {path} {{ #{path} }}", ""]
    nested: list[str] = []
    rows: list[str] = []
    for name, info in model.model_fields.items():
        key = f"{path}.{name}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            rows.append(f"| [`{name}`](#{key}) | section | | {_cell(info.description or '')} |")
            nested += _section(key, info.annotation, level + 1)
            continue
        if (item := _item(info.annotation)) is not None:
            rows.append(f"| [`{name}`](#{key}) | list of sections | `[]` | {_cell(info.description or '')} |")
            nested += _section(key, item, level + 1)
            continue
        default = "" if info.is_required() else f"`{_yaml(info.get_default(call_default_factory=True))}`"
        anchor = f'<span id="{key}"></span>'
        rows.append(f"| {anchor}`{name}` | {_cell(_type(info))} | {default} | {_cell(info.description or '')} |")
    return [*lines, "| key | type | default | meaning |", "|---|---|---|---|", *rows, *nested]


def _item(annotation: Any) -> type[BaseModel] | None:
    """Return the section of which a key takes a list, or None."""
    items = typing.get_args(annotation) if typing.get_origin(annotation) is list else ()
    return next((item for item in items if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or '""'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _type(info: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(part, key)}" for part in info.metadata for key, sign in LIMITS.items() if getattr(part, key, None) is not None
    ]
    return ", ".join([_name(info.annotation), *limits])


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _name(part) for part in arguments)
    if origin in (list, tuple):
        return f"{origin.__name__} of {', '.join(_name(part) for part in dict.fromkeys(arguments))}"
    if origin is dict:
        return f"map of {_name(arguments[0])} to {_name(arguments[1])}"
    return {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}.get(annotation.__name__, annotation.__name__)


def commands() -> str:
    """Return the help of every command, as `rlhfless COMMAND --help` prints it."""
    from rlhfless_ray.cli.main import app

    group: Any = typer.main.get_command(app)
    parts: list[str] = []
    for name, command in group.commands.items():
        help_text = command.get_help(command.context_class(command, info_name=f"rlhfless {name}"))
        parts += ["", f"## rlhfless {name}", "", "```text", help_text.rstrip(), "```"]
    return "\n".join(parts)


def api(module: str) -> str:
    """Return mkdocstrings directives for every public name of a package."""
    import importlib

    package = importlib.import_module(module)
    lines: list[str] = []
    for name in package.__all__:
        target = getattr(package, name)
        style = "numpy" if module == "placement" else "google"
        lines += ["", f"::: {target.__module__}.{target.__qualname__}", "    options:", f"      docstring_style: {style}"]
        lines += [f"      members: {MEMBERS[name]}"] if name in MEMBERS else []
    return "\n".join(lines)


def openrlhf_flags() -> str:
    """Return a table of the flags of OpenRLHF's newest version: older names, class, and recipe keys."""
    from rlhfless_ray.compat.openrlhf.flag_table import RULES
    from rlhfless_ray.compat.openrlhf.flags import all_flags, history, newest
    from rlhfless_ray.compat.openrlhf.normalise import targets
    from rlhfless_ray.compat.openrlhf.rules import KINDS

    older: dict[str, list[str]] = {}
    for flag in all_flags():
        for name in targets(flag):
            if f"--{name}" != flag:
                spans = history(flag)
                older.setdefault(name, []).append(f"`{flag}` {spans[0].since}–{spans[-1].until}")
    lines = [f"| flag of {newest()} | older names | here | recipe |", "|---|---|---|---|"]
    lines += [
        f"| `--{rule.name}` | {', '.join(older.get(rule.name, []))} | {KINDS[rule.kind]} | {', '.join(f'`{key}`' for key in rule.keys)} |"
        for rule in RULES
    ]
    gone = [flag for flag in all_flags() if not targets(flag)]
    lines += ["", f"Without effect in OpenRLHF too, and here: {', '.join(f'`{flag}`' for flag in gone)}."]
    counts = Counter(KINDS[rule.kind] for rule in RULES)
    lines += ["", f"{len(RULES)} flags: " + ", ".join(f"{count} {text}" for text, count in counts.most_common()) + "."]
    return "\n".join(lines)


def results() -> str:
    """Return a table of each benchmark: quantity, measured value, target, and whether it is met."""
    lines: list[str] = []
    for path in sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text())
        if not found.get("targets"):
            continue
        machine = f"{found['machine']['cores']} cores, {found['machine']['memory_gb']:.0f} GB"
        where = f"{found['date'][:10]}, commit {found['git']['commit'][:8]}, {machine}"
        lines += ["", f"## {path.stem}", "", where, "", "| quantity | measured | target | met |", "|---|---|---|---|"]
        for one in found["targets"]:
            bounds = [f"{sign} {one[key]:g}" for key, sign in (("least", "≥"), ("most", "≤")) if one[key] is not None]
            met = "yes" if one["met"] else f"no: {one['why']}" if one["why"] else "no"
            lines.append(f"| {_cell(one['name'])} | {one['value']:.4g}{one['unit']} | {', '.join(bounds)}{one['unit']} | {_cell(met)} |")
    return "\n".join(lines)


GENERATORS: dict[str, Callable[[], str]] = {
    "recipe-keys": recipe_keys,
    "supervised-keys": supervised_keys,
    "commands": commands,
    "api-rlhfless_ray": lambda: api("rlhfless_ray"),
    "api-placement": lambda: api("placement"),
    "openrlhf-flags": openrlhf_flags,
    "results": results,
}
