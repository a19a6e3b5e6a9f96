"""A key of a recipe that the user has set works, is refused, or is named when the run starts."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.supervised import translate_supervised
from rlhfless_ray.compat.openrlhf.translate import translate
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.mistakes import known_keys, section_at
from rlhfless_ray.recipe.reading import read_yaml, set_key
from rlhfless_ray.recipe.recipe_file import read_tree
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.without_effect import (
    COMMON,
    OF_RUNS,
    OF_STAGES,
    ON_CPU,
    ON_GPU,
    ON_JOINED,
    ON_ONE_NODE,
    ON_PRIVATE,
    without_effect,
)
from rlhfless_ray.runtime.evaluate_models import _notes

ROOT = Path(__file__).parents[1]
RUN: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}
GENERATION: dict[str, Any] = {"prompts": {"task": "chain"}}
STAGE: dict[str, Any] = {"task": "sft", "data": {"task": "chain"}}
PRM = {"policy": {"path": "m"}, "data": {"path": "d", "placeholder_token": "#"}}
STAGES: dict[str, dict[str, Any]] = {
    **{task: {**STAGE, "task": task} for task in ("sft", "rm", "dpo", "kto")},
    "kd": {**STAGE, "task": "kd", "teacher": {"path": "t"}},
    "prm": {"task": "prm", **PRM},
}
VALUES = (True, False, 1, 2, 3, 96, 0.3, "other", ["other"], {"a": "b"}, [0.1, 0.9])


def messages(tree: dict[str, Any], *settings: str, **where: Any) -> list[str]:
    kind = SupervisedRecipe if "task" in tree else Recipe
    tree = read_yaml(repr(tree))
    for setting in settings:
        key, _, value = setting.partition("=")
        set_key(tree, key, read_yaml(value), "test")
    return list(without_effect(kind.parse(tree), **where))


@pytest.mark.parametrize(
    ("tree", "settings", "said"),
    [
        (RUN, ["policy.path=m", "warm_start.steps=9", "policy.layers=9"], "policy.layers, warm_start.steps have no effect: only a policy"),
        (RUN, ["run.episodes=2", "run.steps=9"], "run.steps has no effect: run.episodes determines"),
        (RUN, ["prompts.prompt_column=q"], "prompts.prompt_column has no effect: the built-in task"),
        (RUN, ["prompts.template=chat", "prompts.add_bos=false"], "prompts.add_bos has no effect: the chat template"),
        (RUN, ["evaluate.split=test"], "evaluate.split has no effect: evaluate.path names no data set"),
        (RUN, ["evaluate.prompts=0", "evaluate.every_steps=9"], "evaluate.every_steps has no effect: evaluate.prompts is 0"),
        (RUN, ["rollout.migrate_tau=0.5"], "rollout.migrate_tau has no effect: rollout.migrate is not `tau`"),
        (RUN, ["rollout.drafter_layers=2"], "rollout.drafter_layers has no effect: only a drafter with random weights"),
        (RUN, ["rollout.drafter_learning_rate=0.1"], "rollout.drafter_learning_rate has no effect: rollout.drafter_train is off"),
        (RUN, ["reward.ranks=2", "reward.value_head=v"], "reward.value_head, reward.ranks have no effect: reward.model_path names no"),
        (RUN, ["reward.deadline_s=9"], "reward.deadline_s has no effect: only reward.url and reward.model_path use it"),
        (RUN, ["reward.overlong_buffer_tokens=9", "reward.overlong_feedback=true"], "reward.overlong_feedback has no effect: agent.path"),
        (RUN, ["algorithm.kl.estimator=k2"], "algorithm.kl.estimator has no effect: algorithm.kl.coefficient is 0"),
        (RUN, ["algorithm.kl.horizon=99"], "algorithm.kl.horizon has no effect: algorithm.kl.target is not set"),
        (RUN, ["algorithm.uncorrected_lag=true"], "algorithm.uncorrected_lag has no effect: rollout.max_lag_steps is 0"),
        (RUN, ["objective.knee=true", "objective.prefer=0.3"], "objective.prefer has no effect: objective.deadline_s, budget or knee"),
        (RUN, ["watch.wandb=off", "watch.wandb_group=g"], "watch.wandb_group has no effect: watch.wandb is off"),
        (RUN, ["watch.tensorboard=false", "watch.tensorboard_path=t"], "watch.tensorboard_path has no effect"),
        (STAGE, ["watch.samples_per_step=0"], "watch.samples_per_step has no effect: a supervised stage draws no samples"),
        (STAGE, ["price.parked_share=0.5"], "price.parked_share has no effect: a supervised stage parks no processes"),
        (STAGE, ["price.rollout_slot_per_hour=9"], "price.rollout_slot_per_hour has no effect: a supervised stage has no rollout"),
        (STAGE, ["run.steps=9", "run.epochs=2"], "run.epochs has no effect: run.steps determines the steps"),
        (STAGE, ["checkpoint.keep=9"], "checkpoint.keep has no effect: checkpoint.every_steps is 0"),
        (STAGE, ["data.chosen_column=a"], "data.chosen_column has no effect: the task reads no pairs"),
        (STAGES["dpo"], ["data.margin_column=m"], "data.margin_column has no effect: only `rm`"),
    ],
)
def test_settings_that_reach_nothing_are_named(tree: dict[str, Any], settings: list[str], said: str) -> None:
    (message,) = messages(tree, *settings)
    assert message.startswith(said)


def test_what_slots_and_ray_make_superfluous_is_named_once_they_are_known() -> None:
    given = ("rollout.kv_cache_mb=64", "rollout.gpu_memory_share=0.5", "cluster.share=0.5", "cluster.cpus=2")
    assert messages(RUN, *given) == []
    assert messages(RUN, *given, resource="cpu", private=True) == [
        "rollout.gpu_memory_share has no effect: slots are CPU cores",
        "cluster.share has no effect: this Ray has no other runs",
    ]
    assert [message.partition(" ")[0] for message in messages(RUN, *given, resource="gpu", private=False)] == [
        "rollout.kv_cache_mb",
        "cluster.cpus",
    ]


def test_every_rule_names_keys_of_its_recipe() -> None:
    runs, stages = set(known_keys(Recipe)), set(known_keys(SupervisedRecipe))
    for rules, keys in ((COMMON, runs), (OF_RUNS, runs), (OF_STAGES, stages)):
        assert {key for rule in rules for key in rule.keys.split()} <= keys
    assert {key for keys, _ in (ON_CPU, ON_GPU, ON_PRIVATE, ON_ONE_NODE, ON_JOINED) for key in keys.split()} <= runs


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_recipes_here_set_nothing_in_vain(file: Path) -> None:
    tree = read_tree(file)
    if not {"stages", "grid", "runs"} & tree.keys():
        assert messages(tree) == []


def test_what_an_evaluation_decides_otherwise_is_named() -> None:
    tree = {**RUN, "evaluate": {"samples_per_prompt": 4, "temperature": 0.5, "prompts": 9}, "rollout": {"samples_per_prompt": 2}}
    assert list(_notes(GenerationRecipe.of(tree), ["d"])) == [
        "evaluate.prompts has no effect: --data names the data sets",
        "rollout.samples_per_prompt has no effect: evaluate.samples_per_prompt is 4",
    ]
    assert list(_notes(GenerationRecipe.of(RUN), [])) == []


def test_what_generation_leaves_out_is_named() -> None:
    tree = {**RUN, "learner": {"ranks": 2}, "run": {"steps": 9}, "rollout": {"agreement": "warn", "top_p": 0.9}}
    assert GenerationRecipe.of(tree).left_out_note == "left out, because nothing is trained: learner, run.steps, rollout.agreement"
    plain = GenerationRecipe.of(GENERATION)
    assert plain.left_out_note == "" and list(without_effect(plain)) == []
    scored = GenerationRecipe.of({**RUN, "reward": {"function": "task", "clip_range": [0, 1]}})
    assert list(without_effect(scored)) == ["reward.clip_range has no effect: only learning uses this, and nothing is learned"]
    (message,) = without_effect(GenerationRecipe.of({**GENERATION, "reward": {"workers": 2}, "policy": {"path": "m"}}))
    assert message.startswith("reward.workers has no effect: nothing is scored")


def test_of_a_run_folders_recipe_only_overrides_are_named(tmp_path: Path) -> None:
    """It has all values of the run, such as the steps that follow from its episodes."""
    (tmp_path / "recipe.yaml").write_text(Recipe.parse({**RUN, "run": {"episodes": 2, "steps": 9}}).to_yaml())
    assert len(list(without_effect(Recipe.load(tmp_path / "recipe.yaml")))) == 1
    (tmp_path / "status.json").write_text("{}")
    assert list(without_effect(Recipe.load(tmp_path / "recipe.yaml"))) == []
    (message,) = without_effect(Recipe.load(tmp_path / "recipe.yaml", ["rollout.migrate_tau=0.5"]).with_settings({"run.name": "again"}))
    assert message.startswith("rollout.migrate_tau has no effect")
    generation = GenerationRecipe.read(tmp_path / "recipe.yaml", ["learner.ranks=2", "evaluate.greedy=false", "rollout.migrate_tau=0.5"])
    assert generation.left_out_note == "left out, because nothing is trained: learner, evaluate.greedy"
    assert [one.partition(" ")[0] for one in without_effect(generation)] == ["rollout.migrate_tau"]


def test_of_a_command_only_settings_of_this_project_are_named() -> None:
    """What becomes of OpenRLHF's flags is told otherwise."""
    line = [
        "--pretrain",
        "m",
        "--prompt_data",
        "p.jsonl",
        "--remote_rm_url",
        "r.py",
        "--logging_steps",
        "9",
        "--elastic.rollout.migrate_tau",
    ]
    (message,) = without_effect(translate([*line, "0.5"]).recipe(), "cpu")
    assert message.startswith("rollout.migrate_tau has no effect")
    stage = ["--pretrain", "m", "--dataset", "d", "--output_key", "a", "--apply_chat_template", "--elastic.price.parked_share", "0.1"]
    (message,) = without_effect(translate_supervised("train_sft", stage, {}).recipe())
    assert message.startswith("price.parked_share has no effect")


# ---- every key ----------------------------------------------------------------------------------------------------


@cache
def looked_at(file: Path) -> tuple[list[str], set[str]]:
    """Return the modules that a file may import, and the names of attributes and the texts that may be some. Without what stands under
    `if TYPE_CHECKING` and in the recipe's own checks."""
    modules, names, waiting = list[str](), set[str](), [*ast.iter_child_nodes(ast.parse(file.read_text()))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("_check", "_mistakes")):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        waiting += ast.iter_child_nodes(node)
    return modules, names


def imported(module: str) -> set[Path]:
    """Return the files of this project that a module uses, directly or through others, except those of recipes."""
    seen, waiting = set[Path](), [module]
    while waiting:
        name = waiting.pop()
        file = ROOT / (name.replace(".", "/") + ".py")
        if file not in seen and not name.startswith("rlhfless_ray.recipe") and file.is_file():
            seen.add(file)
            waiting += looked_at(file)[0]
    return seen


@cache
def read_names(module: str) -> set[str]:
    """Return the names that `looked_at` finds in everything that a module uses and in properties of recipes."""
    files = {file for file in (ROOT / "rlhfless_ray/recipe").glob("*.py") if file.stem not in ("without_effect", "reading")}
    return {name for file in files | imported(module) for name in looked_at(file)[1]}


def leaves(kind: type[BaseModel]) -> list[str]:
    return [key for key in known_keys(kind) if "." in key and section_at(kind, key.split(".")) is None]


def other_value(kind: type[BaseModel], key: str) -> Any:
    """Return a valid value of a key that is not its default."""
    *path, name = key.split(".")
    section = section_at(kind, path)
    assert section is not None
    field = section.model_fields[name]
    for value in (*get_args(field.annotation), *VALUES):
        try:
            found = getattr(section.model_validate({name: value}), name)
        except ValidationError as error:
            if len(error.errors()[0]["loc"]) > 0:
                continue
            found = value  # refused beside the section's other defaults
        if found != field.get_default(call_default_factory=True):
            return value
    raise AssertionError(f"{key}: no other value found")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["run", "generation", *STAGES])
def test_every_key_is_read_or_refused_or_named(task: str) -> None:
    tree, kind, module = {
        "run": (RUN, Recipe, "rlhfless_ray.runtime.runtime"),
        "generation": (GENERATION, GenerationRecipe, "rlhfless_ray.runtime.generation"),
    }.get(task, (STAGES.get(task, {}), SupervisedRecipe, "rlhfless_ray.supervise.run_supervised"))
    unread = []
    for key in leaves(kind):
        if key.rpartition(".")[2] in read_names(module):
            continue
        given = read_yaml(repr(tree))
        set_key(given, key, other_value(kind, key), "test")
        try:
            recipe = GenerationRecipe.of(given) if task == "generation" else kind.parse(given)  # type: ignore[attr-defined]
        except UserError:
            continue
        left_out = recipe._left_out if isinstance(recipe, GenerationRecipe) else ()
        if key not in " ".join(without_effect(recipe)) and not {key, key.partition(".")[0]} & {*left_out}:
            unread.append(key)
    assert not unread
