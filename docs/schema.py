"""Write the JSON schemas of recipes, for completion and hover texts in editors: `python -m docs.schema`."""

from __future__ import annotations

import json
from pathlib import Path

from docs.blocks import ROOT
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.shipped import RECIPE_SCHEMA, STAGE_SCHEMA
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

FOLDER = ROOT / "recipes"


def schemas() -> dict[Path, str]:
    """Return the text of each schema file. Descriptions are the docstrings of the recipe's types."""
    texts = {}
    for name, recipe in ((RECIPE_SCHEMA, Recipe), (STAGE_SCHEMA, SupervisedRecipe)):
        tree = {"$schema": "https://json-schema.org/draft/2020-12/schema", **recipe.model_json_schema()}
        texts[FOLDER / name] = json.dumps(_without_titles(tree), indent=1, ensure_ascii=False) + "\n"
    return texts


def _without_titles(tree: object) -> object:
    """Leave out pydantic's titles, which only repeat the keys, and join the lines of descriptions."""
    if isinstance(tree, list):
        return [_without_titles(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    kept = {key: value for key, value in tree.items() if key != "title" or isinstance(value, dict)}
    return {
        key: " ".join(value.split()) if key == "description" and isinstance(value, str) else _without_titles(value)
        for key, value in kept.items()
    }


if __name__ == "__main__":
    for path, text in schemas().items():
        path.write_text(text, encoding="utf-8")
        print(path)
