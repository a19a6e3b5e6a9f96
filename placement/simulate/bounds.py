"""What no policy can beat: lower bounds of one step's time and cost, lengths known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.simulate.step import StepInput
from placement.simulate.terms import Terms


@dataclass(frozen=True)
class Bounds:
    """time_s: seconds; cost: device-seconds."""

    time_s: float
    cost: float


def step_bounds(terms: Terms, given: StepInput) -> Bounds:
    """Lower bounds of a step.

    Time: the longest response decoded alone after start-up, then its own forward passes and gradients on all devices and one
    optimizer update; and all computing shared by all devices, decoding at its least (everything on one engine reads the
    weights least often). Cost: decoding on one engine (one actor, no capacity limit) and the FLOPs of preparing and learning
    at their efficiencies; no start-up, no transfer.
    """
    longest = int(np.argmax(given.lengths))
    d, width = terms.devices, terms.width
    alone = terms.speed.rollout_s(given.lengths[longest : longest + 1], given.prompts[longest : longest + 1])
    own = given.tokens[longest]
    start = min(terms.wake_s + terms.reshard_s, terms.broadcast_s)  # engines that never sleep only wait for weights
    late = terms.setting.updates > 1
    learned = float(given.tokens.sum()) if late else own
    after = _flops_s(terms, own, 0.0) / d + _flops_s(terms, 0.0, learned) / d + terms.models * _adam_s(terms) / d
    decode = width * terms.speed.rollout_s(given.lengths, given.prompts)
    total = float(given.tokens.sum())
    work = decode + _flops_s(terms, total, total) + terms.models * _adam_s(terms)
    return Bounds(max(start + alone + after, work / d), work)


def _flops_s(terms: Terms, prepared: float, learned: float) -> float:
    """Device-seconds of preparing and learning these tokens, transfers free."""
    t, s = terms.trainer, terms.setting
    peak = s.device.bf16_flops_per_s
    forward = s.model.flops_per_token * prepared * (3 if terms.ppo else 2) / (peak * t.forward_efficiency)
    if terms.reward_trainer:
        forward += terms.reward_trainer.model.flops_per_token * prepared / (peak * t.forward_efficiency)
    train = 3 * terms.models * s.learn_scale * s.model.flops_per_token * learned / (peak * t.training_efficiency)
    return forward + train


def _adam_s(terms: Terms) -> float:
    """Device-seconds of one optimizer update of one model."""
    s = terms.setting
    return s.phases["optimizer_bytes_per_parameter"] * s.model.parameters / s.device.memory_bytes_per_s
