"""A run that trains adapters on filtered groups, started and resumed by the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhfless_ray.run.find_model import find_model
from rlhfless_ray.weights.model_folder import read_folder, stored_weights
from tests.conftest import command_here, samples, write_recipe
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]
BOUND = -3.4  # about the mean reward of the policy it begins with


@pytest.fixture(scope="module", params=["merged", "adapter"])
def run(private_ray: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of two steps and its recipe."""
    folder = tmp_path_factory.mktemp("lora")
    recipe = write_recipe(
        folder,
        run__steps=2,
        lora__rank=4,
        lora__dropout=0.1,
        lora__publish=request.param,
        algorithm__filter_range=[-100.0, BOUND],
        algorithm__filter_draw=1.9,
        algorithm__kl={"coefficient": 0.01},
        learner__learning_rate=0.01,
        learner__ranks=2,
        checkpoint__every_steps=1,
        save__path=str(folder / "out"),
        evaluate__prompts=0,
    )
    done = command_here("train", recipe)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "small", recipe


def test_steps_are_full_of_groups_that_pass(run: tuple[Path, str]) -> None:
    for step in (1, 2):
        found = samples(run[0], step)
        assert len(found) == 8 * 4
        for start in range(0, len(found), 4):
            group = found[start : start + 4]
            assert len({s["prompt_index"] for s in group}) == 1
            assert np.mean([s["reward"] for s in group]) < BOUND
        row = rows(run[0], 1)[step - 1]
        assert row["filter/rounds"] > 1 and row["filter/prompts"] > 8
        assert row["filter/pass_percent"] == pytest.approx(100 * (1 - row["filter/dropped_prompts"] / row["filter/prompts"]))


def test_engines_sample_what_the_learner_trains(run: tuple[Path, str]) -> None:
    """Where adapters were not merged into what is published, the second step's log-probabilities would differ."""
    row = rows(run[0], 1)[1]
    assert row["learn/kl"] > 1e-4, "the first update has moved the policy"
    if row["filter/taken_over"] == 0:  # else some were sampled by the weights before
        assert row["learn/mismatch_max"] < 1e-3
    fresh = [s for s in samples(run[0], 2) if s["version"] == 1]
    assert fresh and len(fresh) == 32 - 4 * row["filter/taken_over"]


def test_the_output_is_an_adapter_and_the_model_has_it_merged(run: tuple[Path, str]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = run[0]
    out = path.parents[1] / "out"
    assert (out / "adapter_model.safetensors").read_bytes() == (path / "adapter" / "adapter_model.safetensors").read_bytes()
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_dropout"]) == (4, 0.1)
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    by_peft = PeftModel.from_pretrained(base, str(out)).merge_and_unload().state_dict()
    final = dict(stored_weights(read_folder(path / "model")))  # of each rank's file
    for name, tensor in final.items():
        np.testing.assert_allclose(tensor, by_peft[name].numpy(), atol=1e-6)
    AutoModelForCausalLM.from_pretrained(path / "model")
    merged = find_model(path / "checkpoints" / "step_2", "--model", out.parent / "found")
    others = [{file.name for file in folder.iterdir() if "safetensors" not in file.name} for folder in (merged, path / "model")]
    assert others[0] == others[1]
    found = dict(stored_weights(read_folder(merged)))
    assert found.keys() == final.keys() and all(np.array_equal(found[name], final[name]) for name in found)


@pytest.mark.parametrize("run", ["adapter"], indirect=True)  # checkpoints do not depend on what is published
def test_a_resumed_run_ends_where_this_one_did(run: tuple[Path, str]) -> None:
    """Adapters, moments, dropout and groups that were left over come back; the base, which engines get too, is what the run began with."""
    path, recipe = run
    before, learned = load_file(path / "adapter" / "adapter_model.safetensors"), samples(path, 2)
    shutil.rmtree(path / "checkpoints" / "step_2")
    done = command_here("train", recipe, "--resume")
    assert done.returncode == 0, done.stderr
    told = ("prompt_index", "sample", "response", "reward", "version", "advantage")
    assert [[s[name] for name in told] for s in samples(path, 2)] == [[s[name] for name in told] for s in learned]
    after = load_file(path / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
