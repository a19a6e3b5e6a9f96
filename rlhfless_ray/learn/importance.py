"""Correct for sampler and learner computing different probabilities of the same tokens under the same weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhfless_ray.learn.losses import sequence_means

if TYPE_CHECKING:
    from rlhfless_ray.recipe.algorithm_sections import LossConfig

SURE = 1e-6  # probabilities are kept this far from 0 and 1 in the binary KL


def importance_weights(learner_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """Return truncated importance weights min(p_learner / p_sampler, cap), both under the weights that drew the sample.

    They correct the gradient for the slightly different probabilities of sampler and learner (truncation: Ionides 2008; this use:
    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). No gradient flows through them.
    `cap` 0 turns the correction off.
    """
    if cap == 0:
        return torch.ones_like(learner_logprobs)
    return torch.exp(learner_logprobs - sampler_logprobs).clamp(max=cap).detach()


def correction_weights(
    loss: LossConfig, learner_logprobs: Tensor, sampler_logprobs: Tensor, sequence: Tensor, sequences: int
) -> tuple[Tensor, Tensor]:
    """Return the factors of the token losses, and which tokens the correction clipped or left out.

    A factor is the token's ratio p_learner / p_sampler, as `loss.correction_mode` says: clipped to the band, or 0 where a statistic is
    outside the band. The statistic is the ratio, or a divergence between the two probabilities of the drawn token: `binary_kl` (of
    drawing it or not) or `tv` (their distance). With `loss.correction_level` seq it is the geometric mean of a sequence's ratios, or
    the mean of its divergences.

    `learner_logprobs` and `sampler_logprobs` (tokens,) are under the weights that drew the sample. `sequence` (tokens,) int64 is each
    token's sequence, 0 … sequences - 1; every action token of a sequence must be included. Both results are (tokens,); weights
    are at least float32 and have no gradient. A ratio that overflows is infinite, and is clipped or left out like any large ratio.
    Sources: clipping as in `importance_weights`; token masks are IcePop (Ling Team 2025, arXiv 2510.18855); masks by the geometric
    mean, Liu et al. 2025, "When Speed Kills Stability".
    """
    learner, sampler = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (learner_logprobs, sampler_logprobs))
    ratios, low, high = (learner - sampler).exp(), loss.correction_low, loss.correction_high
    if loss.correction_mode == "clip":
        clipped = ratios.clamp(low, high)
        return clipped, clipped != ratios
    if loss.correction_gating == "ratio":
        statistic = learner - sampler
    else:
        statistic = binary_kl(sampler, learner) if loss.correction_gating == "binary_kl" else probability_gap(sampler, learner)
    if loss.correction_level == "seq":
        statistic = sequence_means(statistic, sequence, sequences)[sequence]
    if loss.correction_gating == "ratio":
        statistic = statistic.exp()
    kept = statistic <= high
    if loss.correction_gating == "ratio":  # a divergence has no lower bound
        kept &= statistic >= low
    return torch.where(kept, ratios, torch.zeros_like(ratios)), ~kept


def probability_gap(sampler_logprobs: Tensor, learner_logprobs: Tensor) -> Tensor:
    """Return |p - q|, (tokens,), as p·|exp(d) - 1| with d = log(q/p). The difference of two float32 probabilities near 1 has no digits."""
    return sampler_logprobs.exp() * (learner_logprobs - sampler_logprobs).expm1().abs()


def binary_kl(sampler_logprobs: Tensor, learner_logprobs: Tensor) -> Tensor:
    """Return KL(sampler ‖ learner) of the event that the drawn token is drawn, (tokens,).

    This is p·log(p/q) + (1-p)·log((1-p)/(1-q)), with probabilities kept 1e-6 away from 0 and 1. With d = log(q/p) and
    r = (q-p)/(1-p) it equals p·(exp(d) - 1 - d) + (1-p)·(-log(1-r) - r). Neither term is negative. In float64 the terms keep eight
    digits where p and q agree up to float32's rounding.
    """
    log_p, log_q = (x.double().clamp(math.log(SURE), math.log1p(-SURE)) for x in (sampler_logprobs, learner_logprobs))
    difference, p, rest = log_q - log_p, log_p.exp(), -log_p.expm1()
    moved = p * difference.expm1() / rest
    divergence = p * (difference.expm1() - difference) - rest * ((-moved).log1p() + moved)
    return divergence.clamp(min=0).to(sampler_logprobs.dtype)
