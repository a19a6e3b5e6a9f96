"""Gradients of the served losses against plain torch and transformers, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.rank_state import read_state
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.service.model_rank import ModelRank
from rlhfless_ray.service.wire import Datum, PassesRequest
from rlhfless_ray.service.work import AdamStep, passes_of
from rlhfless_ray.weights.model_folder import write_folder
from tests.learn.tiny_policy import VOCABULARY, tiny_policy

pytestmark = pytest.mark.learner
LENGTHS = (9, 4, 14, 1, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_policy())


def make_rank(folder: Path, state: dict[str, Any] | None = None, **lora: int) -> ModelRank:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}
    recipe = Recipe.parse(tree).with_settings({"learner.micro_batch_tokens": 32, "learner.gradient_checkpointing": False})
    recipe = recipe.with_settings({f"lora.{key}": value for key, value in lora.items()})
    made = ModelRank(learner_settings(recipe))
    made.open(folder, ("127.0.0.1", 0), state)
    return made


@pytest.fixture
def rank(folder: Path) -> Iterator[ModelRank]:
    made = make_rank(folder)
    yield made
    made.close()


def data() -> list[Datum]:
    """Targets are not the shifted input everywhere, as in distillation."""
    rng, found = np.random.default_rng(3), []
    for length in LENGTHS:
        ids = rng.integers(2, VOCABULARY, length + 1)
        targets = ids[1:].copy()
        targets[length // 2] = 5
        names = ("weights", "advantages", "logprobs")
        values = {name: rng.normal(size=length).astype(np.float32) for name in names}
        values["logprobs"] = values["logprobs"] * 0.2 - np.float32(np.log(VOCABULARY))
        found.append(Datum(ids[:-1], {"target_tokens": targets, **values}))
    return found


LOSSES = {
    "cross_entropy": lambda p, x: -(p * x["weights"]),
    "importance_sampling": lambda p, x: -((p - x["logprobs"]).exp() * x["advantages"]),
    "ppo": lambda p, x: (
        -torch.minimum((p - x["logprobs"]).exp() * x["advantages"], (p - x["logprobs"]).exp().clamp(0.9, 1.1) * x["advantages"])
    ),
    "cispo": lambda p, x: -((p - x["logprobs"]).exp().clamp(0.9, 1.1).detach() * x["advantages"] * p),
}
READS = {name: ("logprobs", "advantages") for name in LOSSES} | {"cross_entropy": ("weights",)}
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def request(loss: str, given: list[Datum]) -> PassesRequest:
    kept = [Datum(one.tokens, {name: one.inputs[name] for name in ("target_tokens", *READS[loss])}) for one in given]
    return PassesRequest("m", 1, loss, CLIP if loss in ("ppo", "cispo") else {}, False, kept)


def gradients(rank: ModelRank) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in rank.trainer.engine.module.model.named_parameters()}


def expected(folder: Path, loss: str) -> tuple[dict[str, torch.Tensor], list[np.ndarray], float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    logprobs, total = [], 0.0
    for one in data():
        logits = model(torch.from_numpy(one.tokens)[None]).logits[0].log_softmax(-1)
        found = logits.gather(1, torch.from_numpy(one.inputs["target_tokens"])[:, None])[:, 0]
        part = LOSSES[loss](found, {name: torch.from_numpy(x) for name, x in one.inputs.items()}).sum()
        part.backward()
        total += part.item()
        logprobs.append(found.detach().numpy())
    return {name: p.grad for name, p in model.named_parameters()}, logprobs, total


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_plain_torch(rank: ModelRank, folder: Path, loss: str) -> None:
    wanted, logprobs, total = expected(folder, loss)
    done = rank.work(passes_of(request(loss, data()), VOCABULARY, 512))
    np.testing.assert_allclose(done.logprobs, np.concatenate(logprobs), atol=1e-5)
    assert done.loss == pytest.approx(total, abs=1e-4)
    for name, gradient in gradients(rank).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-6 * max(1.0, float(wanted[name].abs().max())), rtol=1e-5)


def test_order_and_parts_of_the_data_do_not_matter(rank: ModelRank, folder: Path) -> None:
    wanted = expected(folder, "cross_entropy")[0]
    given = data()
    for part in (given[3:], given[:1], given[1:3][::-1]):
        rank.work(passes_of(request("cross_entropy", part), VOCABULARY, 512))
    for name, gradient in gradients(rank).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-6 * max(1.0, float(wanted[name].abs().max())), rtol=1e-5)


def test_step_is_that_of_torch_with_the_clients_settings(rank: ModelRank, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    wanted = expected(folder, "cross_entropy")[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
    for name, parameter in model.named_parameters():
        parameter.grad = wanted[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    rank.work(passes_of(request("cross_entropy", data()), VOCABULARY, 512))
    done = rank.work(AdamStep(3e-3, 0.8, 0.9, 1e-4, 0.1, 0.5))
    assert (done.grad_norm, done.skipped) == (pytest.approx(float(norm), rel=1e-4), "")
    for name, parameter in rank.trainer.engine.module.model.named_parameters():
        # Adam divides a gradient by its own size plus eps, which here is far above what processors round differently
        torch.testing.assert_close(parameter, model.get_parameter(name), atol=1e-5, rtol=1e-5)


def test_forward_alone_adds_no_gradient(rank: ModelRank) -> None:
    item = passes_of(request("cross_entropy", data()), VOCABULARY, 512)
    forward = rank.work(type(item)(item.batch, item.inputs, item.loss, item.config, learns=False))
    assert all(p.grad is None or not p.grad.any() for p in rank.trainer.engine.module.model.parameters())
    np.testing.assert_array_equal(forward.logprobs, rank.work(item).logprobs)


@pytest.mark.parametrize("lora", [0, 4])
def test_saved_state_goes_on_bit_for_bit(folder: Path, lora: int) -> None:
    """Two steps, then two more of the same rank, and of one that was opened from its files."""
    item, step = passes_of(request("cross_entropy", data()), VOCABULARY, 512), AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)

    def train(rank: ModelRank) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(rank.work(item).loss)
            assert not rank.work(step).skipped
        return losses

    first = make_rank(folder, rank=lora)
    before = train(first)
    files = {name: bytes(content) for name, content in first.trainer.state_files().items()}
    after = train(first)
    first.close()
    again = make_rank(folder, read_state(files), rank=lora)
    assert train(again) == after
    again.close()
    weights = {name: x for name, x in files.items() if not name.startswith("optimizer")}
    weights["learner.json"] = json.dumps({**json.loads(files["learner.json"]), "optimizer_steps": 0}).encode()
    fresh = make_rank(folder, read_state(weights), rank=lora)
    without_moments = train(fresh)
    fresh.close()
    assert after[0] == without_moments[0] < before[0]
    assert after[1] != without_moments[1]
