"""A run whose optimizer steps do not divide its rollouts, stopped and resumed in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import command_here, samples, write_recipe
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

SETTINGS = {
    "rollout__min_tokens": 2, "evaluate__prompts": 0, "checkpoint__every_steps": 1,
    "algorithm__batch_samples": 12, "algorithm__remainder": "carry", "algorithm__epochs": 2,
    "algorithm__advantage": {"estimator": "gae", "gamma": 1.0, "lambd": 0.9},
    "critic__freeze_policy_steps": 1, "critic__schedule": "constant", "critic__warmup_share": 0.0, "critic__learning_rate": 1e-3,
}  # fmt: skip


def test_what_is_carried_survives_a_stop(tmp_path: Path) -> None:
    """Of 32 samples in two epochs five steps of 12 are made and four samples stay, then eight, with which the third
    rollout makes six whole steps. The stop is a copy of the run without its last checkpoint, which is resumed."""
    recipe = write_recipe(tmp_path, run__steps=3, **SETTINGS)
    done = command_here("train", recipe)
    assert done.returncode == 0, done.stderr
    other = tmp_path / "runs" / "small"
    one = Path(shutil.copytree(other, tmp_path / "whole"))
    shutil.rmtree(other / "checkpoints" / "step_3")
    (other / "samples" / "step_3.jsonl").unlink()
    done = command_here("train", recipe, "--resume")
    assert done.returncode == 0 and "step 3/3" in done.stdout, done.stdout + done.stderr
    told = rows(one)
    assert [row.get("critic/applied") for row in told if row["step"]] == [5, 5, 6]
    assert [row.get("learn/applied") for row in told if row["step"]] == [0, 5, 6]
    assert [(one / "checkpoints" / f"step_{step}" / "carried.npz").is_file() for step in (2, 3)] == [True, False]
    for step in (1, 2, 3):
        assert samples(one, step) == samples(other, step)
        assert all(len(sample["response"]) > 0 for sample in samples(one, step))
    for name in ("model.safetensors", "critic_model.safetensors"):
        first, second = (load_file(run / "checkpoints" / "step_3" / name) for run in (one, other))
        for key, weights in first.items():
            np.testing.assert_array_equal(weights, second[key])
