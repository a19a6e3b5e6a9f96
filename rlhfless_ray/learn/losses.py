"""The losses of policy and critic. Pure torch functions on per-token tensors.

Every loss here is per token; a batch's loss is the sum of weight · loss with the weights of `token_weights`. As those are
made for the whole optimizer step, the sum over micro-batches and ranks is the loss of the whole, whatever the cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfless_ray.learn.importance import importance_weights as importance_weights
from rlhfless_ray.learn.kl_estimators import kl_estimate as kl_estimate
from rlhfless_ray.learn.segment_ops import sequence_means

LOG_RATIO_LIMIT = 20.0


def token_ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """PPO's ratio exp(logprobs - old_logprobs) per token, (tokens,). The logarithm is cut to ±LOG_RATIO_LIMIT (as OpenRLHF does
    from 0.9 on), so that the ratio stays finite; where it is cut no gradient flows."""
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """GSPO's ratio: the geometric mean of a sequence's token ratios, at each of its tokens (Zheng et al. 2025, equation 7,
    arXiv 2507.18071).

    logprobs, old_logprobs (tokens,); sequence (tokens,) int64, each token's sequence, 0 … sequences - 1; every action token of a
    sequence must be there. Result (tokens,). With `clipped_loss` and the mean "sequence" of `token_weights` this is GSPO.
    """
    return sequence_means(logprobs - old_logprobs, sequence, sequences).exp()[sequence]


def clipped_loss(ratios: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> tuple[Tensor, Tensor]:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A): PPO's clipped surrogate (Schulman et al. 2017, equation 7, arXiv 1707.06347),
    with its own bound on either side (DAPO's clip-higher, Yu et al. 2025, equation 10, arXiv 2503.14476).

    ratios, advantages (tokens,). `dual` > 1 bounds the loss of negative advantages: -max(min(…), dual·A) (dual clip, Ye et al.
    2020, arXiv 1912.09729). Returns the loss and a mask of the tokens where the clipped branch was taken (the
    dual bound not counted). Raises ValueError when `dual` is not above 1.
    """
    plain = ratios * advantages
    clipped = ratios.clamp(1 - low, 1 + high) * advantages
    surrogate = torch.minimum(plain, clipped)
    if dual is not None:
        if not dual > 1:
            raise ValueError(f"the dual clip is {dual:g}, must be above 1")
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    return -surrogate, clipped < plain


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """The critic's half squared error per token, ½·max((v - R)², (v_old + clip(v - v_old, ±clip) - R)²).

    values, old_values, returns (tokens,). The clip keeps the critic near the values the advantages were made with (OpenAI's
    baselines, ppo2; Engstrom et al. 2020, section 3, arXiv 2005.12729); None: not clipped. Returns the loss and a mask of the
    tokens where the clipped error was the larger.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, near) / 2, near > plain


def token_weights(lengths: Tensor, mean: str) -> Tensor:
    """Weight of each sequence's tokens such that the weighted sum over an optimizer step is the wanted mean.

    lengths (sequences,) of ALL sequences of the optimizer step, on every rank: their action tokens; returns (sequences,).
    `token`: every token counts the same (DAPO, arXiv 2503.14476, equation 12). `sequence`: every sequence that has tokens
    counts the same (GRPO, arXiv 2402.03300, equation 3). Computed over the whole step before it is cut into micro-batches, so
    neither ranks nor micro-batches change the loss.
    """
    if mean == "token":
        return torch.full_like(lengths, 1.0 / max(float(lengths.sum()), 1.0), dtype=torch.float64)
    if mean == "sequence":
        return 1.0 / (lengths.double().clamp(min=1) * max(int((lengths > 0).sum()), 1))
    raise ValueError(f"unknown mean {mean!r}: token or sequence")
