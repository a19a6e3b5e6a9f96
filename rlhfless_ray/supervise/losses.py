"""Losses of supervised stages, as pure functions on tensors. Each returns one value per row; the caller weighs and sums them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid


def pairwise_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, kind: str = "sigmoid") -> Tensor:
    """Return the loss of a reward model (pairs,).

    Bradley-Terry with a margin as in Llama 2 (arXiv 2307.09288, section 3.2.2): -log σ(chosen - rejected - margin). `logexp`:
    log(1 + exp(rejected - chosen)), which is the same without the margin.

    Args:
        chosen, rejected: Rewards (pairs,) float32.
        margins: (pairs,) float32.
    """
    return -logsigmoid(chosen - rejected - (0 if kind == "logexp" else margins))


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0, kind: str = "sigmoid") -> Tensor:
    """Return the loss of direct preference optimization (pairs,).

    With d = chosen - rejected: `sigmoid` is -(1 - s)·log σ(β·d) - s·log σ(-β·d) for label smoothing s (DPO, arXiv 2305.18290,
    equation 7; cDPO). `ipo` is (d - 1/(2β))² (arXiv 2310.12036, equation 17), on sums over tokens.

    Args:
        chosen, rejected: log π(response) - log π_reference(response), sums over the response's tokens, (pairs,) float32.
    """
    difference = chosen - rejected
    if kind == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    return -(1 - label_smoothing) * logsigmoid(beta * difference) - label_smoothing * logsigmoid(-beta * difference)


def kto_loss(ratios: Tensor, desirable: Tensor, kl: Tensor, beta: float, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the loss of Kahneman-Tversky optimization (rows,), equations 7 and 8 of arXiv 2402.01306.

    λ_D·(1 - σ(β·(r - z))) for desirable responses and λ_U·(1 - σ(β·(z - r))) for others.

    Args:
        ratios: r = log π(response) - log π_reference(response), (rows,) float32.
        desirable: (rows,) bool.
        kl: z, an estimate of the KL divergence to the reference, at least 0, without gradient; a scalar.
        weights: λ_D and λ_U.
    """
    values = torch.sigmoid(beta * torch.where(desirable, ratios - kl, kl - ratios))
    return torch.where(desirable, weights[0], weights[1]) * (1 - values)


def step_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a process reward model (steps,): the cross-entropy of its reward tokens.

    Args:
        logits: Of the reward tokens at the end of each step, (steps, tokens) float32.
        labels: (steps,) float32. With two tokens: the probability of the first. With more: the number of the right one.
    """
    if logits.shape[1] != 2:
        return cross_entropy(logits, labels.long(), reduction="none")
    return cross_entropy(logits, torch.stack([labels, 1 - labels], dim=1), reduction="none")
