"""Variants that `benchmarks.cluster` compares: `ours` without one of its parts, and settings with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from placement.simulate import PhaseTimes, Setting, StepPlanSettings, StepRun
from placement.simulate.elastic_policy import ROUGH_POLICY, elastic
from placement.simulate.plan_candidates import candidates, neighbours
from placement.simulate.plan_search import Planner
from placement.simulate.simulate_step import StepInput, all_phases

ABLATED = ("qwen3b-gsm8k-grpo", "qwen3b-gpqa-ppo")


def variant(
    name: str, rollout: str = "ours", *, without: Callable[[PhaseTimes, StepPlanSettings], bool] | None = None, **changes: Any
) -> Any:
    """Return `ours` with parts taken away. The search plans without them.

    Args:
        without: whether a step plan is forbidden.
        changes: arguments of `elastic`. release=False: every device is billed throughout.
    """
    release = changes.pop("release", True)

    def allowed(times: PhaseTimes) -> list[StepPlanSettings]:
        found = candidates(times)
        if without is None:
            return found
        kept = [k for k in found if not without(times, k)]
        engines, prefers = sorted({k.engines for k in found}), sorted({k.prefer for k in found})
        later = [StepPlanSettings(e, p, 0, times.devices) for e in engines for p in prefers]  # of which all but two are else not tried
        return list(dict.fromkeys([*kept, *(k for k in later if not without(times, k))]))

    def made(times: PhaseTimes, view: StepInput, plan: StepPlanSettings, policy: str) -> StepRun:
        done = elastic(times, view, plan, rollout=policy, name=name, **changes)
        return done if release else replace(done, holds=all_phases(times.devices, done.time_s))

    def step(times: PhaseTimes, given: StepInput, planner: Planner) -> StepRun:
        plan = planner.search(
            name,
            lambda view, k: made(times, view, k, rollout),
            lambda view, k: made(times, view, k, ROUGH_POLICY),
            allowed(times),
            lambda k: [near for near in neighbours(times, k) if without is None or not without(times, near)],
        )
        return made(times, given, plan, rollout)

    return name, step


AS_BUILT = "ours (as built)"
# without what the runtime does not do on GPUs: a learner that grows within a step, engines awake beside it or woken before its update
# ends, optimizer state on the host except during the update, and gradients before the rollout ends
AS_BUILT_POLICY = variant(AS_BUILT, without=lambda _, k: k.awake or k.hosted or 0 < k.early < k.late, prewarmed=False, gradients=False)

ABLATION: list[Any] = [
    "fixed",
    variant("all parts"),
    variant("- overlap", without=lambda _, k: k.early > 0),
    variant("- early gradients", gradients=False),
    variant("- engines kept awake or woken beforehand", prewarmed=False),
    variant("- consolidation and grouping (random split)", "random"),
    variant("- grouping (consolidate)", "consolidate"),
    variant("- pool size (all engines)", without=lambda times, k: k.engines < times.engines),
    variant("- release (all devices billed)", release=False),
]


def sensitivity(setting: Setting) -> dict[str, Setting]:
    """The setting with one thing changed."""
    found = {"as it is": setting}
    for factor in (0.5, 2.0):
        found[f"start-up × {factor:g}"] = setting.but(start_scale=factor)
        found[f"migration × {factor:g}"] = setting.but(migrate_scale=factor)
        found[f"learning × {factor:g}"] = setting.but(learn_scale=factor)
        found[f"prompts × {factor:g}"] = setting.but(prompts=int(setting.prompts * factor))
    found["4 updates per rollout"] = setting.but(updates=4)
    found["cold starts"] = setting.but(cold=True)
    return found
