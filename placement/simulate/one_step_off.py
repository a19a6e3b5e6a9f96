"""Steps with a lag of one: the next rollout works beside the update, under the weights from before it.

A step here is one cycle of the pipeline. Its rollout generates the step's responses, and the learner learns those of
the step before (`StepInput.learned_tokens`). Every token is one version old when it is trained.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from placement.simulate.elastic_policy import ROUGH_POLICY
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.plan_candidates import PREFERS, near, near_prefers, shards_less
from placement.simulate.plan_search import Planner, Trial
from placement.simulate.simulate_step import DeviceHold, StepInput, StepPlanSettings, StepRun, decode_busy, roll_out, separate_holds

LAG = (0.0, 1.0)  # share of the trained tokens by lag
ENGINES = (1.0, 0.5, 0.25)  # shares of the engines that fit beside the learner, where the search begins


def fixed_one_step_off(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Hold separate devices for engines and trainers throughout, and let both work at once.

    This is verl's one-step-off trainer, OpenRLHF's `--async_train`, and StreamRL (arXiv 2504.15930) on one kind of
    device. Engines never sleep and get the new weights by broadcast, while the trainers wait. All log-probabilities are
    computed beside the rollout. The split is the static one that forecasts find fastest.

    Raises ValueError if the training state leaves no device for an engine.
    """
    tried = splits(times)
    split = planner.choose("fixed", lambda view, k: fixed_split(times, view, k), tried, prefer=1.0)
    return fixed_split(times, given, split)


def fixed_split(times: PhaseTimes, given: StepInput, plan: StepPlanSettings) -> StepRun:
    d, m, times = times.devices, plan.late, times.at(plan.width)
    sent, tokens = times.broadcast_s, given.learned_tokens
    run = roll_out(times, given, "fixed", engines=plan.engines, prefer=1.0, capacity=times.static_capacity, transfer_s=sent, wake_s=0.0)
    learn = times.prepare_s(tokens, m) + times.learn_s(tokens, m)
    end = max(run.end_s, sent + learn)
    busy = decode_busy(times, given, len(run.leases)) + run.prefill_s * plan.engines * times.width + learn * m
    return StepRun("fixed", end, busy, run.end_s, 0, separate_holds(d - m, m, end), _reason(plan), lag=LAG)


def ours_one_step_off(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
    """Run a step as the runtime does with `rollout.max_lag_steps: 1`, with planned sizes of learner and rollout.

    The learner takes its devices first. It loads its state and computes what the runtime computes before the policy's
    update: the reference's log-probabilities, and for PPO also the policy's, the values and the critic's update. Then
    engines wake on the devices that are left and get the weights. They generate beside the policy's update. When both
    are done, the learner publishes and moves its state off. Its devices are billed throughout. Engines are released
    when they have no more responses. Those that work until the rollout ends keep their devices for the next one.

    Raises ValueError if the training state leaves no device for an engine.
    """
    tried = candidates_beside(times)
    check_split(times, tried)

    def trial(rollout: str) -> Trial:
        return lambda view, plan: as_built(times, view, plan, rollout)

    plan = planner.search("ours", trial("ours"), trial(ROUGH_POLICY), tried, partial(neighbours_beside, times))
    return replace(as_built(times, given, plan, "ours"), planned=planner.expected)


def as_built(times: PhaseTimes, given: StepInput, plan: StepPlanSettings, rollout: str) -> StepRun:
    times = times.at(plan.width).learner(hosted=plan.hosted)
    m, w = plan.late, times.width
    before, update = learning_s(times, given.learned_tokens, m)
    begin = times.state_s(m) + before
    run = roll_out(times, given, rollout, engines=plan.engines, prefer=plan.prefer, transfer_s=times.broadcast_s)
    rollout_end = begin + run.end_s
    end = max(rollout_end, begin + update) + times.state_s(m)
    kept = w * sum(lease.to_s >= run.end_s - 1e-9 for lease in run.leases)
    holds = (
        DeviceHold("learn", m, 0.0, end),
        DeviceHold("kept", kept, 0.0, begin),
        *(replace(hold, from_s=begin + hold.from_s, to_s=begin + hold.to_s) for hold in run.holds(w)),
        DeviceHold("kept", kept, rollout_end, end),
    )
    busy = run.busy(w) + (before + update) * m
    return StepRun("ours", end, busy, rollout_end, run.result.moves, holds, _reason(plan), lag=LAG)


def learning_s(times: PhaseTimes, tokens: float, m: int) -> tuple[float, float]:
    """Return the seconds that the runtime's learner works before the rollout beside it begins, and those of the update beside it."""
    update = times.learn_s(tokens, m) / times.models
    before = times.prepare_s(tokens, m) + (times.models - 1) * update
    if times.ppo:  # its rewards need the policy's log-probabilities
        return before, update
    forward = times.trainer.forward_s(tokens, m)  # which the update itself computes
    return before - forward, update + forward


def candidates_beside(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return the plans where the search begins, at every width: learner sizes, shares of the engines left, and `prefer`."""
    if times.wider:
        return [replace(k, width=t.width) for t in times.widths for k in candidates_beside(t)]
    d, w = times.devices, times.width
    found = [
        StepPlanSettings(max(1, round(share * ((d - m) // w))), prefer, 0, m)
        for m in times.sizes(d - w)
        for share in ENGINES
        for prefer in PREFERS
    ]
    found += [replace(k, hosted=True) for k in found if shards_less(times, k.late)]
    return [k for k in dict.fromkeys(found) if times.learner(hosted=k.hosted).fits(k.late)]


def neighbours_beside(times: PhaseTimes, plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return plans with one thing changed: the learner's size, the number of engines, `prefer`, or the optimizer's place."""
    t = times.at(plan.width)
    d, w = t.devices, t.width
    found = [replace(plan, late=m, engines=min(plan.engines, (d - m) // w)) for m in near(plan.late, t.learner_step, t.min_learner, d - w)]
    found += [replace(plan, engines=m) for m in near(plan.engines, 1, 1, (d - plan.late) // w)]
    found += near_prefers(plan)
    if plan.hosted or shards_less(t, plan.late):
        found.append(replace(plan, hosted=not plan.hosted))
    return [k for k in dict.fromkeys(found) if k != plan and t.learner(hosted=k.hosted).fits(k.late)]


def splits(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return every split of the devices into engines and trainers, at every width. Raises ValueError if there is none."""
    d = times.devices
    found = [
        StepPlanSettings((d - m) // t.width, 1.0, 0, m, width=t.width if times.wider else 0)
        for t in times.widths
        for m in t.sizes(d - t.width)
    ]
    check_split(times, found)
    return found


def check_split(times: PhaseTimes, tried: list[StepPlanSettings]) -> None:
    if not tried:
        raise ValueError(
            f"`max_lag_steps`: {times.min_learner} devices to learn and {times.width} to generate at once are more than the "
            f"{times.devices} of the cluster; add nodes, or set it to 0"
        )


def _reason(plan: StepPlanSettings) -> str:
    engines = f"{plan.engines} engines" + f" of {plan.width} devices" * bool(plan.width)
    return f"one step off: at most {engines}, prefer {plan.prefer:g}; {plan.late} devices learn{' (hosted)' * plan.hosted} beside them"
