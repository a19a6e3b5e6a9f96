"""Estimate KL(policy ‖ reference) from the drawn tokens. Pure torch functions on per-token tensors."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 10.0  # limit of a single token's estimate, as in OpenRLHF
WEIGHT_LIMIT = 10.0  # limit of the importance weight in the unbiased gradient


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy ‖ reference) per token from samples of the policy (Schulman 2020, "Approximating KL").

    With d = logprobs - reference_logprobs: k1 = d (unbiased, may be negative), k2 = d²/2, k3 = exp(-d) - 1 + d
    (unbiased and never negative).
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference  # exp(…) - 1 loses all significant digits near 0
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def bounded_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str, limit: float | None = LIMIT) -> Tensor:
    """Return `kl_estimate` in at least float32, clamped to [-limit, limit], for the reward or for the loss with its own gradient.

    All tensors are (tokens,). No gradient flows through a clamped estimate. k3 and its gradient stay finite, however far the policy
    is below the reference. With `limit` None nothing is clamped, and k3 may overflow.
    """
    logprobs, reference_logprobs = _wide(logprobs), _wide(reference_logprobs)
    if limit is None:
        return kl_estimate(logprobs, reference_logprobs, estimator)
    if estimator == "k3":
        # exp overflows from d = -88 on; at d = -max(limit, 2) k3 has passed the limit, so cutting d first changes no value
        difference = (logprobs - reference_logprobs).clamp(min=-max(limit, 2.0))
        return (torch.expm1(-difference) + difference).clamp(max=limit)
    return kl_estimate(logprobs, reference_logprobs, estimator).clamp(-limit, limit)


def unbiased_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    old_logprobs: Tensor | None,
    estimator: str,
    limit: float | None = LIMIT,
    weight_limit: float = WEIGHT_LIMIT,
) -> Tensor:
    """Return the value of `bounded_kl` with the gradient of the KL itself: w·d·∇log π, d = log π - log π_ref.

    An unbiased value does not have an unbiased gradient. On-policy, E[∇k1] = 0 and E[∇k3] = ∇KL(π_ref ‖ π); only k2 has the right
    gradient. Off-policy, none has. With w = π/π_old, clamped to `weight_limit` and without gradient, the mean of w·d·∇log π over
    π_old is ∇KL(π ‖ π_ref) (Liu et al. 2025, "Rethinking KL Regularization in RLHF", arXiv 2510.01555; OpenRLHF 0.11.1).
    `old_logprobs` None: on-policy, w = 1. All tensors are (tokens,); the result is at least float32.
    """
    value = bounded_kl(logprobs.detach(), reference_logprobs, estimator, limit)
    wide = _wide(logprobs)
    slope = (wide - _wide(reference_logprobs)).detach()
    if old_logprobs is not None:
        slope = slope * (wide.detach() - _wide(old_logprobs)).exp().clamp(max=weight_limit)
    return value + slope * (wide - wide.detach())  # the second term is 0 and carries the gradient


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
