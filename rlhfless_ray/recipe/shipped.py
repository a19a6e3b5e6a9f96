"""Recipes that come with the package, found by name: in a checkout, or where the wheel puts them."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (
    PACKAGE.parent / "recipes",  # a checkout
    Path(sys.prefix) / "share" / "rlhfless-ray" / "recipes",  # `data_files` of the wheel
    *(folder / "share" / "rlhfless-ray" / "recipes" for folder in PACKAGE.parents[:4]),  # the same below another prefix
)
RECIPE_SCHEMA, STAGE_SCHEMA = "recipe.schema.json", "supervised.schema.json"


def shipped_folder() -> Path | None:
    """Return the folder of the shipped recipes and their JSON schemas, or None if it is not installed."""
    return next((folder for folder in FOLDERS if (folder / "quickstart.yaml").is_file()), None)


def schema_line(name: str = RECIPE_SCHEMA) -> str:
    """Return the comment by which editors find a schema, for the head of a recipe."""
    folder = shipped_folder()
    return "" if folder is None else f"# yaml-language-server: $schema={folder / name}\n"


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes, sweeps and workflows by name."""
    folder = shipped_folder()
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(path: Path) -> Path:
    """Return the shipped recipe of this name, unless there is a file of that name or it is a path."""
    if path.exists() or path.suffix or len(path.parts) != 1:
        return path
    return shipped_recipes().get(path.name, path)
