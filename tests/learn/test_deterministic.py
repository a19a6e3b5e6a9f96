"""`run.deterministic` reaches every process that computes with PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings, reference_settings
from rlhfless_ray.learn.reference_rank import ReferenceRank
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.reward.scalar_model import ScalarModel
from rlhfless_ray.rollout.drafter_trainer import DrafterSettings, DrafterTrainer
from rlhfless_ray.supervise.supervised_rank import SupervisedRank


@pytest.mark.parametrize("deterministic", [False, True])
def test_processes_use_deterministic_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deterministic: bool) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that pytest puts back what was before
        del os.environ[name]
    run = {"deterministic": deterministic}
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "run": run})
    TrainerRank(learner_settings(recipe))
    TrainerRank(critic_settings(recipe))
    ReferenceRank(reference_settings(recipe))
    SupervisedRank(SupervisedRecipe.parse({"task": "sft", "data": {"task": "chain"}, "run": run}), steps=1)
    with pytest.raises((OSError, ValueError)):  # an empty folder
        ScalarModel.load(tmp_path, "score", "float32", deterministic=deterministic)
    with pytest.raises((OSError, ValueError)):
        DrafterTrainer(tmp_path, DrafterSettings(1e-3, 1.0, deterministic=deterministic))
    assert told == [True] * (6 if deterministic else 0)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)
