"""The checkpoints of commit d5e5d210, one of each rollout mode, are still read and resumed.

`tests/data/checkpoints_d5e5d210` has what runs of that commit with the recipes below had saved after one to three of four steps. Their
policy was the Qwen2 of 11,680 parameters in `tests/run/c39cbef`. The embedding of its end token was multiplied by four, so that
responses end early.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.repeated_run import AGENT, REWARD
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.types import Prompt, Sample, Scored
from tests.run_files import rows

DATA = Path(__file__).parents[1] / "data" / "checkpoints_d5e5d210"
MODEL = Path(__file__).parents[1] / "run" / "c39cbef" / "model"
COUNT = 2  # responses to a prompt
PARTIAL: dict[str, Any] = {"partial": "continue", "max_lag_steps": 2, "oversample": 2, "max_tokens": 200, "stream_interval_s": 0.02}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_tokens": 60},
    "one_step_off": {"max_tokens": 60, "max_lag_steps": 1},
    "continue": PARTIAL,
    "restart": {**PARTIAL, "partial": "restart"},
    "beside_update": {**PARTIAL, "ahead": True, "max_tokens": 300},
    "agent": PARTIAL,
}


def resumable(mode: str, folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """Put a mode's checkpoint into a run folder. Returns the recipe that continues it, and the driver's state."""
    run = folder / "runs" / mode
    shutil.copytree(DATA / mode, run / "checkpoints")
    (step,) = (run / "checkpoints").iterdir()
    shutil.copytree(MODEL, folder / "model")
    shutil.copy(step / "model.safetensors", folder / "model")
    (folder / "reward_file.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    tree: dict[str, Any] = {
        "run": {"name": mode, "root": str(folder / "runs"), "steps": 4, "seed": 3},
        "policy": {"path": str(folder / "model")},
        "prompts": {"task": "chain", "batch_prompts": 4 if mode == "synchronous" else 2, "rows": 16},
        "evaluate": {"prompts": 0},
        "rollout": {"samples_per_prompt": COUNT, "kv_cache_mb": 64, "max_running": 64, "max_actors": 1, **MODES[mode]},
        "functions": {"elastic": False},
        "reward": {"function": f"{folder / 'reward_file.py'}:shorter"},
        "learner": {"learning_rate": 0.001},
        "checkpoint": {"every_steps": 1, "keep": 9},
        "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},
    }
    if mode == "synchronous":
        tree["algorithm"] = {"filter_range": [-3.0, 0], "filter_draw": 1.9}
    if mode == "agent":
        tree |= {"reward": {}, "agent": {"path": str(folder / "agent.py"), "max_tokens": 120, "turn_tokens": 30}}
    return Recipe.parse(tree), json.loads((step / "driver.json").read_text())


def saved_responses(state: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the samples of a checkpoint by row and place in their group: begun, generated ahead, or left over by the filter."""
    groups = [group["samples"] for group in state.get("in_flight", [])]
    for samples in (state.get("ahead", []), np.ravel(state["refill"]).tolist()):
        groups += [samples[start : start + COUNT] for start in range(0, len(samples), COUNT)]
    return {(sample["row"], place): sample for group in groups for place, sample in enumerate(group)}


def drawn_tokens(sample: Sample) -> list[int]:
    """Return the tokens of the policy."""
    tokens = sample.completion.token_ids
    return (tokens if sample.action_mask is None else tokens[sample.action_mask]).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_state_is_read_and_written_alike(mode: str, tmp_path: Path) -> None:
    recipe, _ = resumable(mode, tmp_path)
    step, files, state = Checkpoints(recipe.checkpoint, tmp_path / "runs" / mode).load()  # compares checksums
    assert step == state["step"] and set(files.sizes) >= {"model.safetensors", "optimizer.safetensors", "learner.json"}
    before = saved_responses(json.loads(json.dumps(state)))
    prompts, cursor = [Prompt(row, f"p{row}", (1, row)) for row in range(16)], Cursor(16, 2, False, 0)
    groups, sampling = GroupsInFlight(recipe), DynamicSampling(recipe, cursor)
    sampling.restore(state["refill"], prompts)
    if ahead := state.get("ahead"):
        drawn = [sample["row"] for sample in ahead][::COUNT]
        cursor.next = lambda count=None: drawn  # type: ignore[method-assign]
        groups.restore_ahead(ahead, step + 1, cursor, prompts)
    else:
        groups.restore(state.get("in_flight", []), prompts)
    after = saved_responses(json.loads(json.dumps({"in_flight": groups.state(groups.in_flight), "refill": sampling.state()})))
    assert before and before.keys() == after.keys()
    changed = {"id", "sample"}  # the name of a sample, which was its number in the group
    for name, sample in before.items():
        completion = after[name].pop("completion")
        assert {**completion, "key": 0} == {**sample.pop("completion"), "key": 0}
        assert {**after[name], **dict.fromkeys(changed)} == {**sample, **dict.fromkeys(changed)}
    is_scored = [isinstance(sample, Scored) for group in groups.in_flight for sample in group.samples]
    assert any(is_scored) == (mode == "agent") and not all(is_scored or [False])


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.learner
@pytest.mark.long
@pytest.mark.usefixtures("private_ray")
@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_from_its_checkpoint(mode: str, tmp_path: Path) -> None:
    recipe, state = resumable(mode, tmp_path)
    run_folder, number = tmp_path / "runs" / mode, state["step"] + 1
    with Runtime(recipe, resume=True) as run:
        step = next(iter(run))
    assert step.number == number and len(step.samples) == recipe.prompts.batch_prompts * COUNT
    found = {(sample.id.row, sample.id.number % COUNT): drawn_tokens(sample) for sample in reversed(step.samples)}
    checkpoint = run_folder / "checkpoints" / f"step_{number}"
    later = saved_responses(json.loads((checkpoint / "driver.json").read_text()))
    found |= {name: sample["completion"]["token_ids"] for name, sample in later.items() if name not in found}
    for name, sample in saved_responses(state).items():
        completion = sample["completion"]
        tokens = np.array(completion["token_ids"])
        if sample["action_mask"] is not None:
            tokens = tokens[sample["action_mask"]]
        assert found[name][: len(tokens)] == tokens.tolist(), "the response goes on where it was"
        assert completion["finish_reason"] == "cut" or mode == "agent" or len(found[name]) == len(tokens)
    learner = json.loads((checkpoint / "learner.json").read_text())
    assert learner["optimizer_steps"] == number, "the optimizer went on, it did not begin again"
    (row,) = rows(run_folder, first_step=number)
    assert np.isfinite(row["learn/loss"]) and row["reward/failed"] == 0
