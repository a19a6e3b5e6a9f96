"""What `benchmarks.cluster` compares besides the policies themselves: ours with parts taken away, ours with its step planned by
`placement.step`, and settings with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from placement.rollout_policies.oracle import Planned
from placement.rollout_policies.view import Job
from placement.rollout_run import run
from placement.simulate import Hold, Knobs, Setting, StepRun, Terms
from placement.simulate.elastic import ROUGH, elastic
from placement.simulate.planning import Planner
from placement.simulate.plans import beside, candidates
from placement.simulate.policies import fixed
from placement.simulate.step import StepInput, learn_beside, on_clock
from placement.step import StepPlan, StepWork, step_frontier

ABLATED = ("qwen3b-gsm8k-grpo", "qwen3b-gpqa-ppo")


def variant(name: str, rollout: str = "ours", *, without: Callable[[Terms, Knobs], bool] | None = None, **changes: Any) -> Any:
    """Ours with parts taken away, planned anew without them. without: step plans that are forbidden; changes: of `elastic`;
    release=False: every device is billed throughout."""
    release = changes.pop("release", True)

    def allowed(terms: Terms) -> list[Knobs]:
        found = candidates(terms)
        if without is None:
            return found
        kept = [k for k in found if not without(terms, k)]
        engines, prefers = sorted({k.engines for k in found}), sorted({k.prefer for k in found})
        later = [Knobs(e, p, 0, terms.devices) for e in engines for p in prefers]  # of which all but two are else not tried
        return list(dict.fromkeys([*kept, *(k for k in later if not without(terms, k))]))

    def made(terms: Terms, view: StepInput, knobs: Knobs, policy: str) -> StepRun:
        done = elastic(terms, view, knobs, rollout=policy, name=name, **changes)
        return done if release else replace(done, full=done.time_s * terms.devices)

    def step(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
        knobs = planner.searched(
            name,
            lambda view, k: made(terms, view, k, rollout),
            lambda view, k: made(terms, view, k, ROUGH),
            allowed(terms),
            lambda k: [near for near in beside(terms, k) if without is None or not without(terms, near)],
        )
        return made(terms, given, knobs, rollout)

    return name, step


SCENARIOS = 8  # that a static plan is made for


def static_groups(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """A point of `placement.step.step_frontier`, chosen as ours chooses, carried out as it stands: groups by forecast that
    nobody leaves, and a learner from the planned moment on. GRPO only; engines and start-up as in ours."""
    view = planner.views()[0]
    base = fixed(terms, view, planner)
    d, w, prefer = terms.devices, terms.width, terms.setting.prefer
    found: list[tuple[float, int, StepPlan]] = []
    for m in terms.sizes(d - w):
        last = m * terms.trainer.least_batch_tokens
        work = StepWork(
            reference_per_token_s=terms.prepare_s(1e5, m) / 1e5,
            learn_per_token_s=terms.gradients_s(1e5, m, terms.models) / 1e5,
            learn_start_s=terms.state_s(m),
            update_s=terms.update_s(m, last),
            learners=m,
        )
        plans = step_frontier(
            given.scenarios[:, :SCENARIOS],
            given.group,
            terms.speed,
            work,
            max_devices=d,
            devices_per_actor=w,
            capacity=terms.capacity,
            prompts=given.prompts,
            transfer_s=terms.broadcast_s,
            thin=0.01,
        )
        found += [(prefer * p.time_s / base.time_s + (1 - prefer) * p.cost / base.full, m, p) for p in plans]
    _, m, plan = min(found, key=lambda entry: entry[:2])
    groups = plan.rollout.groups
    job = Job(given.scenarios, terms.speed, len(groups), 1.0, 0.0, terms.broadcast_s, given.prompts, terms.capacity)
    rollout = on_clock(terms, given, run(given.lengths, job, Planned(groups, "as planned")), terms.broadcast_s)
    lease = max(plan.learn_at_s, rollout.free_from((d - m) // w))
    load = terms.state_s(m)
    done = learn_beside(terms, given, rollout, m, m, min(lease + load, rollout.end_s))
    woken = [Hold("wake", w, -terms.wake_s, 0.0)] * len(groups)
    holds = (*woken, *rollout.holds(w), Hold("learn", m, min(lease, rollout.end_s - load), done.end_s + load))
    busy = rollout.busy(w) + done.busy
    return StepRun("static", done.end_s, sum(h.cost for h in holds), busy, rollout.end_s, 0, holds, plan.reason)


ABLATION: list[Any] = [
    "fixed",
    variant("all parts"),
    variant("- overlap", without=lambda _, k: k.early > 0),
    variant("- early gradients", gradients=False),
    variant("- gradients by linearity (PPO)", without=lambda _, k: k.linear),
    variant("- engines given up for the learner", without=lambda _, k: k.narrow),
    variant("- engines kept awake or woken beforehand", prewarmed=False),
    variant("- consolidation and grouping (random split)", "random"),
    variant("- grouping (consolidate)", "consolidate"),
    variant("- pool size (all engines)", without=lambda terms, k: k.engines < terms.engines),
    variant("- release (all devices billed)", release=False),
    ("static groups (placement.step)", static_groups),
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
