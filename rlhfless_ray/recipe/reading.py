"""Read a recipe's overrides and merge its sections."""

from __future__ import annotations

from contextlib import suppress

import yaml
from pydantic import BaseModel

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.mistakes import section_at
from rlhfless_ray.recipe.section import takes_text
from rlhfless_ray.recipe.yaml_text import SWITCHES, Word, read_yaml


def apply_override(tree: JsonObject, override: str, model: type[BaseModel]) -> None:
    """Set one `section.key=value` in the tree of a recipe of type `model`. Raises UserError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override `{override}`: expected section.key=value, for example rollout.temperature=0.7")
    try:
        value = read_value(model, key, text)
    except yaml.YAMLError:
        raise UserError(f"override `{override}`: the value is not valid YAML") from None
    set_key(tree, key, value, f"override `{override}`")


def read_value(model: type[BaseModel], key: str, text: str) -> object:
    """Read the value of a key on a command line: YAML, but a key that takes a text takes it as it stands. Raises yaml.YAMLError."""
    *sections, name = key.split(".")
    section = section_at(model, sections)
    info = section.model_fields.get(name) if section is not None else None
    if not text or info is None or not takes_text(info.annotation):
        return read_yaml(text) if text else ""
    if text.lstrip().startswith(("'", '"')):  # in quotes of YAML, inside those of the shell
        with suppress(yaml.YAMLError):
            if isinstance(quoted := read_yaml(text), str):
                return quoted
    text = text.strip()
    if text in ("null", "~") and info.annotation is not str:
        return None
    return Word(text) if text.lower() in (*SWITCHES, "null", "~") else text


def set_key(tree: JsonObject, key: str, value: object, where: str) -> None:
    """Set a dotted key in a recipe's tree. Raises UserError, whose message begins with `where`."""
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"{where}: `{parent}` is a value, not a section")
        node = child
    node[leaf] = value


def merge_sections(
    sections: dict[str, JsonObject], tree: JsonObject, *, wins: bool = False, model: type[BaseModel] | None = None
) -> JsonObject:
    """Put keys into the sections of a tree. `wins`: they take precedence. A section that is a value stays, for parsing to refuse.

    `model`: the recipe's, to merge sections within sections, too. Values that are mappings, such as `rollout.nodes`, are taken whole.
    """
    merged = {**tree}
    for section, keys in sections.items():
        own = tree.get(section) or {}
        if isinstance(own, dict):
            inner = None if model is None else section_at(model, [section])
            merged[section] = _merged(own, keys, inner) if wins else _merged(keys, own, inner)
    return merged


def _merged(below: JsonObject, above: JsonObject, model: type[BaseModel] | None) -> JsonObject:
    """Return the keys of both, those of the model's sections within too. The second takes precedence."""
    both = {
        key: _merged(below[key], value, inner)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict) and model is not None and (inner := section_at(model, [key]))
    }
    return {**below, **above, **both}
