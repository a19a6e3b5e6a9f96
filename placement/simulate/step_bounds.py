"""Lower bounds of one step's time and cost with known lengths, which no policy can beat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.planning.bounds import Bounds, rollout_bounds
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.simulate_step import StepInput
from placement.speed.drafted_speed import DraftedSpeed


def step_bounds(times: PhaseTimes, given: StepInput) -> Bounds:
    """Return lower bounds of a step in seconds and device-seconds.

    Time is the larger of two bounds. First, the longest response is decoded alone once the engine has the weights (it
    may never have slept). Its own forward passes and gradients on all devices follow, and one optimizer update. Second, all
    computing shared by all devices, with decoding at its least: everything on one engine reads the weights least often.

    One step off, the batch that is learned is that of the step before, and nothing is learned after the longest response.

    Cost: decoding on one engine without capacity limit, and the FLOPs of preparing and learning at their efficiencies,
    without start-up and transfers. Where the width of engines is open, each bound is that of its best width.
    """
    if times.wider:
        of_widths = [step_bounds(t, given) for t in times.widths]
        return replace(min(of_widths, key=lambda b: b.time_s), cost=min(b.cost for b in of_widths))
    d, width = times.devices, times.width
    speed = times.speed.least if isinstance(times.speed, DraftedSpeed) else times.speed
    # Sequences may move, so bounds over partitions on few actors do not hold. Use an actor each, and one for all.
    each = rollout_bounds(given.lengths, speed, len(given.lengths), prompts=given.prompts)
    one = rollout_bounds(given.lengths, speed, 1, prompts=given.prompts)
    own = given.tokens[int(np.argmax(given.lengths))]
    start = min(times.reshard_s, times.broadcast_s)
    late = times.setting.updates > 1
    learned = float(given.tokens.sum()) if late else own
    after = _flops_s(times, own, 0.0) / d + _flops_s(times, 0.0, learned) / d + times.models * _adam_s(times) / d
    total = float(given.tokens.sum())
    if times.setting.max_lag_steps:
        after, total = 0.0, given.learned_tokens
    work = width * one.cost + _flops_s(times, total, total) + times.models * _adam_s(times)
    alone = start + each.time_s + after
    return Bounds(max(alone, work / d), work, "longest response alone" if alone >= work / d else "work over devices")


def _flops_s(times: PhaseTimes, prepared: float, learned: float) -> float:
    """Return device-seconds of preparing and learning these tokens, without transfers."""
    t, s = times.trainer, times.setting
    peak = s.device.bf16_flops_per_s
    forward = s.model.flops_per_token * prepared * (3 if times.ppo else 2) / (peak * t.forward_efficiency)
    if times.reward_trainer:
        forward += times.reward_trainer.model.flops_per_token * prepared / (peak * t.forward_efficiency)
    train = 3 * times.models * s.learn_scale * s.model.flops_per_token * learned / (peak * t.training_efficiency)
    return forward + train


def _adam_s(times: PhaseTimes) -> float:
    """Return device-seconds of one optimizer update of one model."""
    s = times.setting
    return s.phases["optimizer_bytes_per_parameter"] * s.model.parameters / s.device.memory_bytes_per_s
