"""What no policy can beat: lower bounds of one step's time and cost, lengths known."""

from __future__ import annotations

import numpy as np

from placement.bounds import Bounds, rollout_bounds
from placement.simulate.step import StepInput
from placement.simulate.terms import Terms


def step_bounds(terms: Terms, given: StepInput) -> Bounds:
    """Lower bounds of a step in seconds and device-seconds.

    Time: the longest response decoded alone once the engine has the weights (it may never have slept), then its own forward
    passes and gradients on all devices and one optimizer update; and all computing shared by all devices, decoding at its
    least (everything on one engine reads the weights least often). Cost: decoding on one engine (one actor, no capacity
    limit) and the FLOPs of preparing and learning at their efficiencies; no start-up, no transfer.
    """
    d, width = terms.devices, terms.width
    # Sequences may move, so the bounds over partitions on few actors do not hold: an actor each, and one actor for all.
    each = rollout_bounds(given.lengths, terms.speed, len(given.lengths), prompts=given.prompts)
    one = rollout_bounds(given.lengths, terms.speed, 1, prompts=given.prompts)
    own = given.tokens[int(np.argmax(given.lengths))]
    start = min(terms.reshard_s, terms.broadcast_s)
    late = terms.setting.updates > 1
    learned = float(given.tokens.sum()) if late else own
    after = _flops_s(terms, own, 0.0) / d + _flops_s(terms, 0.0, learned) / d + terms.models * _adam_s(terms) / d
    total = float(given.tokens.sum())
    work = width * one.cost + _flops_s(terms, total, total) + terms.models * _adam_s(terms)
    alone = start + each.time_s + after
    return Bounds(max(alone, work / d), work, "longest response alone" if alone >= work / d else "work over devices")


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
