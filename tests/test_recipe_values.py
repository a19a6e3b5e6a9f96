"""Numbers, words and paths of recipes and command lines: read as they are written, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhfless_ray.cli.main import app
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.yaml_text import read_yaml, write_yaml
from rlhfless_ray.runtime.evaluate_models import evaluate
from rlhfless_ray.runtime.generation import generate
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.supervise.run_supervised import run_supervised

TREE: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}


def recipe_file(folder: Path, text: str = "") -> Path:
    path = folder / "values.yaml"
    path.write_text(f"prompts: {{task: chain}}\nreward: {{function: task}}\n{text}")
    return path


@pytest.mark.parametrize(("text", "number"), [("008", 8), ("010", 10), ("0017", 17), ("1_000", 1000), ("-0", 0)])
def test_whole_numbers_are_decimal_in_files_and_on_the_command_line(tmp_path: Path, text: str, number: int) -> None:
    assert read_yaml(text) == number
    for recipe in (
        Recipe.load(recipe_file(tmp_path), [f"run.seed={text}"]),
        Recipe.load(recipe_file(tmp_path, f"run: {{seed: {text}}}\n")),
        GenerationRecipe.read(None, ["prompts.task=chain", f"run.seed={text}"]),
    ):
        assert recipe.run.seed == number


@pytest.mark.parametrize("text", ["1:30", "0x1F", "0b11", "0o17", "2026-11-29", "1e3x", "yes"])
def test_what_is_no_decimal_number_is_refused(tmp_path: Path, text: str) -> None:
    for make in (
        lambda: Recipe.load(recipe_file(tmp_path), [f"run.seed={text}"]),
        lambda: Recipe.load(recipe_file(tmp_path, f"run:\n  seed: {text}\n")),
    ):
        with pytest.raises(UserError, match=r"`run.seed`: .*number|`run.seed`: .*integer") as caught:
            make()
        assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", ["1e-5", "2E3", ".5", "3."])
def test_scientific_notation_is_a_number(rate: str) -> None:
    assert read_yaml(rate) == float(rate) and isinstance(read_yaml(rate), float)


@pytest.mark.parametrize("value", [8, 0.1, True, None, "on", "008", "1e3", "1:30", "~", "2026-11-29", ["no", 3], {"yes": "off"}])
def test_written_values_read_back_in_both_versions_of_yaml(value: Any) -> None:
    text = write_yaml({"key": value})
    assert read_yaml(text) == {"key": value} == yaml.safe_load(text)


def test_paths_expand_home_and_variables_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OWN_DATA", "/data")
    recipe = Recipe.load(recipe_file(tmp_path), ["run.root=~/runs", "save.path=$OWN_DATA/model", "checkpoint.path=${OWN_DATA}/c"])
    assert (recipe.run.root, recipe.save.path, recipe.checkpoint.path) == (f"{tmp_path}/runs", "/data/model", "/data/c")
    stage = SupervisedRecipe.parse({"task": "sft", "data": {"path": "~/rows.jsonl"}, "policy": {"path": "$OWN_DATA/p"}})
    assert (stage.data.path, stage.policy.path) == (f"{tmp_path}/rows.jsonl", "/data/p")
    assert Recipe.parse({**TREE, "save": {"path": Path("~/model")}}).save.path == f"{tmp_path}/model"
    for text, said in (
        ("$NOT_SET_ANYWHERE/x", "`NOT_SET_ANYWHERE` is not set"),
        ("~nobody-of-this-name/x", "no user"),
        ("${HOME:-/data}/x", "syntax of a shell"),
        ("$(pwd)/x", "syntax of a shell"),
    ):
        with pytest.raises(UserError, match=said):
            Recipe.parse({**TREE, "run": {"root": text}})


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "gs://bucket/x", "hdfs://host/x", "file:///tmp/x", "hf://org/x", "abfss://a@b/x", "s3:/bucket"]
)
@pytest.mark.parametrize("key", ["run.root", "save.path", "checkpoint.path", "critic.path", "reference.path"])
def test_remote_paths_are_refused_by_their_scheme(tmp_path: Path, key: str, url: str) -> None:
    with pytest.raises(UserError) as caught:
        Recipe.load(recipe_file(tmp_path), [f"{key}={url}"])
    said = str(caught.value)
    assert f"`{key}`" in said and f"`{url.split(':')[0]}://`" in said and "\n" not in said


@pytest.mark.parametrize(
    "command",
    [
        ["report", "URL"],
        ["plan", "URL", "--actors", "2"],
        ["plan", "lengths.json", "--plot", "URL"],
        ["simulate", "URL"],
        ["simulate", "--setting", "list", "--plot", "URL"],
        ["generate", "prompts.task=chain", "--out", "URL"],
        ["train", "URL"],
        ["sweep", "URL"],
        ["workflow", "URL"],
    ],
)
def test_remote_paths_of_commands_are_refused_by_their_scheme(command: list[str]) -> None:
    for url, said in (("webhdfs://host/x", "`webhdfs://` is not supported"), ("$NOT_SET_ANYWHERE/x", "`NOT_SET_ANYWHERE` is not set")):
        with pytest.raises(UserError, match=said):
            app([part.replace("URL", url) for part in command], standalone_mode=False)


def test_remote_models_and_data_of_an_evaluation_are_refused_by_their_scheme() -> None:
    recipe = GenerationRecipe.of({**TREE, "prompts": {"task": "chain"}})
    with pytest.raises(UserError, match=r"--model .*`gs://` is not supported"):
        evaluate(recipe, ["gs://bucket/model"])
    with pytest.raises(UserError, match=r"--data .*`hf://` is not supported"):
        evaluate(recipe, ["model"], ["hf://datasets/org/x"])


@pytest.mark.parametrize(
    ("key", "value"),
    [("rollout.max_actors", "1:30"), ("learner.max_slots_per_rank", "two"), ("cluster.cpus", "[1]"), ("run.root", "oss://bucket/x")],
)
def test_own_values_of_openrlhf_commands_are_refused_in_one_sentence(key: str, value: str) -> None:
    theirs = ["--pretrain", "m", "--prompt_data", "d.jsonl", "--remote_rm_url", "r.py", "--n_samples_per_prompt", "4"]
    command = ["explain", "--json", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *theirs, f"--elastic.{key}={value}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and f"--elastic.{key}: recipe: `{key}`: " in str(json.loads(done.stdout)["problem"]), done.output


def test_names_of_the_hub_and_addresses_of_servers_stay() -> None:
    tree = {**TREE, "policy": {"path": "org/model"}, "reward": {"url": ["http://host:5000/score"]}}
    recipe = Recipe.parse(tree)
    assert recipe.policy.path == "org/model" and "http://host:5000/score" in str(recipe.reward.url)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Recipe(prompts={"task": "chain"}, reward={"function": "task"}, run={"step": 3}), "unknown key `run.step`"),
        (lambda: Recipe({"run": {}}), "expected keys as keyword arguments, not dict"),
        (lambda: Recipe.load({"run": {}}), "expected the path of a YAML file, not dict"),
        (lambda: Recipe.parse(["run"]), "not list"),
        (lambda: Recipe.load("no/such/file.yaml"), "no such file"),
        (lambda: Recipe.load("."), "a folder"),
        (lambda: Recipe.load("recipe.yaml", None), "overrides: expected a list of texts"),  # type: ignore[arg-type]
        (lambda: GenerationRecipe.of([TREE]), "not list"),  # type: ignore[arg-type]
        (lambda: Runtime(TREE), "expected a Recipe, not dict; make one of a dict with `Recipe.parse`"),  # type: ignore[arg-type]
        (lambda: generate(Recipe.parse(TREE)), "expected a GenerationRecipe, not Recipe"),  # type: ignore[arg-type]
        (lambda: evaluate("recipe.yaml", []), "expected a GenerationRecipe, not str"),  # type: ignore[arg-type]
        (lambda: evaluate(GenerationRecipe.of(TREE), "model"), "expected lists"),
        (lambda: run_supervised({"task": "sft"}), "expected a SupervisedRecipe, not dict"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_in_python_are_one_sentence(make: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("run", "steps", -3, "`run.steps`"),
        ("learner", "learning_rate", "fast", "`learner.learning_rate`"),
        ("checkpoint", "path", "s3a://bucket/runs", "`s3a://` is not supported"),
        ("run", "root", "~/runs", "not read yet"),
    ],
)
def test_attributes_set_to_what_a_recipe_does_not_take_are_refused(section: str, key: str, value: Any, said: str) -> None:
    recipe = Recipe.parse(TREE)
    setattr(getattr(recipe, section), key, value)
    with pytest.raises(UserError, match=said):
        Runtime(recipe)


def test_a_loop_over_a_run_that_is_not_entered_says_so(tmp_path: Path) -> None:
    recipe = Recipe.parse({**TREE, "run": {"root": str(tmp_path)}})
    with pytest.raises(UserError, match="within `with Runtime"):
        next(iter(Runtime(recipe)))
