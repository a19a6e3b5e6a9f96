"""The losses of the remote training interface: sums over tokens, which the client normalises by weights and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhfless_ray.learn.losses import token_ratios

Inputs = Mapping[str, Tensor]  # by name, (tokens,) each
Config = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -w·log p."""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -r·A, with the ratio r of the policy's and the sampler's probability."""
    return -token_ratios(logprobs, inputs["logprobs"]) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -min(r·A, clip(r)·A) (Schulman et al. 2017, eq. 7, arXiv 1707.06347). The bounds are those of the ratio itself."""
    ratios = token_ratios(logprobs, inputs["logprobs"])
    return -torch.minimum(ratios * inputs["advantages"], _clipped(ratios, config) * inputs["advantages"])


def cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -clip(r)·A·log p without a gradient through clip(r) (CISPO, MiniMax 2025, eq. 4, arXiv 2506.13585)."""
    ratios = token_ratios(logprobs, inputs["logprobs"])
    return -_clipped(ratios, config).detach() * inputs["advantages"] * logprobs


def _clipped(ratios: Tensor, config: Config) -> Tensor:
    return ratios.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


@dataclass(frozen=True)
class Loss:
    """A loss with the inputs of each datum that it reads, and its settings with their defaults."""

    of: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    config: Config = field(default_factory=dict)


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, config=CLIP),
    "cispo": Loss(cispo, config=CLIP),
}
