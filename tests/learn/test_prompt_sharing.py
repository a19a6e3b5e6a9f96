"""Rows that share a prompt: log-probabilities, values and gradients equal those of separate rows, for every family."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.policy_model import INPUTS, TokenLogprobs, load_model, padded
from rlhfless_ray.learn.prompt_sharing import EXACT
from rlhfless_ray.weights.model_folder import write_folder

sys.path.append(str(Path(__file__).parents[1] / "rollout"))

from families import DENSE, ORDER, VOCABULARY, config, policy

CPU = torch.device("cpu")


def batch_of(longest: int = 9, seed: int = 0) -> Batch:
    """Three prompts: with four responses, with one, and an agent's group in which the second prompt is another. Masks in some."""
    rng = np.random.default_rng(seed)
    rows, masks = [], []
    for group, count in enumerate((4, 1, 3)):
        prompt = tuple(rng.integers(2, VOCABULARY, 6 + group).tolist())
        for k in range(count):
            own = (*prompt[:-1], 2) if (group, k) == (2, 1) else prompt
            response = rng.integers(2, VOCABULARY, rng.integers(2, longest)).astype(np.int32)
            mask = np.ones(len(response), bool)
            mask[rng.integers(0, len(response))] = (group, k) != (0, 2)
            rows.append((own, response, np.zeros(len(response), np.float32), float(rng.normal()), group))
            masks.append(None if k % 2 else mask)
    return Batch.of(rows, masks)


SHARED = [np.array([0, 1, 2, 3]), np.array([4]), np.array([5, 7]), np.array([6])]


def gradients(module: Any, batch: Batch, rows: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and entropies by token of the batch, and the gradients of a weighted sum of both."""
    tensors = padded(batch, rows, CPU)
    module.zero_grad()
    logprobs, entropies = module(*(tensors[name] for name in INPUTS), 0.8)
    weights = torch.from_numpy(batch.advantages)[tensors["flat"]]
    (weights * logprobs + 0.1 * entropies).sum().backward()
    order = tensors["flat"].argsort()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return logprobs.detach()[order], entropies.detach()[order], found


def assert_close(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    scale = max(1.0, float(wanted.abs().max()))
    assert float((found - wanted).abs().max()) < 1e-5 * scale, name


@pytest.mark.parametrize("family", ORDER + DENSE)
def test_shared_rows_equal_separate_ones(family: str, tmp_path: Path) -> None:
    module = TokenLogprobs(load_model(write_folder(tmp_path, policy(family)), "float32", False)).train()
    assert module.model.config.get_text_config().model_type in EXACT
    batch = batch_of()
    separate = gradients(module, batch, np.arange(len(batch))[:, None])
    shared = gradients(module, batch, SHARED)
    assert_close(shared[0], separate[0])
    assert_close(shared[1], separate[1])
    assert shared[2].keys() == separate[2].keys()
    for name, gradient in separate[2].items():
        assert_close(shared[2][name], gradient, name)
    mixed = {**padded(batch, SHARED, CPU), "segments": None}
    with torch.no_grad():
        wrong, _ = module(*(mixed[name] for name in INPUTS), 0.8)
    assert float((wrong[mixed["flat"].argsort()] - separate[0]).abs().max()) > 0.01, (
        "the test would not see responses that look at each other"
    )


def test_every_exact_family_is_tested() -> None:
    assert {config(family).model_type for family in ORDER + DENSE} == EXACT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_response_does_not_see_the_others(dtype: str, tmp_path: Path) -> None:
    """To the bit: other tokens of the first response change nothing in the others."""
    module = TokenLogprobs(load_model(write_folder(tmp_path, policy("qwen2", dtype=dtype)), dtype, False)).eval()
    tensors = padded(batch_of(), SHARED, CPU)
    first = tensors["segments"] == 1
    other = {**tensors, "ids": torch.where(first, (tensors["ids"] + 5) % VOCABULARY, tensors["ids"])}
    with torch.no_grad():
        before, after = (module(*(each[name] for name in INPUTS), 1.0)[0] for each in (tensors, other))
    apart = ~first[tensors["rows"], tensors["columns"]]
    assert torch.equal(before[apart], after[apart]) and not torch.equal(before, after)
