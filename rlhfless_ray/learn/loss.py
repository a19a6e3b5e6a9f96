"""The policy loss. Pure torch functions on per-token tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token (Schulman et al. 2017, equation 7), with its own bound on either side.

    All tensors (tokens,). loss = -min(r·A, clip(r, 1 - low, 1 + high)·A) with r = exp(logprobs - old_logprobs).
    Returns the loss and a mask of the tokens where the clipped branch was taken.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def importance_weights(learner_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(p_learner / p_sampler, cap), both under the weights the sample was drawn with.

    They correct the gradient for sampler and learner computing slightly different probabilities (Ionides 2008 for the
    truncation). No gradient flows through them. `cap` 0 turns the correction off.
    """
    if cap == 0:
        return torch.ones_like(learner_logprobs)
    return torch.exp(learner_logprobs - sampler_logprobs).clamp(max=cap).detach()


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) from samples of the policy (Schulman 2020, "Approximating KL").

    With d = logprobs - reference_logprobs: k1 = d (unbiased, may be negative), k2 = d²/2, k3 = exp(-d) - 1 + d
    (unbiased and never negative).
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.exp(-difference) - 1 + difference
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def token_weights(lengths: Tensor, mean: str) -> Tensor:
    """Weight of each sequence's tokens such that the weighted sum over an optimizer step is the wanted mean.

    lengths (sequences,) of ALL sequences of the optimizer step, on every rank; returns (sequences,). `token`: every
    token counts the same. `sequence`: every sequence counts the same. Computed over the whole step before it is cut
    into micro-batches, so neither ranks nor micro-batches change the loss.
    """
    if mean == "token":
        return torch.full_like(lengths, 1.0 / max(float(lengths.sum()), 1.0), dtype=torch.float64)
    if mean == "sequence":
        return 1.0 / (lengths.double().clamp(min=1) * len(lengths))
    raise ValueError(f"unknown mean {mean!r}: token or sequence")
