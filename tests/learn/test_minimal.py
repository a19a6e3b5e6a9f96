"""`recipes/minimal.py`: its update equals the independent reference that the learner is compared with, and its sampler is exact."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from learner_reference import Reference, load
from tiny_policy import random_batch, tiny_policy

from rlhfless_ray import Recipe
from rlhfless_ray.learn.policy_model import TokenLogprobs
from rlhfless_ray.types import Prompt
from tests.learn.conftest import learner_settings

FILE = Path(__file__).parents[2] / "recipes" / "minimal.py"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["minimal"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_update_equals_the_reference(minimal: ModuleType) -> None:
    rng = np.random.default_rng(5)
    files, batches = tiny_policy(width=64), [random_batch(rng) for _ in range(3)]
    plain = {"warmup_steps": 0, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    settings = learner_settings(learner=plain, algorithm={"importance_cap": 0})
    recipe = Recipe.parse({
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": {"clip_low": 0.01, "clip_high": 0.015},
        "learner": {"learning_rate": 1e-3, "grad_clip": 0.1, "micro_batch_tokens": 100},
    })  # fmt: skip
    reference, policy = Reference(files, settings), TokenLogprobs(load(files))
    start = reference.weights()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    for batch in batches:
        wanted = reference.update(batch)
        assert minimal.update(policy, optimizer, batch, recipe) == pytest.approx(wanted[0]["loss"], abs=1e-5)
        found = {name: weight.detach().numpy() for name, weight in policy.model.named_parameters()}
        for name, weight in reference.weights().items():
            assert np.abs(found[name] - weight).max() < 2e-4  # a step of Adam is up to 1e-3
    moved = max(np.abs(weight - start[name]).max() for name, weight in reference.weights().items())
    assert moved > 1e-3


def test_sampled_log_probabilities_are_those_of_the_model(minimal: ModuleType) -> None:
    """Padding on the left, the cache and the end token change nothing: a pass over the whole sequence gives the same numbers."""
    model = load(tiny_policy(width=64))
    prompts = [Prompt(0, "", (3, 4, 5, 6, 7)), Prompt(1, "", (8, 9))]
    torch.manual_seed(0)
    drawn = minimal.sample(model, prompts * 8, max_tokens=12, temperature=0.7, end=1)
    assert {len(ids) for ids, _ in drawn} != {12}, "some responses should end by themselves"
    for prompt, (ids, logprobs) in zip(prompts * 8, drawn, strict=True):
        assert 1 not in ids[:-1].tolist() and (ids[-1] == 1 or len(ids) == 12)
        whole = torch.cat([torch.tensor(prompt.token_ids), ids])
        logits = model(whole[None]).logits[0, len(prompt.token_ids) - 1 : -1].float() / 0.7
        expected = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(logprobs, expected, atol=1e-4)


def test_an_unknown_key_is_one_sentence_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), "run.stesp=1"])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FILE), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("unknown key `run.stesp`; did you mean `run.steps`?\n")
