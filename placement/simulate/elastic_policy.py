"""Our step policy, which leases as many engines as pay, lets a learner work beside the tail, and gives devices back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_candidates import candidates, held_cluster, neighbours
from placement.simulate.plan_search import Planner, Trial
from placement.simulate.simulate_step import DeviceHold, SimulatedRollout, StepInput, StepPlanSettings, StepRun, learn_beside, roll_out

Rollouts = Callable[..., SimulatedRollout]
ROUGH_POLICY = "consolidate"  # a rollout policy that decides quickly, to rank step plans by


def ours(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Run a step with planned engines, learner sizes and overlap.

    Engines are as many as pay, grouped and consolidated by forecast scenarios. A learner of planned size works beside
    the tail, on devices that were never leased or are already released. Every device is given back when its phase ends.
    """
    plan = planner.search("ours", trial(times, "ours"), trial(times, ROUGH_POLICY), candidates(times), partial(neighbours, times))
    return elastic(times, given, plan, expected=planner.expected)


def trial(times: PhaseTimes, rollout: str) -> Trial:
    """Return a function that tries step plans with this rollout policy."""
    return lambda view, plan: elastic(times, view, plan, rollout=rollout)


def elastic(
    times: PhaseTimes,
    given: StepInput,
    plan: StepPlanSettings,
    *,
    rollout: str = "ours",
    name: str = "ours",
    expected: tuple[float, float] | None = None,
    gradients: bool = True,
    prewarmed: bool = True,
    generate: Rollouts = roll_out,
) -> StepRun:
    """Run one step with a given step plan.

    The rollout uses at most `plan.engines` engines. The early learner starts when the planned share of responses has
    ended and its devices are free for good. The late learner starts when the rollout is over.

    rollout: the rollout policy. For ablation: gradients, whether they may be taken early at all; prewarmed, whether
    engines may be awake when the step begins. generate: simulates the rollout; a partial rollout also determines the
    batch that is learned after it.
    """
    times = times.at(plan.width)
    if plan.held:
        within = replace(plan, held=0, width=0)
        how: dict[str, Any] = {"rollout": rollout, "name": name, "gradients": gradients, "prewarmed": prewarmed, "generate": generate}
        step = elastic(held_cluster(times, plan.held), given, within, **how)
        whole = DeviceHold("held", plan.held, 0.0, step.time_s)
        return replace(step, holds=(whole,), reason=plan.reason, planned=expected)
    times = times.learner(awake=plan.awake, hosted=plan.hosted)
    run, waking = _roll_out(times, given, plan, rollout, prewarmed, generate)
    given = run.trained or given
    free = run.free_from((times.devices - plan.early) // times.width)
    ready = np.sort(run.finish_s)[min(len(given.lengths) - 1, int(plan.share * len(given.lengths)))]
    lease, load = max(free, float(ready)), times.state_s(plan.early) if plan.early else 0.0
    if not plan.early or lease + load >= run.end_s:
        return _woken(then_learn(name, times, given, run, plan.late), times.width, waking, plan.reason, expected)
    done = learn_beside(times, given, run, plan.early, plan.late, lease + load, gradients=gradients)
    unload, most = times.state_s(plan.late), max(plan.early, plan.late)
    resize = times.resize_s(plan.early, plan.late)
    holds = (
        *run.holds(times.width),
        DeviceHold("learn", plan.early, lease, done.grown_s - resize),
        DeviceHold("learn", most, done.grown_s - resize, done.grown_s),
        DeviceHold("learn", plan.late, done.grown_s, done.end_s + unload),
    )
    busy = run.busy(times.width) + done.busy
    step = StepRun(name, done.end_s, busy, run.end_s, run.result.moves, holds)
    return _woken(step, times.width, waking, plan.reason, expected)


@dataclass(frozen=True)
class EngineWaking:
    """Engines that wake before a step begins: on devices of their own (`beside`) and on the learner's (`within`), in `seconds`."""

    seconds: float = 0.0
    beside: int = 0
    within: int = 0


def _woken(step: StepRun, width: int, waking: EngineWaking, reason: str, expected: tuple[float, float] | None) -> StepRun:
    """Add the waking of a step's first engines to it, billed before its beginning.

    On the learner's devices, which are held anyway, waking is billed only from the beginning on. Engines can wake
    beside the end of the previous step only while that step learns. Steps are alike, so this lasts as long as this one
    learns after its rollout. A longer wake-up delays the step.
    """
    some = waking.beside + waking.within
    late = max(0.0, waking.seconds - (step.time_s - step.rollout_s)) if some else 0.0
    moved = tuple(replace(h, from_s=h.from_s + late, to_s=h.to_s + late) for h in step.holds)
    woken = [DeviceHold("wake", width, late - waking.seconds, late)] * waking.beside + [
        DeviceHold("wake", width, 0.0, late)
    ] * waking.within
    return replace(
        step, time_s=step.time_s + late, rollout_s=step.rollout_s + late, holds=(*woken, *moved), reason=reason, planned=expected
    )


def _roll_out(
    times: PhaseTimes, given: StepInput, plan: StepPlanSettings, rollout: str, prewarmed: bool, simulated: Rollouts
) -> tuple[SimulatedRollout, EngineWaking]:
    """Simulate the rollout, and choose the engines that wake before it.

    Engines on devices that the learner leaves free wake beside the end of the previous step. They only wait for the new
    weights, which are sent between processes. Engines on the learner's own devices stay awake, or wake while it learns,
    if its memory allows that, and get the weights in place. Otherwise all wait until they have woken, as in `fixed`. A
    rollout that opens engines later wakes all of them when it needs them.
    """
    d, w = times.devices, times.width

    def generate(**start: float | int) -> SimulatedRollout:
        return simulated(times, given, rollout, engines=plan.engines, prefer=plan.prefer, **start)

    beside = min((d - plan.late) // w, plan.engines)
    awake = plan.engines - beside
    room = times.awake_capacity(plan.late) if awake else times.capacity
    if prewarmed and times.holds_one(room):
        transfer = max(times.broadcast_s if beside else 0.0, times.reshard_s if awake else 0.0)
        run = generate(wake_s=0.0, transfer_s=transfer, capacity=room)
        if not any(lease.from_s > 0 for lease in run.leases):
            beside = min(beside, len(run.leases))
            return run, EngineWaking(times.wake_s, beside, len(run.leases) - beside)
    return generate(), EngineWaking()


def then_learn(name: str, times: PhaseTimes, given: StepInput, run: SimulatedRollout, m: int) -> StepRun:
    """Run a rollout, then let m devices prepare and learn, without overlap."""
    tokens = float(given.tokens.sum())
    work = times.prepare_s(tokens, m) + times.learn_s(tokens, m)
    learn, begin = learner_hold(times, run, m, run.end_s, work)
    holds = (*run.holds(times.width), learn)
    busy = run.busy(times.width) + work * m
    return StepRun(name, begin + work, busy, run.end_s, run.result.moves, holds, f"then {m} devices learn")


def learner_hold(times: PhaseTimes, run: SimulatedRollout, m: int, rollout_end_s: float, work_s: float) -> tuple[DeviceHold, float]:
    """Return the learner's lease on m devices, and when it can begin to work.

    Its state is loaded beforehand if m devices are free for that long, otherwise after `rollout_end_s`. It is moved off
    afterwards, billed, beside the next rollout.
    """
    load = times.state_s(m)
    early = run.free_from((times.devices - m) // times.width) <= rollout_end_s - load
    begin = rollout_end_s if early else rollout_end_s + load
    return DeviceHold("learn", m, begin - load, begin + work_s + load), begin
