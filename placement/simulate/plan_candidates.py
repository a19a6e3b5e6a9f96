"""The step plans that `ours` tries: where its search begins, and the neighbours of a plan."""

from __future__ import annotations

from dataclasses import replace

from placement.simulate.phase_times import PhaseTimes
from placement.simulate.simulate_step import StepPlanSettings

PREFERS = (0.5, 0.9)  # of the rollout within the step: the tail weighs less there than in a rollout alone
SHARES = (0.4, 0.85)  # shares of ended responses at which the early learner is leased
HELD = (1.0, 0.75, 0.5)  # shares of devices held throughout, where a new lease is a cold start
FINER = (0.0, 0.2, 0.4, 0.55, 0.7, 0.78, 0.85, 0.9, 0.95, 0.98)  # shares of ended responses tried by neighbours
STEP = 0.1  # change of `prefer` between neighbours


def candidates(times: PhaseTimes) -> list[StepPlanSettings]:
    """Return the step plans where the search begins.

    These are: all engines with learning afterwards, and an early learner of about a quarter, a half or three quarters
    of the cluster. It may grow to the whole cluster after the rollout. It works on devices that no engine ever had, or
    that engines have released.

    Where a new lease costs more than waking a kept engine, the same is also tried on devices held throughout. Keeping
    them pays as long as it costs less than the starts it saves. All of it is tried at every width that may be chosen.
    """
    if times.wider:
        return [replace(k, width=t.width) for t in times.widths for k in candidates(t)]
    d, w = times.devices, times.width
    sizes = times.sizes(d - w)
    found = [StepPlanSettings(times.engines, PREFERS[-1], 0, late) for late in times.sizes()[-2:]]
    for early in sorted({min(sizes, key=lambda m: abs(m - share * d)) for share in (0.25, 0.5, 0.75)} if sizes else ()):
        fast, split = PREFERS[-1], (d - early) // w
        tried = [(times.engines, fast, early), (times.engines, fast, d), (split, fast, d)]
        tried += [(split, prefer, early) for prefer in PREFERS]
        for engines, prefer, late in dict.fromkeys(tried):
            found += [StepPlanSettings(engines, prefer, early, late, share) for share in SHARES]
    roomy = times.learner(awake=True)
    found += [replace(k, awake=True) for k in found if k.late == d and roomy.fits(d) and not times.awake_capacity(d)]
    found += [replace(k, hosted=True) for k in found if k.early and shards_less(times.learner(awake=k.awake), k.early)]
    found = [k for k in found if fits(times, k)]
    if times.wake_s > times.warm_s:
        for m in sorted({round(share * d / times.learner_step) * times.learner_step for share in HELD}):
            if m >= max(times.min_learner, w):
                found += [replace(k, held=m) for k in candidates(held_cluster(times, m))]
    return found


def neighbours(times: PhaseTimes, plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return the step plans next to this one, those with the same rollout first.

    They differ in one thing: the learner's size by one step or about a third, its start, the number of engines by one
    or about a third, the rollout's `prefer`, or the width of engines, with as many devices.
    """
    if plan.width:
        alike = [replace(k, width=plan.width) for k in neighbours(times.at(plan.width), replace(plan, width=0))]
        return alike + _other_widths(times, plan)
    if plan.held:
        return [replace(k, held=plan.held) for k in neighbours(held_cluster(times, plan.held), replace(plan, held=0))]
    found = []
    if plan.early:
        at = min(range(len(FINER)), key=lambda i: abs(FINER[i] - plan.share))
        found += [replace(plan, share=FINER[i]) for i in (at - 3, at - 1, at + 1, at + 3) if 0 <= i < len(FINER)]
        sizes = resized(times, plan)
        found += sizes + [replace(size, late=size.early) for size in sizes]
    found += [replace(plan, late=m) for m in near(plan.late, times.learner_step, times.min_learner, times.devices)]
    if plan.hosted or (plan.early and shards_less(times.learner(awake=plan.awake), plan.early)):
        found.append(replace(plan, hosted=not plan.hosted))
    found += [replace(plan, engines=m) for m in near(plan.engines, 1, 1, times.engines)]
    found += near_prefers(plan)
    return [k for k in dict.fromkeys(found) if k != plan and fits(times, k)]


def _other_widths(times: PhaseTimes, plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return the plan with engines of the next width on both sides."""
    widths = [t.width for t in times.widths]
    at, found = widths.index(plan.width), []
    for other in [times.at(w) for w in widths[max(0, at - 1) : at + 2] if w != plan.width]:
        engines = min(other.engines, max(1, round(plan.engines * plan.width / other.width)))
        if plan.early % other.learner_step == plan.late % other.learner_step == 0:
            found.append(replace(plan, engines=engines, width=other.width))
    return [k for k in found if fits(times, k)]


def resized(times: PhaseTimes, plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return the neighbours that differ only in the early learner's size."""
    most = times.devices - times.width
    return [replace(plan, early=m) for m in near(plan.early, times.learner_step, times.min_learner, most)] if plan.early else []


def near(size: int, step: int, least: int, most: int) -> list[int]:
    """Return sizes one step and about a third away on both sides, within bounds."""
    third = max(step, round(size / 3 / step) * step)
    return [m for m in dict.fromkeys((size - third, size - step, size + step, size + third)) if least <= m <= most]


def near_prefers(plan: StepPlanSettings) -> list[StepPlanSettings]:
    """Return the plan with the `prefer` one step below, and the one above."""
    return [replace(plan, prefer=p) for p in (round(plan.prefer - STEP, 3), round(plan.prefer + STEP, 3)) if 0 <= p <= 1]


def shards_less(times: PhaseTimes, m: int) -> bool:
    """Return whether a hosted optimizer state lets this learner keep more whole weights or gradients on m devices."""
    return replace(times.trainer, hosted=True).sharding(m) != times.trainer.sharding(m)


def held_cluster(times: PhaseTimes, m: int) -> PhaseTimes:
    """Return a cluster of m devices that are never given back: engines on them sleep and wake."""
    return replace(times, devices=m, wake_s=times.warm_s, wider=())


def fits(times: PhaseTimes, plan: StepPlanSettings) -> bool:
    """Return whether the learner's state fits its devices, early and late."""
    learner = times.at(plan.width).learner(awake=plan.awake, hosted=plan.hosted)
    return all(learner.fits(m) for m in (plan.early, plan.late) if m)
