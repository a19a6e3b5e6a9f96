"""The losses of policy and critic. Pure torch functions on per-token tensors.

Every loss here is per token. A batch's loss is the sum of weight · loss with the weights of `token_weights`. These are computed over
the whole optimizer step, so the sum over micro-batches and ranks is the step's loss, however the step is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def token_ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return PPO's ratio exp(logprobs - old_logprobs) per token, (tokens,).

    The logarithm is clamped to ±LOG_RATIO_LIMIT, as in OpenRLHF from 0.9 on, so the ratio stays finite. No gradient flows through a
    clamped ratio.
    """
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return GSPO's ratio at each token: the geometric mean of its sequence's ratios (Zheng et al. 2025, eq. 7, arXiv 2507.18071).

    `logprobs`, `old_logprobs` and result (tokens,). `sequence` (tokens,) int64 is each token's sequence, 0 … sequences - 1; every
    action token of a sequence must be included. With `clipped_loss` and the mean "sequence" of `token_weights` this is GSPO.
    """
    return sequence_means(logprobs - old_logprobs, sequence, sequences).exp()[sequence]


def sequence_means(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Average x (tokens,) within each sequence, to (count,); 0 for a sequence without tokens. `sequence` as in `sequence_ratios`."""
    sums = torch.zeros(count, dtype=x.dtype, device=x.device).index_add(0, sequence, x)
    return sums / torch.bincount(sequence, minlength=count).clamp(min=1)


def clipped_loss(ratios: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate loss -min(r·A, clip(r, 1 - low, 1 + high)·A) (Schulman et al. 2017, eq. 7, arXiv 1707.06347).

    The two bounds are separate (DAPO's clip-higher, Yu et al. 2025, equation 10, arXiv 2503.14476). `ratios` and `advantages`
    (tokens,). `dual` > 1 bounds the loss of negative advantages: -max(min(…), dual·A) (dual clip, Ye et al. 2020, arXiv 1912.09729).
    Returns the loss, and a mask of the tokens with the clipped value (the dual bound does not count).
    """
    plain = ratios * advantages
    clipped = ratios.clamp(1 - low, 1 + high) * advantages
    surrogate = torch.minimum(plain, clipped)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    return -surrogate, clipped < plain


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return the critic's half squared error per token, ½·max((v - R)², (v_old + clip(v - v_old, ±clip) - R)²).

    `values`, `old_values` and `returns` (tokens,). `clip` keeps the critic near the values that the advantages were computed with
    (OpenAI's baselines, ppo2; Engstrom et al. 2020, section 3, arXiv 2005.12729). None: no clipping. Returns the loss, and a mask of
    the tokens whose value is beyond the clip with the larger error. Without the first condition rounding would decide for all others,
    whose two errors are the same.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    moved = values - old_values
    near = (old_values + moved.clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, near) / 2, (moved.abs() > clip) & (near > plain)


def token_weights(lengths: Tensor, mean: str) -> Tensor:
    """Return the weight of each sequence's tokens, (sequences,), such that the weighted sum over an optimizer step is a mean.

    `lengths` (sequences,): action tokens of ALL sequences of the optimizer step, on every rank. With `mean` "token" every token
    counts the same (DAPO, arXiv 2503.14476, equation 12). With "sequence" every sequence that has tokens counts the same (GRPO,
    arXiv 2402.03300, equation 3). Weights are computed over the whole step before it is divided, so neither ranks nor micro-batches
    change the loss.
    """
    divisor = max(float((lengths if mean == "token" else lengths > 0).sum()), 1.0)  # action tokens, or sequences that have some
    if mean == "token":
        return torch.full_like(lengths, 1.0 / divisor, dtype=torch.float64)
    return 1.0 / (lengths.double().clamp(min=1) * divisor)
