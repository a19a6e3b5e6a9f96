"""Read a recipe from a file or a tree, and write it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import yaml
from pydantic import BaseModel, PrivateAttr, ValidationError

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.local_path import given_path
from rlhfless_ray.recipe.mistakes import describe_mistake
from rlhfless_ray.recipe.reading import apply_override
from rlhfless_ray.recipe.section import Section
from rlhfless_ray.recipe.shipped import find_recipe
from rlhfless_ray.recipe.yaml_text import read_yaml, write_yaml

OTHER_KINDS = {
    "task": ("supervised stage", "train"),
    "stages": ("workflow", "workflow"),
    "grid": ("sweep", "sweep"),
    "runs": ("sweep", "sweep"),
}
"""Keys that only another kind of file has → that kind, and the command that runs it."""


def read_tree(path: str | Path, overrides: Sequence[str] = (), kind: str = "recipe", model: type[BaseModel] = Section) -> JsonObject:
    """Return a recipe's file as a nested dict with the overrides applied, see `apply_override`.

    Raises UserError, whose message begins with `kind`.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"{kind}: expected the path of a YAML file, not {type(path).__name__}; a dict is read by `parse`")
    if not isinstance(overrides, list | tuple) or not all(isinstance(one, str) for one in overrides):
        raise UserError(f"{kind} {path}: overrides: expected a list of texts such as ['run.steps=3'], got {overrides!r}")
    path = find_recipe(given_path(path, kind))
    try:
        if not path.is_file():
            what = f"a folder; name the {kind}'s YAML file" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            if len(path.parts) == 1 and not path.suffix:
                what = "neither a file nor the name of a shipped recipe; `rlhfless recipes` lists them"
            raise UserError(f"{kind} {path}: {what}")
        tree = read_yaml(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{kind} {path}: not valid YAML: {one_line(_at_line(error))}") from None
    except (OSError, ValueError) as error:  # no permission; a name that is too long, or has a null character
        raise UserError(f"{kind} {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        example = {"recipe": "sections such as `rollout:`", "sweep": "keys such as `grid:`"}.get(kind, "the key `stages:`")
        raise UserError(f"{kind} {path}: expected {example} at the top, found {type(tree).__name__}")
    for override in overrides:
        apply_override(tree, override, model)
    return tree


def is_stage(path: str | Path, overrides: Sequence[str]) -> bool:
    """Return whether a recipe is that of a supervised stage, which has a `task`."""
    return "task" in read_tree(path) or any(one.startswith("task=") for one in overrides)


def _is_of_run(path: Path) -> bool:
    """Return whether a recipe is that of a run folder, which resumes. It has all values of that run."""
    return path.with_name("status.json").is_file()


def _at_line(error: Exception) -> str:
    """Return what is wrong with a YAML text and where, without PyYAML's name for it."""
    mark = getattr(error, "problem_mark", None)
    what = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    return f"line {mark.line + 1}: {what}" if mark is not None and what else str(error)


class RecipeFile(Section):
    """A whole recipe, as `rlhfless train` reads it."""

    kind: ClassVar[str] = "recipe"
    """What messages call the file."""
    from_dict: ClassVar[str] = "parse"
    """Method that makes a recipe from a dict."""
    _named: frozenset[str] | None = PrivateAttr(None)
    """Keys that the user has named, for recipes in which other values are not the user's. None: all that differ from their defaults."""

    def __eq__(self, other: object) -> bool:
        """Compare the settings only, not which of them the user has named."""
        return isinstance(other, type(self)) and self.__dict__ == other.__dict__

    def with_named(self, keys: Iterable[str]) -> Self:
        """Return the recipe, whose messages about settings without effect are about these keys only."""
        self._named = frozenset(keys)
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Self:
        """Read a YAML file and apply overrides of the form `section.key=value`, whose values are YAML.

        Raises:
            UserError: For a missing file, an unknown key (naming the nearest one), a wrong type or a value out of range.

        Examples:
            >>> recipe = Recipe.load("recipes/quickstart.yaml", ["rollout.temperature=0.7"])
            >>> recipe.run.name, recipe.rollout.temperature
            ('quickstart', 0.7)
        """
        tree = read_tree(path, overrides, cls.kind, cls)
        path = find_recipe(given_path(path, cls.kind))
        for key, (what, command) in OTHER_KINDS.items():
            if key in tree and key not in cls.model_fields:
                raise UserError(f"{cls.kind} {path}: `{key}` makes it a {what}; run it with `rlhfless {command}`")
        run = tree.get("run")
        if run is None or (isinstance(run, dict) and not run.get("name")):
            tree["run"] = {**(run or {}), "name": re.sub(r"[^\w.-]+", "-", path.stem).lstrip(".-")}
        return cls.parse(tree, where=f"{cls.kind} {path}").read_from(path, overrides)

    def read_from(self, path: Path, overrides: Iterable[str]) -> Self:
        """Return the recipe, for whose file in a run folder the user has named only the overrides."""
        return self.with_named(override.partition("=")[0] for override in overrides) if _is_of_run(path) else self

    def with_settings(self, changes: JsonObject) -> Self:
        """Return a copy with other values of some keys, such as `{"run.steps": 3}`. They are not validated."""
        sections: dict[str, JsonObject] = {}
        for key, value in changes.items():
            section, _, field = key.partition(".")
            sections.setdefault(section, {})[field] = value
        return self.model_copy(update={name: getattr(self, name).model_copy(update=fields) for name, fields in sections.items()})

    @classmethod
    def parse(cls, tree: JsonObject, where: str = "recipe") -> Self:
        """Validate a nested dict.

        Raises:
            UserError: For the first mistake. Its message begins with `where`.

        Examples:
            >>> Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "rolout": {}})
            Traceback (most recent call last):
            ...
            rlhfless_ray.common.errors.UserError: recipe: unknown key `rolout`; did you mean `rollout`?
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"{where}: {describe_mistake(cls, error)}") from None

    @classmethod
    def check_type(cls, recipe: object) -> None:
        """Raise UserError for what is no recipe of this kind."""
        if not isinstance(recipe, cls):
            name = cls.__name__
            raise UserError(f"{cls.kind}: expected a {name}, not {type(recipe).__name__}; make one of a dict with `{name}.{cls.from_dict}`")

    def check_values(self) -> None:
        """Raise UserError if attributes were set to values that a recipe does not take."""
        tree = self.model_dump(mode="json", warnings=False)
        if self.parse(tree, where=self.kind).model_dump(mode="json") != tree:
            raise UserError(f"{self.kind}: attributes were set to values that are not read yet, such as `~`; give `load` overrides")

    def to_yaml(self) -> str:
        """Return the whole recipe as YAML, defaults included."""
        return write_yaml(self.model_dump(mode="json"))
