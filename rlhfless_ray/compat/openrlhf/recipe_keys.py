"""Look up which recipe keys exist, and which values they take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

ABSENT_KEYS: dict[str, Any] = {"policy.hub": "huggingface", "policy.experts": None, "rollout.batch_prompts": None}
"""Keys that the recipe lacks, with the value that a run behaves as if it had.

A flag that asks for this value is honoured. Any other value is refused until the recipe has the key.
"""


class Installed:
    """The keys and values that the installed recipe accepts."""

    def __init__(self) -> None:
        from rlhfless_ray.recipe import Recipe, known_keys

        self.keys = known_keys(Recipe)

    def knows(self, key: str) -> bool:
        return key in self.keys

    def accepts(self, key: str, value: Any) -> bool:
        """Return whether the recipe has the key, and whether the key's type and range allow the value."""
        return self.knows(key) and _is_valid(key, value)

    def lacks(self, settings: dict[str, Any]) -> list[str]:
        """Return the keys of settings that a run cannot follow."""
        return [key for key, value in settings.items() if not self.accepts(key, value) and not self._does_anyway(key, value)]

    def accepted(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if self.accepts(key, value)}

    def _does_anyway(self, key: str, value: Any) -> bool:
        return not self.knows(key) and key in ABSENT_KEYS and ABSENT_KEYS[key] == value


def _is_valid(key: str, value: Any) -> bool:
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
