"""Partial rollouts that begin beside the update of the batch before them, and continue under its weights.

This is `rollout.ahead` of the runtime. Tokens that are drawn beside the update are one version older than those after it.
"""

from __future__ import annotations

from dataclasses import replace

from placement.simulate.one_step_off import candidates_beside, check_split, learning_s, neighbours_beside
from placement.simulate.partial_rollout import PartialGeneration, PartialRollout
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_candidates import PREFERS
from placement.simulate.simulate_step import DeviceHold, StepInput, StepPlanSettings, StepRun

LEARNERS = (0.25, 0.5, 0.75)  # shares of the devices that learn, among which a share of more groups is chosen


def step_ahead(
    times: PhaseTimes, given: StepInput, plan: StepPlanSettings, generate: PartialGeneration, learned: float, rollout: str
) -> StepRun:
    """Run a step as the runtime does with `rollout.ahead`.

    The learner takes its devices first, as one step off. Engines wake on those that are left, and work until the update
    ends. All of them stop then, get the new weights, and compute their contexts again. If the plan has more engines than
    fit beside the learner, the others wake when its state has left the devices, and all begin then. Engines that work
    when the step ends keep their devices until the next rollout begins.
    """
    times = times.at(plan.width).learner(hosted=plan.hosted)
    m, w, sent, state = plan.late, times.width, times.broadcast_s, times.state_s(plan.late)
    before, update = learning_s(times, learned, m)
    begin, updated = state + before, state + before + update
    beside = min(plan.engines, (times.devices - m) // w)
    first = generate(times, given, rollout, engines=beside, prefer=plan.prefer, transfer_s=sent, until_s=update)
    parts = [(first, begin)]
    if first.rest is not None:
        assert first.after is not None
        wake = state + times.wake_s if plan.engines > beside else 0.0 if _all_work(first) else times.wake_s
        rest = PartialGeneration(first.after)(
            times, first.rest, rollout, engines=plan.engines, prefer=plan.prefer, transfer_s=sent, wake_s=wake
        )
        parts.append((rest, updated))
        generate.last = rest
    last, began = parts[-1]
    rollout_end = began + last.end_s
    end = max(rollout_end, updated + state) if last is first else rollout_end
    unloaded = updated if last is not first and plan.engines > beside else updated + state  # otherwise engines wait on its devices
    kept = w * min(beside, sum(lease.to_s >= last.end_s - 1e-9 for lease in last.leases))
    holds = [DeviceHold("learn", m, 0.0, unloaded), DeviceHold("kept", kept, 0.0, begin), DeviceHold("kept", kept, rollout_end, end)]
    for run, at in parts:
        holds += [replace(hold, from_s=at + hold.from_s, to_s=at + hold.to_s) for hold in run.holds(w)]
    busy = sum(run.busy(w) for run, _ in parts) + (before + update) * m
    moves = sum(run.result.moves for run, _ in parts)
    wide = f" of {plan.width} devices" * bool(plan.width)
    reason = f"at most {beside} engines{wide} beside {m} devices that learn, {plan.engines} after the update; prefer {plan.prefer:g}"
    return StepRun("ours", end, busy, rollout_end, moves, tuple(holds), reason)


def _all_work(run: PartialRollout) -> bool:
    """Return whether every engine worked until the rollout ended, so that none must wake again."""
    return all(lease.to_s >= run.end_s - 1e-9 for lease in run.leases)


def candidates_ahead(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return the plans where the search begins: those of one step off, and with engines on all devices after the update."""
    found = candidates_beside(times)
    return list(dict.fromkeys([*found, *(replace(plan, engines=times.at(plan.width).engines) for plan in found)]))


def neighbours_ahead(times: PhaseTimes, plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return plans with one thing changed: as one step off, or whether engines have all devices after the update."""
    beside, whole = (times.devices - plan.late) // times.at(plan.width).width, times.at(plan.width).engines
    found = neighbours_beside(times, plan)
    if plan.engines > beside:  # stay on all devices where the learner's size changes
        found = [replace(k, engines=whole) for k in found if k.engines == plan.engines or k.late != plan.late]
    return [replace(plan, engines=beside if plan.engines > beside else whole), *found]


def starts_ahead(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return plans among which the share of more groups is chosen: three sizes of the learner, engines on the other devices.

    Raises ValueError if the training state leaves no device for an engine.
    """
    found = []
    for t in times.widths:
        sizes = t.sizes(t.devices - t.width)
        for m in sorted({min(sizes, key=lambda size: abs(size - share * t.devices)) for share in LEARNERS} if sizes else ()):
            found.append(StepPlanSettings((t.devices - m) // t.width, PREFERS[-1], 0, m, width=t.width if times.wider else 0))
    check_split(times, found)
    return found
