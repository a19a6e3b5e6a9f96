"""A run of an earlier version (commit c39cbef) is still read: its recipe, the planner's state, its report and its checkpoint.

`tests/run/c39cbef` is the folder that `rlhfless train` of that commit left after two steps of a Qwen2 of 11,680 parameters, without the
first checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from placement.speed.decode_speed import Speed
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.report import write_report
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder
from tests.run_files import rows

FOLDER = Path(__file__).with_name("c39cbef")
STEPS = 2  # done by the earlier version


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A copy that may be written to. Its policy's folder lies in `model`, with the checkpoint's weights."""
    folder = shutil.copytree(FOLDER, tmp_path / "runs" / "old")
    shutil.copy(folder / "checkpoints" / f"step_{STEPS}" / "model.safetensors", folder / "model")
    return folder


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return Recipe.load(folder / "recipe.yaml", [f"run.root={folder.parent}", f"policy.path={folder / 'model'}", *overrides])


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {dotted key: value as text} of a recipe's tree."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
    return found


def test_the_recipe_is_read_with_the_same_meaning(run_folder: Path) -> None:
    recipe = Recipe.load(run_folder / "recipe.yaml")
    written, read = (leaves(yaml.safe_load(text)) for text in ((run_folder / "recipe.yaml").read_text(), recipe.to_yaml()))
    assert written.items() <= read.items(), "no value of the earlier version is lost or changed"
    assert recipe.rollout.speculation == recipe.rollout.partial == "off" and recipe.rollout.max_lag_steps == 0, "what came since is off"


def test_the_planner_goes_on_from_its_state(run_folder: Path) -> None:
    """With the speed and the times that the earlier version had fitted."""
    _, _, driver = Checkpoints(recipe_of(run_folder).checkpoint, run_folder).load()
    old = driver["autoscaler"]
    planner = Autoscaler(recipe_of(run_folder), Speed(1.0, 1.0))
    planner.restore(old)
    now = json.loads(json.dumps(planner.state()))
    assert now["actors"] == old["actors"] and now["history"] == old["history"] and now["second"] == old["second"]
    assert now["learner_slots"] == old["learner_slots"] and now["speed"] == old["speed"]
    known = {name: term for name, term in old["terms"].items() if name != "learn"}  # which nothing ever read
    for name, term in {**known, "around": old["around"], "outside": old["outside"]}.items():
        assert {**now["terms"][name], **{key: term[key] for key in ("beta", "units", "seconds")}} == now["terms"][name], "no term is lost"


def test_the_report_is_drawn(run_folder: Path) -> None:
    (run_folder / "report.html").unlink(missing_ok=True)
    record = RunRecord.read(run_folder)
    assert [row["step"] for row in record.steps] == [1, 2] and record.ledger and not record.problems
    page = write_report(run_folder).read_text()
    charts = json.loads(page.partition('id="charts">')[2].partition("</script>")[0])
    assert {"reward", "accuracy", "forecast", "cost", "phases"} <= charts.keys() and all(chart["data"] for chart in charts.values())


def test_the_folder_and_its_checkpoint_can_be_resumed(run_folder: Path) -> None:
    recipe = recipe_of(run_folder)
    assert RunFolder.resumed(recipe).path == run_folder
    step, files, driver = Checkpoints(recipe.checkpoint, run_folder).load()  # compares checksums
    assert step == driver["step"] == STEPS and set(files.sizes) >= {"model.safetensors", "optimizer.safetensors", "learner.json"}


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.learner
@pytest.mark.long
def test_training_goes_on_from_its_checkpoint(run_folder: Path) -> None:
    with Runtime(recipe_of(run_folder, f"run.steps={STEPS + 1}"), resume=True) as run:
        assert [step.number for step in run] == [STEPS + 1]
    found = rows(run_folder, first_step=1)
    assert [row["step"] for row in found] == [1, 2, 3]
    learner = json.loads((run_folder / "checkpoints" / f"step_{STEPS + 1}" / "learner.json").read_text())
    assert learner["optimizer_steps"] == STEPS + 1, "the optimizer went on, it did not begin again"
    assert np.isfinite(found[-1]["learn/loss"]) and found[-1]["learn/grad_norm"] >= 0
