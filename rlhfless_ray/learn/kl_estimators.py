"""Estimate KL(policy ‖ reference) from the drawn tokens: as arrays for the reward, as tensors with gradients for the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.learn.advantage import spans

if TYPE_CHECKING:
    from torch import Tensor  # the driver estimates without torch

LIMIT = 10.0  # limit of a single token's estimate, as in OpenRLHF
WEIGHT_LIMIT = 10.0  # limit of the importance weight in the unbiased gradient


def token_kl(logprobs: np.ndarray, reference: np.ndarray, estimator: str, limit: float | None = LIMIT) -> np.ndarray:
    """Return the KL penalty per token for the reward, (tokens,) float32, clamped to [-limit, limit]; None: not clamped."""
    return _estimate(logprobs - reference, estimator, limit, np.expm1)


def mean_kl(kl: np.ndarray, lengths: np.ndarray) -> float:
    """Average the mean of each sample's tokens over the samples that have some. NaN: none has. `kl` (Σ length,), `lengths` (samples,)."""
    means = [kl[span].mean() for span in spans(lengths) if span.stop > span.start]
    return float(np.mean(means)) if means else math.nan


def bounded_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str, limit: float | None = LIMIT) -> Tensor:
    """Return the same for the loss, with the estimate's own gradient, in at least float32.

    All tensors are (tokens,). No gradient flows through a clamped estimate. k3 and its gradient stay finite, however far the policy
    is below the reference. With `limit` None nothing is clamped, and k3 may overflow.
    """
    import torch

    return _estimate(_wide(logprobs) - _wide(reference_logprobs), estimator, limit, torch.expm1)


def _estimate(difference: Any, estimator: str, limit: float | None, expm1: Callable[[Any], Any]) -> Any:
    """Estimate the KL per token from samples of the policy (Schulman 2020, "Approximating KL"), for arrays and tensors.

    With d = `difference` = log p of the policy - log p of the reference: k1 = d (unbiased, may be negative), k2 = d²/2, k3 =
    exp(-d) - 1 + d (unbiased and never negative).
    """
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = difference * difference / 2
    else:
        if limit is not None:  # exp overflows from d = -88 on; at d = -max(limit, 2) k3 has passed the limit, so this changes no value
            difference = difference.clip(min=-max(limit, 2.0))
        estimate = expm1(-difference) + difference  # exp(…) - 1 loses all significant digits near 0
    return estimate if limit is None else estimate.clip(-limit, limit)


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
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))
