"""Losses, KL estimates and advantages against values recorded from OpenRLHF 0.11.2's functions, setting by setting.

`benchmarks/peers/record_openrlhf.py` wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.learn.compute_advantages import compute_advantages
from rlhfless_ray.learn.importance import correction_weights
from rlhfless_ray.learn.kl_estimators import bounded_kl, unbiased_kl
from rlhfless_ray.learn.losses import clipped_loss, sequence_ratios, token_ratios, token_weights, value_loss
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.algorithm_sections import LossConfig
from rlhfless_ray.supervise.losses import dpo_loss, pairwise_loss

pytestmark = pytest.mark.pure

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "openrlhf_values.json").read_text())
LENGTHS = np.array(RECORDED["lengths"])
SEQUENCE = torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS))
TOLERANCE = 4e-6  # their computation is in float32


def tokens(name: str) -> torch.Tensor:
    return torch.tensor(RECORDED["inputs"][name], dtype=torch.float64)


def weights(mean: str) -> torch.Tensor:
    return token_weights(torch.from_numpy(LENGTHS), mean)[SEQUENCE]


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_policy_losses_and_their_gradients() -> None:
    old, sampler, advantages = tokens("old"), tokens("sampler"), tokens("advantages")
    for row in RECORDED["policy_loss"]:
        new = tokens("new").requires_grad_()
        level, mode, gating, (low, high) = row["correction"]
        band = {"correction_mode": mode, "correction_gating": gating, "correction_low": low, "correction_high": high}
        section = LossConfig(correction_level=level, **(band if level != "off" else {}))
        if row["kind"] == "gspo":  # which takes its ratio to the sampler where a correction is on, and corrects nothing
            ratios = sequence_ratios(new, old if level == "off" else sampler, SEQUENCE, len(LENGTHS))
        else:
            ratios = token_ratios(new, old)
        losses, clipped = clipped_loss(ratios, advantages, 0.1, 0.15, row["dual"])
        if level != "off" and row["kind"] == "ppo":
            losses = losses * correction_weights(section, old, sampler, SEQUENCE, len(LENGTHS))[0]
        loss = (losses * weights(row["mean"])).sum()
        loss.backward()
        close(loss.item(), row["loss"])
        close(new.grad, row["gradient"])
        close(clipped.double().mean(), row["clipped"])
        close((old - new.detach()).mean(), row["kl"])


def test_value_losses_and_their_gradients() -> None:
    for row in RECORDED["value_loss"]:
        values = tokens("values").requires_grad_()
        losses, _ = value_loss(values, tokens("old_values"), tokens("returns"), row["clip"])
        loss = (losses * weights(row["mean"])).sum()
        loss.backward()
        close(loss.item(), row["loss"])
        close(values.grad, row["gradient"])


def test_estimates_of_the_kl_and_their_gradients() -> None:
    for row in RECORDED["kl"]:
        new = tokens("new").requires_grad_()
        if row["unbiased"]:
            found = unbiased_kl(new, tokens("reference"), tokens("old"), row["estimator"])
        else:
            found = bounded_kl(new, tokens("reference"), row["estimator"])
        found.sum().backward()
        close(found.detach(), row["values"])
        close(new.grad, row["gradient"])


def test_advantages_and_returns_of_every_estimator() -> None:
    rewards = np.array(RECORDED["inputs"]["rewards"]).reshape(-1, RECORDED["group"])
    for row in RECORDED["advantages"]:
        advantage = {"estimator": row["estimator"], "gamma": row["gamma"], "lambd": 0.8 if row["estimator"] == "gae" else 1.0}
        if row["estimator"] in ("gae", "reinforce", "reinforce_baseline"):
            advantage["normalize_std"] = row["divide"]
        reward: dict[str, Any] = {"function": "task", "clip_range": row["clip"], "stop_properly_penalty": row["stop"]}
        if row["overlong"]:
            reward |= {"overlong_buffer_tokens": row["overlong"], "overlong_penalty": 0.7}
        chosen = Recipe.parse({"prompts": {"task": "chain"}, "reward": reward, "algorithm": {"advantage": advantage}})
        found, returns, _ = compute_advantages(
            chosen.algorithm,
            chosen.reward,
            rewards,
            LENGTHS,
            LENGTHS.max() == LENGTHS,
            int(LENGTHS.max()),
            kl=tokens("kl").numpy(),
            kl_coefficient=row["kl"],
            values=tokens("values").numpy() if row["estimator"] == "gae" else None,
        )
        try:
            close(found, row["advantages"])
            close(returns, row["returns"])
        except AssertionError as error:
            raise AssertionError(f"{ {name: x for name, x in row.items() if name not in ('advantages', 'returns')} }") from error


def test_losses_of_supervised_stages() -> None:
    chosen, rejected, known, other = (tokens(name)[:6] for name in ("old", "new", "sampler", "reference"))
    recorded = RECORDED["supervised"]
    margins = torch.tensor(RECORDED["inputs"]["rewards"], dtype=torch.float64).abs()
    close(pairwise_loss(chosen, rejected, margins).mean(), recorded["pairwise"])
    close(pairwise_loss(chosen, rejected, margins, "logexp").mean(), recorded["logexp"])
    for row in recorded["dpo"]:
        kind = "ipo" if row["ipo"] else "sigmoid"
        close(dpo_loss(chosen - known, rejected - other, row["beta"], row["smoothing"], kind).mean(), row["loss"])
