"""The JSON schemas of recipes: current, right for every shipped recipe, and wrong for mistakes that editors should mark."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from docs.schema import FOLDER, schemas
from rlhfless_ray.recipe.mistakes import known_keys
from rlhfless_ray.recipe.recipe_file import read_tree
from rlhfless_ray.recipe.shipped import RECIPE_SCHEMA, STAGE_SCHEMA, schema_line, shipped_recipes
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

SHIPPED = {name: path for name, path in shipped_recipes().items() if not {"stages", "recipe"} & read_tree(path).keys()}


def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_the_files_are_current() -> None:
    for path, text in schemas().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m docs.schema"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_names_its_schema_and_fits_it(name: str) -> None:
    tree, first = read_tree(SHIPPED[name]), SHIPPED[name].read_text().partition("\n")[0]
    schema = STAGE_SCHEMA if "task" in tree else RECIPE_SCHEMA
    assert first == f"# yaml-language-server: $schema={schema}"
    jsonschema.Draft202012Validator(read(schema)).validate(tree)


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"rolout": {}}, "rolout"),
        ({"rollout": {"temprature": 1}}, "temprature"),
        ({"rollout": {"engine": "fast"}}, "fast"),
        ({"learner": {"zero_stage": 4}}, "4"),
        ({"learner": {"ranks": "many"}}, "many"),
        ({"run": {"steps": "ten"}}, "ten"),
    ],
)
def test_a_mistake_does_not_fit(tree: dict, word: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=word):
        jsonschema.Draft202012Validator(read(RECIPE_SCHEMA)).validate(tree)
    jsonschema.Draft202012Validator(read(RECIPE_SCHEMA)).validate({"learner": {"ranks": "auto"}, "rollout": {"stop": "</tool>"}})


def test_every_key_of_a_stage_has_a_hover_text() -> None:
    schema = read(STAGE_SCHEMA)
    for key in known_keys(SupervisedRecipe):
        section, _, name = key.partition(".")
        if name:
            reference = schema["properties"][section]
            kind = (reference.get("$ref") or reference["allOf"][0]["$ref"]).rpartition("/")[2]
            assert schema["$defs"][kind]["properties"][name]["description"], key


def test_init_names_the_installed_schema() -> None:
    assert Path(schema_line().rpartition("=")[2].strip()).is_file()
