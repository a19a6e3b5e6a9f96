"""Correct for sampler and learner computing different probabilities of the same tokens under the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfless_ray.learn.segment_ops import sequence_means, sequence_sums

UNITS = ("token", "sequence", "geometric")
GATES = ("off", "ratio", "binary_kl", "tv")
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


@dataclass(frozen=True)
class Correction:
    """Rules for a token's importance weight, and for the tokens or sequences that are left out.

    The weight is the ratio p_learner / p_sampler of the unit `weight`: the token, the whole `sequence` (product of its tokens'
    ratios) or their `geometric` mean. It is clamped to [weight_low, weight_high]. The gate sets the weight to 0 if a statistic of the
    `gate_unit` is outside [gate_low, gate_high]. The statistic is the unit's `ratio`, or a divergence between the two probabilities
    of the drawn token: `binary_kl` (of drawing it or not) or `tv` (their distance). A sequence's divergence is the mean over its
    tokens. Truncation clamps weights and has no gate. Masking has a gate and does not clamp.
    """

    weight: str = "token"
    weight_low: float = 0.0
    weight_high: float = math.inf
    gate: str = "off"
    gate_unit: str = "token"
    gate_low: float = 0.0
    gate_high: float = math.inf

    def __post_init__(self) -> None:
        for name, value, choices in (("weight", self.weight, UNITS), ("gate unit", self.gate_unit, UNITS), ("gate", self.gate, GATES)):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r} of the importance correction: {', '.join(choices)}")
        if self.gate in ("binary_kl", "tv") and self.gate_low > 0:
            raise ValueError(f"a divergence is bounded from above only: gate {self.gate} takes a single threshold")
        if self.weight_low > self.weight_high or self.gate_low > self.gate_high:
            raise ValueError("the lower threshold of the importance correction is above the upper one")

    @property
    def gates_sequences(self) -> bool:
        """Whether whole sequences are left out."""
        return self.gate != "off" and self.gate_unit != "token"

    @classmethod
    def of_flags(cls, level: str, mode: str, gating: str, threshold: Sequence[float]) -> Correction | None:
        """Build a correction from OpenRLHF 0.11.2's four flags. Returns None if the level is off.

        Level is off, token or seq; mode is mask or clip; gating is ratio, binary_kl or tv; `threshold` is the upper bound or both
        bounds. `seq` gates by the geometric mean of the ratios or by the mean divergence, and kept tokens have their own ratio as
        weight. In earlier versions tis is token/clip/ratio, icepop token/mask/ratio, and seq-mask-tis seq/mask/ratio. Raises
        ValueError for combinations that OpenRLHF refuses.
        """
        for name, value, choices in (
            ("level", level, ("off", "token", "seq")),
            ("mode", mode, ("mask", "clip")),
            ("gating", gating, GATES[1:]),
        ):
            if value not in choices:
                raise ValueError(f"unknown importance correction {name} {value!r}: {', '.join(choices)}")
        if len(threshold) not in (1, 2):
            raise ValueError(f"the importance correction takes one threshold or two, there are {len(threshold)}")
        if mode == "clip" and (level == "seq" or gating != "ratio"):
            raise ValueError("only a token's ratio is a weight that can be clipped: mode clip needs level token and gating ratio")
        if level == "off":
            return None
        low, high = (0.0, threshold[0]) if len(threshold) == 1 else threshold
        if mode == "clip":
            return cls(weight_low=low, weight_high=high)
        return cls(gate=gating, gate_unit="token" if level == "token" else "geometric", gate_low=low, gate_high=high)


def correction_weights(
    correction: Correction, learner_logprobs: Tensor, sampler_logprobs: Tensor, sequence: Tensor, sequences: int
) -> tuple[Tensor, Tensor]:
    """Return the factors of the token losses, and which tokens the correction clamped or left out.

    `learner_logprobs` and `sampler_logprobs` (tokens,) are under the weights that drew the sample. `sequence` (tokens,) int64 is each
    token's sequence, 0 … sequences - 1; every action token of a sequence must be included. Both results are (tokens,); weights
    are at least float32 and have no gradient. A ratio that overflows is infinite, and is clamped or left out like any large ratio.
    Sources: truncation as in `importance_weights`; token masks are IcePop (Ling Team 2025, arXiv 2510.18855); masks by the
    geometric mean, Liu et al. 2025, "When Speed Kills Stability"; the product is the importance weight of the whole response.
    """
    learner, sampler = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (learner_logprobs, sampler_logprobs))
    difference = learner - sampler
    raw = _ratios(difference, correction.weight, sequence, sequences)
    weights = raw.clamp(correction.weight_low, correction.weight_high)
    changed = weights != raw
    if correction.gate == "off":
        return weights, changed
    if correction.gate == "ratio":
        statistic = _ratios(difference, correction.gate_unit, sequence, sequences)
    else:
        statistic = binary_kl(sampler, learner) if correction.gate == "binary_kl" else (sampler.exp() - learner.exp()).abs()
        if correction.gate_unit != "token":
            statistic = sequence_means(statistic, sequence, sequences)[sequence]
    kept = (statistic >= correction.gate_low) & (statistic <= correction.gate_high)
    return torch.where(kept, weights, torch.zeros_like(weights)), changed | ~kept


def binary_kl(sampler_logprobs: Tensor, learner_logprobs: Tensor) -> Tensor:
    """Return KL(sampler ‖ learner) of the event that the drawn token is drawn, (tokens,).

    This is p·log(p/q) + (1-p)·log((1-p)/(1-q)), with probabilities kept 1e-6 away from 0 and 1.
    """
    p, q = (x.exp().clamp(SURE, 1 - SURE) for x in (sampler_logprobs, learner_logprobs))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _ratios(log_ratio: Tensor, unit: str, sequence: Tensor, sequences: int) -> Tensor:
    if unit == "token":
        return log_ratio.exp()
    reduce = sequence_sums if unit == "sequence" else sequence_means
    return reduce(log_ratio, sequence, sequences).exp()[sequence]
