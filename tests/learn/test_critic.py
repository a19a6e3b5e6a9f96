"""The critic's gang against an independent reference, and as a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_reference import CriticReference
from safetensors.torch import load, save
from test_learner import distance
from tiny_policy import tiny_policy
from transformers import AutoModelForSequenceClassification

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.output_scale import output_scale
from rlhfless_ray.learn.policy_model import load_critic
from rlhfless_ray.weights.model_folder import write_folder
from tests.learn.conftest import marked


@pytest.mark.parametrize(("name", "ranks"), marked("critic/0", "critic/1", "critic/3", "critic scaled/0"))
def test_updates_equal_the_reference(cases: Any, name: str, ranks: int, tmp_path: Path) -> None:
    case, found = cases.first(1)["critic/0"], cases.result(name, ranks)
    first = load_critic(write_folder(tmp_path, case["files"]), "float32", False, "score", 3)
    start = {name: tensor.numpy().copy() for name, tensor in first.state_dict().items()}
    scale = (0.2, 0.5) if "scaled" in name else (0.0, 1.0)
    reference = CriticReference(case["files"], case["settings"], start["score.weight"], *scale)
    for batch, values, got, weights in zip(case["batches"], found["values"], found["stats"], found["weights"], strict=True):
        before, steps = reference.update(batch)
        np.testing.assert_allclose(values, before, atol=2e-5)
        assert got.loss == pytest.approx(np.mean([s["loss"] for s in steps]), rel=1e-5)
        assert got.grad_norm == pytest.approx(np.mean([s["grad_norm"] for s in steps]), rel=1e-4)
        assert got.learning_rate == pytest.approx(np.mean([s["rate"] for s in steps]), rel=1e-9)
        assert got.clip_share == pytest.approx(np.mean([s["clip_share"] for s in steps]), abs=0.01)
        # of both halves of the batch, which are about equal
        assert got.value_mean == pytest.approx(before.mean(), abs=0.2) and got.return_mean == pytest.approx(batch.returns.mean(), abs=0.2)
        assert distance(weights, {n: p.detach().numpy() for n, p in reference.named.items()}, start) < 2e-4
    exported = {name: tensor for content in found["model"].values() for name, tensor in load(content).items()}
    assert len(found["model"]) == ranks, "each rank has its part"
    assert exported.keys() == weights.keys() and all(np.array_equal(x.numpy(), weights[name]) for name, x in exported.items())
    assert max(s.clip_share for s in found["stats"]) > 0.05, "values are clipped"
    assert min(s.grad_norm for s in found["stats"]) > 0.3, "gradients are clipped"


def test_its_folder_is_a_model_that_transformers_loads(cases: Any, tmp_path: Path) -> None:
    found = cases.result("critic/0", 1)
    files = {"config.json": found["config"], "model.safetensors": found["snapshots"][1]["model.safetensors"]}
    model, told = AutoModelForSequenceClassification.from_pretrained(write_folder(tmp_path, files), output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert json.loads(found["config"])["architectures"] == ["Qwen2ForSequenceClassification"]
    np.testing.assert_array_equal(model.score.weight.detach(), found["weights"][0]["score.weight"])


def test_a_normalized_critic_is_saved_with_its_head_as_it_is_and_its_scale(cases: Any, tmp_path: Path) -> None:
    """Loaded with the same setting it gives the same values, here and in OpenRLHF."""
    found = cases.result("critic scaled/0", 1)
    config = json.loads(found["config"])
    assert (config["mean"], config["std"], config["value_head_prefix"]) == (0.2, 0.5, "score")
    np.testing.assert_array_equal(load(found["snapshots"][1]["model.safetensors"])["score.weight"], found["weights"][0]["score.weight"])
    files = {**cases.scaled, "config.json": found["config"], "model.safetensors": found["snapshots"][1]["model.safetensors"]}
    model = load_critic(write_folder(tmp_path, files), "float32", False, "score", 1)
    assert output_scale(model.config.to_dict(), "critic.path", "critic.normalize") == (0.2, 0.5)


def test_a_scale_that_cannot_divide_is_refused() -> None:
    assert output_scale({}, "critic.path", "critic.normalize") == (0.0, 1.0)
    with pytest.raises(UserError, match=r"critic\.path: critic\.normalize divides by the std in its config\.json, which is 0"):
        output_scale({"mean": 1.0, "std": 0}, "critic.path", "critic.normalize")
    for mean, std in ((None, 1.0), ([0.5], 1.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(UserError, match="finite numbers as mean and std"):
            output_scale({"mean": mean, "std": std}, "critic.path", "critic.normalize")


def test_the_head_is_taken_by_its_name_or_drawn(tmp_path: Path) -> None:
    files = tiny_policy(width=64)
    head = torch.arange(64.0)[None]
    with_head = {**files, "model.safetensors": save({**load(files["model.safetensors"]), "value_head.weight": head}, {"format": "pt"})}
    folder = write_folder(tmp_path / "a", with_head)
    assert torch.equal(load_critic(folder, "float32", False, "value_head", 1).score.weight, head)
    named = {**with_head, "config.json": json.dumps({**json.loads(files["config.json"]), "value_head_prefix": "value_head"}).encode()}
    assert torch.equal(load_critic(write_folder(tmp_path / "c", named), "float32", False, "score", 1).score.weight, head)
    drawn = [load_critic(folder, "float32", False, "score", seed).score.weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert drawn[0].std() == pytest.approx(1 / 65, rel=0.4)
    config = {"model_type": "mamba", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    other = write_folder(tmp_path / "b", {**files, "config.json": json.dumps(config).encode()})
    with pytest.raises(UserError, match=r"critic\.path: "):
        load_critic(other, "float32", False, "score", 1)


def test_a_head_of_several_values_is_refused(tmp_path: Path) -> None:
    files = tiny_policy(width=64)
    three = {**load(files["model.safetensors"]), "score.weight": torch.ones(3, 64)}
    folder = write_folder(tmp_path / "a", {**files, "model.safetensors": save(three, {"format": "pt"})})
    with pytest.raises(UserError, match=r"policy\.path: its head `score` gives several values, but a critic or reward model has one"):
        load_critic(folder, "float32", False, "score", 1, "policy.path")
    with pytest.raises(UserError, match=r"critic\.path: its `model\.embed_tokens\.weight` has the shape \d+ × 64, so it is no scalar head"):
        load_critic(write_folder(tmp_path / "b", files), "float32", False, "model.embed_tokens", 1)
