"""A sweep's file: which runs it makes, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.sweep.sweep_file import Sweep, load_sweep
from tests.conftest import ROOT, command_here, small_recipe


def sweep_of(folder: Path, **tree: Any) -> Sweep:
    (folder / "small.yaml").write_text(yaml.safe_dump(small_recipe(folder)))
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump({"recipe": "small.yaml", **tree}))
    return load_sweep(path)


def test_a_grid_has_a_run_for_each_combination_named_by_its_values(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path, root="out", set={"run.steps": 7}, grid={"learner.learning_rate": [1.0e-4, 0.001], "rollout.temperature": [0.7, 1.0]}
    )
    assert sweep.file.name == "rates"
    assert [run.name for run in sweep.runs] == [
        "learning_rate-0.0001_temperature-0.7",
        "learning_rate-0.0001_temperature-1",
        "learning_rate-0.001_temperature-0.7",
        "learning_rate-0.001_temperature-1",
    ]
    one = sweep.runs[1]
    assert (one.recipe.learner.learning_rate, one.recipe.rollout.temperature, one.recipe.run.steps) == (1e-4, 1.0, 7)
    assert one.recipe.run.name == one.name
    assert one.settings == {"learner.learning_rate": 1e-4, "rollout.temperature": 1.0}


def test_runs_by_themselves_meet_the_grid_and_win_over_what_is_set_for_all(tmp_path: Path) -> None:
    runs = [{"name": "short", "set": {"run.steps": 2}}, {"name": "long"}]
    sweep = sweep_of(tmp_path, set={"run.steps": 9}, grid={"run.seed": [0, 1]}, runs=runs)
    assert [(run.name, run.recipe.run.steps, run.recipe.run.seed) for run in sweep.runs] == [
        ("short_seed-0", 2, 0),
        ("short_seed-1", 2, 1),
        ("long_seed-0", 9, 0),
        ("long_seed-1", 9, 1),
    ]


@pytest.mark.parametrize(("rows", "metric"), [(16, "eval/loss"), (0, "learn/loss")])
def test_supervised_stages_are_compared_by_their_loss(tmp_path: Path, rows: int, metric: str) -> None:
    stage = str(ROOT / "recipes" / "sft.yaml")
    file = sweep_of(tmp_path, recipe=stage, set={"evaluate.rows": rows}, grid={"run.seed": [0, 1]}).file
    assert (file.metric, file.direction) == (metric, "min")
    assert sweep_of(tmp_path).file.metric == "eval/accuracy_sampled"


def test_values_that_are_no_words_are_numbered(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, grid={"algorithm.filter_range": [[0.1, 0.9], [0.2, 0.8]]})
    assert [run.name for run in sweep.runs] == ["filter_range-1", "filter_range-2"]
    close = sweep_of(tmp_path, grid={"learner.learning_rate": [1e-4, 1.0000001e-4]})
    assert [run.name for run in close.runs] == ["learning_rate-1", "learning_rate-2"]


def test_runs_share_a_policy_made_from_scratch_only_if_seed_and_shape_are_the_same(tmp_path: Path) -> None:
    runs = sweep_of(tmp_path, grid={"learner.learning_rate": [0.1, 0.2], "run.seed": [0, 1]}).runs
    keys = [run.policy_key for run in runs]
    assert keys[0] == keys[2] != keys[1] == keys[3]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (
        {"grid": {"learner.learning_rat": [0.1]}},
        "unknown key `learner.learning_rat`; did you mean `learner.learning_rate`?",
    ),
    "unknown key": ({"at_mots": 2}, "unknown key `at_mots`; did you mean `at_most`?"),
    "bad value": ({"grid": {"rollout.temperature": [1.0, -1.0]}}, "run temperature--1: `rollout.temperature`"),
    "two of one name": ({"runs": [{"name": "a"}, {"name": "a"}]}, "two runs are called a"),
    "equal values": ({"grid": {"run.seed": [1, 1]}}, "two runs are called seed-1"),
    "a repeat's name": ({"runs": [{"name": "a"}, {"name": "a-2"}]}, "runs a and a-2"),
    "none at once": ({"at_most": 0}, "`at_most`"),
    "no values": ({"grid": {"run.seed": []}}, "`grid`: `run.seed` has no values"),
    "unknown metric": ({"metric": "reward/meen"}, "unknown `metric` reward/meen; did you mean reward/mean?"),
    "metric of supervised stages": (
        {"metric": "eval/loss", "early_stopping": {"first_step": 2}},
        "runs of a policy have no metric eval/loss, which early_stopping needs",
    ),
    "metric of no run": ({"metric": "eval/loss"}, "runs of a policy have no metric eval/loss, and no other run has it"),
    "metric of a stage without evaluation": (
        {
            "recipe": str(ROOT / "recipes" / "sft.yaml"),
            "set": {"evaluate.rows": 0},
            "metric": "eval/loss",
            "early_stopping": {"first_step": 2},
        },
        "evaluate.rows is 0, so it has no eval/loss, which early_stopping needs",
    ),
    "metric of other stages": (
        {"recipe": str(ROOT / "recipes" / "sft.yaml"), "metric": "eval/accuracy"},
        "a stage of the task sft has no metric eval/accuracy, and no other run has it",
    ),
    "the largest loss as the best": (
        {"recipe": str(ROOT / "recipes" / "sft.yaml"), "metric": "learn/loss", "early_stopping": {"first_step": 2}},
        "direction: smaller values of learn/loss are better; set it to min",
    ),
    "metric never evaluated": (
        {"set": {"evaluate.prompts": 0}, "early_stopping": {"first_step": 2}},
        "evaluate.prompts is 0, so it has no eval/accuracy_sampled",
    ),
    "metric turned off": (
        {"set": {"evaluate.greedy": False}, "metric": "eval/accuracy_greedy"},
        "evaluate.greedy is false, so it has no eval/accuracy_greedy, and no other run has it",
    ),
    "metric at the end only": (
        {"set": {"evaluate.every_steps": 3, "run.steps": 6}, "early_stopping": {"first_step": 4}},
        "evaluate.every_steps is 3, so between early_stopping.first_step 4 and its end it has no eval/accuracy_sampled",
    ),
    "a value that the grid replaces": (
        {"grid": {"run.seed": [0, 1]}, "runs": [{"name": "a", "set": {"run.seed": 3}}]},
        "`run.seed` stands in `set` and in `grid`, whose values win at every point",
    ),
    "a section that loses keys": (
        {"grid": {"learner": [{"learning_rate": 0.1}]}},
        "`learner` is a section, whose other keys of small.yaml",
    ),
    "a folder of the sweep": ({"runs": [{"name": "logs"}]}, "run logs: the sweep's folder has a file or folder of that name"),
    "compared after the end": ({"early_stopping": {"first_step": 4}}, "early_stopping.first_step: 4 is not before the end"),
    "not its own": ({"set": {"run.name": "x"}}, "`run.name`: the sweep decides it"),
    "cluster of a run": ({"runs": [{"set": {"cluster.address": "auto"}}]}, "`cluster.address`: the sweep decides it"),
    "share of no run": ({"cluster": {"share": 0.5}}, "`cluster.share` is a setting of runs; put it under `set` as cluster.share"),
    "no recipe": ({"recipe": ""}, "no recipe; name one in `recipe`"),
    "more than the pool": (
        {"set": {"cluster.pool": True, "cluster.share": 0.6}, "grid": {"run.seed": [0, 1, 2]}},
        "cluster.share: 2 runs at once ask for shares of 1.2 of the pool",
    ),
    "no such recipe": ({"recipe": "missing.yaml"}, "no such file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, tmp_path: Path) -> None:
    tree, said = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        sweep_of(tmp_path, **tree)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_command_refuses_a_sweep_with_exit_code_2_and_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        sweep_of(tmp_path, root=str(tmp_path / "out"), grid={"learner.nothing": [1]})
    refused = command_here("sweep", str(tmp_path / "rates.yaml"))
    assert refused.returncode == 2 and refused.stderr.startswith("error: sweep ") and "learner.nothing" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_to_resume_and_no_run_to_compare_with_are_refused_before_anything_starts(tmp_path: Path) -> None:
    sweep_of(tmp_path, root=str(tmp_path / "out"))
    refused = command_here("sweep", str(tmp_path / "rates.yaml"), "--resume")
    assert refused.returncode == 2 and "--resume: no sweep in" in refused.stderr
    sweep_of(tmp_path, root=str(tmp_path / "out"), runs=[{"name": "a", "alone": str(tmp_path / "nothing")}])
    refused = command_here("sweep", str(tmp_path / "rates.yaml"))
    assert refused.returncode == 2 and "runs.alone" in refused.stderr
    sweep_of(tmp_path, root=str(tmp_path / "out"), at_most=4096)
    refused = command_here("sweep", str(tmp_path / "rates.yaml"))
    assert refused.returncode == 2 and "at_most: 4096 runs need at least a slot each" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_the_example_makes_three_runs_from_one_policy() -> None:
    sweep = load_sweep(ROOT / "recipes" / "sweep.yaml")
    assert len(sweep.runs) == 3 and len({run.policy_key for run in sweep.runs}) == 1
