"""Look up which recipe keys exist, and which values they take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.normalise import shown


@cache
def recipe_keys() -> list[str]:
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.mistakes import known_keys

    return known_keys(Recipe)


def mistake_in(key: str, value: object) -> str:
    """Return why the type or the range of a recipe's key does not allow the value, or an empty string."""
    try:
        _validator(key).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        own = first["msg"].removeprefix("Value error, ") if first["type"] == "value_error" else ""
        return f"`{key}` does not take {shown(value)}" + (f": {own}" if own else "")
    return ""


@cache
def _validator(key: str) -> TypeAdapter[object]:
    """Return the validator of a recipe's key. Building it takes longer than validating a value."""
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.mistakes import section_at

    *parents, leaf = key.split(".")
    section = section_at(Recipe, parents)
    assert section is not None
    info = section.model_fields[leaf]
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return TypeAdapter(kind)


def nested(settings: JsonObject) -> JsonObject:
    """Convert dotted keys to a tree of sections."""
    tree: JsonObject = {}
    for key, value in settings.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
