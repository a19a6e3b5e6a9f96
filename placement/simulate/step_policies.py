"""Step policies by name, with the baselines as their authors describe them. Each turns a step into device holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from placement.simulate.elastic_policy import elastic, ours, then_learn, trial
from placement.simulate.learner_queue import LearnerDevices, run_learner
from placement.simulate.one_step_off import fixed_one_step_off, ours_one_step_off
from placement.simulate.partial_policies import Policy, partial_policies
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_candidates import candidates, fits, neighbours, resized
from placement.simulate.plan_search import Planner, weigh
from placement.simulate.setting import Setting
from placement.simulate.simulate_step import (
    DeviceHold,
    StepInput,
    StepPlanSettings,
    StepRun,
    all_phases,
    costs_of,
    decode_busy,
    learn_beside,
    roll_out,
    work_of,
)

__all__ = ["POLICIES", "Policy", "elastic", "fixed", "fixed_plus", "global_cut", "oracle", "ours", "policies_of"]


def fixed(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Hold all devices for all phases, colocated, phase after phase: VERL (HybridFlow, arXiv 2409.19256).

    It works as its authors run it. There are engines on every device, and the batch is split evenly. Prompts are
    prefilled once (vLLM's automatic prefix caching). Weights are resharded in place at the in-process rate.
    Log-probabilities are recomputed before learning (`compute_log_prob` in its trainer). Learning is sharded over every
    device with packed micro-batches.
    """
    run = roll_out(times, given, "fixed", engines=times.engines, prefer=1.0, wake_s=times.warm_s)
    tokens, d = float(given.tokens.sum()), times.devices
    after = times.prepare_s(tokens, d) + times.learn_s(tokens, d)
    end = run.end_s + after
    busy = decode_busy(times, given, len(run.leases)) + run.prefill_s * d + after * d
    return StepRun("fixed", end, busy, run.end_s, 0, all_phases(d, end), f"{d} devices for everything")


def fixed_plus(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Run `fixed` with our overlap. Every device is still held throughout, and no response moves.

    Devices whose engines are done first form a learner that prepares and takes gradients while the others decode.
    Engines stay awake beside the learner's state where memory holds both. Which of this it does, and the early
    learner's size, are planned like ours.
    """
    tried = [
        StepPlanSettings(t.engines, 1.0, m, t.devices, awake=awake, hosted=hosted, width=t.width if times.wider else 0)
        for t in times.widths
        for m in (0, *t.sizes(t.devices - t.width))
        for hosted in (False, True)[: 1 + bool(m)]
        for awake in (False, True)
    ]
    run = partial(_fixed_plus, times)
    tried = [plan for plan in tried if fits(times, plan)]
    plan = planner.search("fixed+", run, run, tried, lambda k: [near for near in resized(times.at(k.width), k) if fits(times, near)])
    return _fixed_plus(times, given, plan, planner.expected)


def _fixed_plus(times: PhaseTimes, given: StepInput, plan: StepPlanSettings, expected: tuple[float, float] | None = None) -> StepRun:
    d, times = times.devices, times.at(plan.width).learner(awake=plan.awake, hosted=plan.hosted)
    room = times.awake_capacity(d)
    awake = plan.awake and times.holds_one(room)
    wake_s, capacity = (0.0, room) if awake else (times.warm_s, None)
    run = roll_out(times, given, "random", engines=times.engines, prefer=1.0, wake_s=wake_s, capacity=capacity)
    free = run.free_from((d - plan.early) // times.width)
    done = learn_beside(times, given, run, plan.early or d, d, min(free, run.end_s) if plan.early else run.end_s)
    busy = run.busy(times.width) + done.busy
    return StepRun("fixed+", done.end_s, busy, run.end_s, 0, all_phases(d, done.end_s), plan.reason, expected)


def rlhfless_paper(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Run RLHFless (arXiv 2602.22718), then learn on every device, as in the VERL it builds on.

    Length groups of equal counts, a number of actors scaled by weighted time and cost, local cut. Finished actors are
    released. Actors are prewarmed where memory holds them beside the learner's state. Not modelled: its longest group
    lies with the learner, which spares it a transfer.
    """
    plan = StepPlanSettings(times.engines, times.setting.prefer, 0, times.devices)
    done = elastic(times, given, plan, rollout="rlhfless-paper", name="rlhfless-paper")
    return replace(done, reason=f"then {times.devices} devices learn")


def global_cut(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Run RLHFuse's inter-stage fusion (arXiv 2409.13221).

    Past a threshold the remaining responses are gathered on a few engines, and the freed devices run the forward passes
    of preparing at once. Learning follows on every device. Its authors hold the cluster throughout. Here it may also
    give back idle devices (RLHFless compares with it so), which only lowers its cost.
    """
    d = times.devices
    run = roll_out(times, given, "global-cut", engines=times.engines, prefer=times.setting.prefer)
    tail = max((lease.to_s for lease in run.leases), default=0.0)
    freed = sorted({lease.to_s for lease in run.leases if lease.to_s < tail})
    cut = max(freed, key=lambda at: sum(lease.to_s == at for lease in run.leases)) if freed else run.end_s
    kept = sum(lease.to_s > cut for lease in run.leases)
    m = d - kept * times.width
    if cut >= run.end_s or m < times.learner_step:
        return then_learn("global-cut", times, given, run, d)
    load = times.state_s(d)
    work = work_of(times, given, run.finish_s, gradients=False)
    costs = replace(costs_of(times, work), resize_s=lambda before, after: load)
    done = run_learner(work, LearnerDevices(m, d, cut, run.end_s), costs)
    spent = done.early_busy / m  # idle devices are given back between micro-batches
    holds = (
        *run.holds(times.width),
        DeviceHold("prepare", m, done.grown_s - load - spent, done.grown_s - load),
        DeviceHold("learn", d, done.grown_s - load, done.end_s + load),
    )
    reason = f"cut at {cut:.1f} s, {m} devices prepare"
    busy = run.busy(times.width) + done.busy
    return StepRun("global-cut", done.end_s, busy, run.end_s, run.result.moves, holds, reason)


def at_best_width(name: str, policy: Policy) -> Policy:
    """Return the policy with the width of engines that forecasts find best, where the setting leaves it open."""

    def step(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
        if not times.wider:
            return policy(times, given, planner)

        def tried(view: StepInput, plan: StepPlanSettings) -> StepRun:
            return policy(times.at(plan.width), view, planner)

        widths = [StepPlanSettings(t.engines, times.setting.prefer, 0, t.devices, width=t.width) for t in times.widths]
        chosen = planner.search(f"{name}: width", tried, tried, widths, lambda plan: [])
        done = tried(given, chosen)
        return replace(done, reason=f"{done.reason}; engines of {chosen.width} devices")

    step.__doc__ = policy.__doc__
    return step


def oracle(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Take the best of what a search of `ours` with known lengths finds and of what the other policies do in this step.

    The search is local, so it alone may miss what a policy that forecasts hits by luck. Best is the least
    prefer · time + (1 - prefer) · cost, both over `fixed`.
    """
    rivals = [policy(times, given, planner) for name, policy in POLICIES.items() if name != "oracle"]
    true = StepInput(given.lengths, given.prompts, given.group, given.lengths[:, None], given.seed)
    known = trial(times, "oracle")  # there is a single draw, so no rough ranking is needed
    tried = [*candidates(times), planner.chosen["ours"]]
    planner.chosen.pop("oracle", None)  # another step has other lengths
    plan = planner.search("oracle", known, known, tried, partial(neighbours, times), true)
    own = elastic(times, true, plan, rollout="oracle", name="oracle")
    base = planner.reference(given)
    best = min((own, *rivals), key=lambda run: weigh(run, base, planner.prefer))
    return replace(best, policy="oracle", reason=best.reason if best is own else f"as `{best.policy}`: {best.reason}", planned=None)


POLICIES: dict[str, Policy] = {
    "fixed": at_best_width("fixed", fixed),
    "fixed+": fixed_plus,
    "global-cut": at_best_width("global-cut", global_cut),
    "rlhfless-paper": at_best_width("rlhfless-paper", rlhfless_paper),
    "ours": ours,
    "oracle": oracle,
}

ONE_STEP_OFF: dict[str, Policy] = {"fixed": fixed_one_step_off, "ours": ours_one_step_off}


def policies_of(setting: Setting) -> dict[str, Policy]:
    """Return the step policies by name that the setting's bound on the lag allows."""
    if setting.partial:
        return partial_policies()
    return ONE_STEP_OFF if setting.max_lag_steps else POLICIES
