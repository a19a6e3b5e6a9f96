"""The step policies by name, and the baselines as their authors describe them: each turns a step's input into a
`StepRun`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from placement.simulate.elastic import elastic, oracle, ours, then_learn
from placement.simulate.planning import Planner
from placement.simulate.plans import fits, resized
from placement.simulate.step import Hold, Knobs, StepInput, StepRun, costs_of, decode_busy, learn_beside, roll_out, work_of
from placement.simulate.tail import Gang, serve
from placement.simulate.terms import Terms

__all__ = ["POLICIES", "Policy", "disaggregated", "elastic", "fixed", "fixed_plus", "global_cut", "oracle", "ours", "phased"]

Policy = Callable[[Terms, StepInput, Planner], StepRun]


def fixed(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """All devices held for all phases, colocated, phase after phase: VERL (HybridFlow, arXiv 2409.19256).

    As its authors run it: engines on every device, the batch split evenly, prompts prefilled once (vLLM's automatic prefix
    caching), weights resharded in place at the in-process rate, log-probabilities recomputed before learning
    (`compute_log_prob` in its trainer), learning sharded over every device with packed micro-batches.
    """
    run = roll_out(terms, given, "fixed", engines=terms.engines, prefer=1.0, wake_s=terms.warm_s)
    tokens, d = float(given.tokens.sum()), terms.devices
    after = terms.prepare_s(tokens, d) + terms.learn_s(tokens, d)
    end = run.end_s + after
    busy = decode_busy(terms, given, len(run.leases)) + run.prefill_s * d + after * d
    return StepRun("fixed", end, end * d, busy, run.end_s, 0, (Hold("all phases", d, 0.0, end),), f"{d} devices for everything")


def fixed_plus(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """`fixed` with our overlap: still every device held throughout and no response ever moves, but the devices whose engines
    are done first form a learner that prepares and takes gradients while the others decode, and engines stay awake beside the
    learner's state where memory holds both. What it does of this, and the early learner's size, is planned like ours."""
    tried = [
        Knobs(terms.engines, 1.0, m, terms.devices, awake=awake, hosted=hosted)
        for m in (0, *terms.sizes(terms.devices - terms.width))
        for hosted in (False, True)[: 1 + bool(m)]
        for awake in (False, True)
    ]
    run = partial(_fixed_plus, terms)
    tried = [knobs for knobs in tried if fits(terms, knobs)]
    knobs = planner.searched("fixed+", run, run, tried, lambda k: [near for near in resized(terms, k) if fits(terms, near)])
    return _fixed_plus(terms, given, knobs, planner.expected)


def _fixed_plus(terms: Terms, given: StepInput, knobs: Knobs, expected: tuple[float, float] | None = None) -> StepRun:
    d, terms = terms.devices, terms.learner(awake=knobs.awake, hosted=knobs.hosted)
    room = terms.awake_capacity(d)
    awake = knobs.awake and terms.holds_one(room)
    wake_s, capacity = (0.0, room) if awake else (terms.warm_s, None)
    run = roll_out(terms, given, "random", engines=terms.engines, prefer=1.0, wake_s=wake_s, capacity=capacity)
    free = run.free_from((d - knobs.early) // terms.width)
    done = learn_beside(terms, given, run, knobs.early or d, d, min(free, run.end_s) if knobs.early else run.end_s)
    end = done.end_s
    return StepRun(
        "fixed+",
        end,
        end * d,
        run.busy(terms.width) + done.busy,
        run.end_s,
        0,
        (Hold("all phases", d, 0.0, end),),
        knobs.reason,
        expected,
    )


def disaggregated(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """Engines and trainers on devices of their own, both held throughout: OpenRLHF (arXiv 2405.11143) without its hybrid
    engine.

    Engines never sleep and have the whole memory for KV; new weights are broadcast to them between processes; the trainers
    prepare and learn when the rollout is over. The split is the static one that the planner finds fastest for this setting.
    Raises ValueError where the training state leaves no device for an engine.
    """
    d, w = terms.devices, terms.width
    if terms.least > d - w:
        raise ValueError(
            f"policy `disaggregated`: {terms.least} devices to train and {w} to generate are more than the {d} of the cluster; add nodes, "
            "or name the other policies (`--policy fixed --policy ours`)"
        )
    tried = [Knobs((d - m) // w, 1.0, 0, m) for m in terms.sizes(d - w)]
    split = planner.knobs("disaggregated", lambda view, k: _disaggregated(terms, view, k), tried, prefer=1.0)
    return _disaggregated(terms, given, split)


def _disaggregated(terms: Terms, given: StepInput, knobs: Knobs) -> StepRun:
    d, m = terms.devices, knobs.late
    run = roll_out(
        terms,
        given,
        "fixed",
        engines=knobs.engines,
        prefer=1.0,
        capacity=terms.static_capacity,
        transfer_s=terms.broadcast_s,
        wake_s=0.0,
    )
    tokens = float(given.tokens.sum())
    after = terms.prepare_s(tokens, m) + terms.learn_s(tokens, m)
    end = run.end_s + after
    busy = decode_busy(terms, given, len(run.leases)) + run.prefill_s * knobs.engines * terms.width + after * m
    holds = (Hold("engines", d - m, 0.0, end), Hold("trainers", m, 0.0, end))
    return StepRun("disaggregated", end, end * d, busy, run.end_s, 0, holds, f"{knobs.engines} engines, {m} trainers")


def phased(rollout: str) -> Policy:
    """A serverless launcher with this rollout policy: engines released when they are done, then every device for preparing
    and learning, which is released afterwards. Nothing overlaps."""

    def step(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
        run = roll_out(terms, given, rollout, engines=terms.engines, prefer=terms.setting.prefer)
        return then_learn(rollout, terms, given, run, terms.devices)

    step.__doc__ = phased.__doc__
    return step


def rlhfless_paper(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """RLHFless (arXiv 2602.22718): equal-count length groups, a number of actors scaled by weighted time and cost, local
    cut; finished actors released; then every device learns, as in the VERL it builds on. Actors are prewarmed, where memory
    holds them beside the learner's state. That the longest group lies with the learner, to spare it a transfer, is left out."""
    knobs = Knobs(terms.engines, terms.setting.prefer, 0, terms.devices)
    done = elastic(terms, given, knobs, rollout="rlhfless-paper", name="rlhfless-paper")
    return replace(done, reason=f"then {terms.devices} devices learn")


def global_cut(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """RLHFuse's inter-stage fusion (arXiv 2409.13221): past a threshold the remaining responses are gathered on a few
    engines and the freed devices make the forward passes of preparing at once; learning follows on every device.

    Its authors hold the cluster throughout; here it may also give back what is idle (RLHFless compares with it so), which
    only helps its cost.
    """
    d = terms.devices
    run = roll_out(terms, given, "global-cut", engines=terms.engines, prefer=terms.setting.prefer)
    tail = max((lease.to_s for lease in run.leases), default=0.0)
    freed = sorted({lease.to_s for lease in run.leases if lease.to_s < tail})
    cut = max(freed, key=lambda at: sum(lease.to_s == at for lease in run.leases)) if freed else run.end_s
    kept = sum(lease.to_s > cut for lease in run.leases)
    m = d - kept * terms.width
    if cut >= run.end_s or m < terms.gang:
        return then_learn("global-cut", terms, given, run, d)
    load = terms.state_s(d)
    work = work_of(terms, given, run.finish_s, gradients=False)
    costs = replace(costs_of(terms, work), regang_s=lambda before, after: load)
    done = serve(work, Gang(m, d, cut, run.end_s), costs)
    spent = done.early_busy / m  # idle devices are given back between micro-batches
    holds = (
        *run.holds(terms.width),
        Hold("prepare", m, done.grown_s - load - spent, done.grown_s - load),
        Hold("learn", d, done.grown_s - load, done.end_s + load),
    )
    reason = f"cut at {cut:.1f} s, {m} devices prepare"
    busy = run.busy(terms.width) + done.busy
    return StepRun("global-cut", done.end_s, sum(h.cost for h in holds), busy, run.end_s, run.result.moves, holds, reason)


POLICIES: dict[str, Policy] = {
    "fixed": fixed,
    "fixed+": fixed_plus,
    "random": phased("random"),
    "consolidate": phased("consolidate"),
    "crude-mix": phased("crude-mix"),
    "disaggregated": disaggregated,
    "global-cut": global_cut,
    "rlhfless-paper": rlhfless_paper,
    "ours": ours,
    "oracle": oracle,
}
