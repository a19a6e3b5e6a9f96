"""Losses against closed forms in numpy, their gradients against differences, and both against values recorded from TRL.

`benchmarks/peers/record_trl.py` wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.supervise.losses import dpo_loss, kto_loss, pairwise_loss, step_loss

RNG = np.random.default_rng(5)
CHOSEN, REJECTED, MARGINS = RNG.normal(size=(3, 16)) * 3
BETA = 0.3
TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl_values.json").read_text())


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(x).requires_grad_() for x in arrays]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (lambda c, r: pairwise_loss(c, r, torch.from_numpy(MARGINS)), lambda c, r: -log_sigmoid(c - r - MARGINS)),
        (lambda c, r: pairwise_loss(c, r, torch.from_numpy(MARGINS), "logexp"), lambda c, r: np.log1p(np.exp(r - c))),
        (lambda c, r: dpo_loss(c, r, BETA), lambda c, r: -log_sigmoid(BETA * (c - r))),
        (
            lambda c, r: dpo_loss(c, r, BETA, label_smoothing=0.2),
            lambda c, r: -0.8 * log_sigmoid(BETA * (c - r)) - 0.2 * log_sigmoid(BETA * (r - c)),
        ),
        (lambda c, r: dpo_loss(c, r, BETA, kind="ipo"), lambda c, r: (c - r - 0.5 / BETA) ** 2),
    ],
)
def test_pairs(ours, expected) -> None:
    c, r = tensors(CHOSEN, REJECTED)
    loss = ours(c, r)
    assert np.allclose(loss.detach().numpy(), expected(CHOSEN, REJECTED), rtol=1e-12)
    loss.sum().backward()
    step = 1e-6
    slope = (expected(CHOSEN + step, REJECTED) - expected(CHOSEN - step, REJECTED)) / (2 * step)
    assert c.grad is not None and np.allclose(c.grad.numpy(), slope, atol=1e-7)
    slope = (expected(CHOSEN, REJECTED + step) - expected(CHOSEN, REJECTED - step)) / (2 * step)
    assert r.grad is not None and np.allclose(r.grad.numpy(), slope, atol=1e-7)


def test_kto() -> None:
    (ratios,) = tensors(CHOSEN)
    desirable = torch.from_numpy(RNG.random(16) < 0.5)
    loss = kto_loss(ratios, desirable, torch.tensor(0.7), BETA, weights=(2.0, 3.0))
    good, bad = (1 / (1 + np.exp(-BETA * s * (CHOSEN - 0.7))) for s in (1, -1))
    expected = np.where(desirable.numpy(), 2 * (1 - good), 3 * (1 - bad))
    assert np.allclose(loss.detach().numpy(), expected, rtol=1e-12)
    loss.sum().backward()
    assert ratios.grad is not None
    assert (np.sign(ratios.grad.numpy()) == np.where(desirable.numpy(), -1, 1)).all()


def test_steps_with_probabilities_and_with_classes() -> None:
    logits = torch.from_numpy(RNG.normal(size=(16, 3))).requires_grad_()
    p, classes = RNG.random(16), RNG.integers(3, size=16)
    two = step_loss(logits[:, :2], torch.from_numpy(p)).detach().numpy()
    difference = (logits[:, 0] - logits[:, 1]).detach().numpy()
    assert np.allclose(two, -p * log_sigmoid(difference) - (1 - p) * log_sigmoid(-difference), rtol=1e-12)
    loss = step_loss(logits, torch.from_numpy(classes.astype(np.float64)))
    loss.sum().backward()
    shares = np.exp(logits.detach().numpy())
    shares /= shares.sum(1, keepdims=True)
    assert np.allclose(loss.detach().numpy(), -np.log(shares[np.arange(16), classes]), rtol=1e-12)
    assert logits.grad is not None and np.allclose(logits.grad.numpy(), shares - np.eye(3)[classes], atol=1e-12)


def dpo_of_trl(logprobs: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    return dpo_loss(*(logprobs.sum(1) - torch.tensor(row["references"], dtype=torch.float64)).chunk(2), TRL["beta"])


def kto_of_trl(logprobs: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    references, kl, kl_references = (torch.tensor(row[key], dtype=torch.float64) for key in ("references", "kl", "kl_references"))
    kl = (kl - kl_references).mean().clamp(min=0)
    return kto_loss(logprobs.sum(1) - references, torch.tensor(row["desirable"]), kl, TRL["beta"], TRL["weights"])


def reward_of_trl(rewards: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    return pairwise_loss(*rewards.chunk(2), torch.tensor(row["margins"], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "inputs", "ours"),
    [
        ("dpo", "logprobs", dpo_of_trl),
        ("kto", "logprobs", kto_of_trl),
        ("reward", "rewards", reward_of_trl),
        ("reward_margin", "rewards", reward_of_trl),
    ],
)
def test_losses_and_gradients_equal_trl(name: str, inputs: str, ours: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> None:
    row = TRL[name]
    given = torch.tensor(row[inputs], dtype=torch.float64, requires_grad=True)
    loss = ours(given, row).mean()
    loss.backward()
    assert loss.item() == pytest.approx(row["loss"], abs=1e-6)
    assert given.grad is not None and np.allclose(given.grad.numpy(), row["gradient"], rtol=0, atol=1e-6)
