"""Recipes by name, a recipe from four answers, and runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.shipped import find_recipe, shipped_recipes
from tests.conftest import command_here


def test_a_shipped_recipe_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Recipe.load("quickstart").run.name == "quickstart"
    with pytest.raises(UserError, match="recipe quickstar: neither a file nor the name of a shipped recipe"):
        Recipe.load("quickstar")
    (tmp_path / "quickstart").write_text("{prompts: {task: sort}, reward: {function: task}}")
    assert Recipe.load("quickstart").prompts.task == "sort"  # a file of that name takes precedence


def test_every_shipped_recipe_is_listed_with_its_needs() -> None:
    done = command_here("recipes")
    assert done.returncode == 0
    assert all(name in done.stdout for name in shipped_recipes())
    assert "openai/gsm8k" in done.stdout.replace("\n", "").replace(" ", "")
    assert find_recipe(Path("recipes/quickstart.yaml")) == Path("recipes/quickstart.yaml")


def test_four_answers_make_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("my-model\nrows.jsonl\nprompt\nhttp://host:1/score\n"))
    done = command_here("init", str(tmp_path / "mine.yaml"))
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert (tree["policy"]["path"], tree["reward"]) == ("my-model", {"url": "http://host:1/score"})
    assert Recipe.load(tmp_path / "mine.yaml").prompts.prompt_column == "prompt"
    assert command_here("init", str(tmp_path / "mine.yaml")).returncode == 2


def test_runs_side_by_side(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "reward/mean": step / 10 + number, "step_s": 1.0} for step in range(1, 4)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command_here("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "0.300" in page and "1.300" in page and page.count("<svg") == 2
    assert command_here("compare", str(tmp_path / "none")).returncode == 2
