"""Look up which recipe keys exist, and which values they take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError


@cache
def recipe_keys() -> list[str]:
    from rlhfless_ray.recipe import Recipe, known_keys

    return known_keys(Recipe)


def is_valid(key: str, value: Any) -> bool:
    """Return whether the type and the range of a recipe's key allow the value."""
    try:
        _validator(key).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _validator(key: str) -> TypeAdapter[Any]:
    """Return the validator of a recipe's key. Building it takes longer than validating a value."""
    from rlhfless_ray.recipe import Recipe

    section: Any = Recipe
    *parents, leaf = key.split(".")
    for parent in parents:
        section = section.model_fields[parent].annotation
    info = section.model_fields[leaf]
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return TypeAdapter(kind)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to a tree of sections."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
