"""`run.deterministic` reaches every process that computes with PyTorch."""

from __future__ import annotations

import os

import pytest
import torch

from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings, reference_settings
from rlhfless_ray.learn.reference_rank import ReferenceRank
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.supervised_rank import SupervisedRank


@pytest.mark.parametrize("deterministic", [False, True])
def test_ranks_use_deterministic_kernels(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
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
    assert told == [True] * (4 if deterministic else 0)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)
