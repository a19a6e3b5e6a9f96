"""The step policies: baselines as their authors describe them, and ours. Each turns one step's input into a `StepRun`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from placement.simulate.planning import Planner
from placement.simulate.step import (
    Hold,
    Knobs,
    Rollout,
    StepInput,
    StepRun,
    costs_of,
    decode_busy,
    learn_beside,
    roll_out,
    work_of,
)
from placement.simulate.tail import Gang, serve
from placement.simulate.terms import Terms

Policy = Callable[[Terms, StepInput, Planner], StepRun]


def fixed(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """All devices held for all phases, colocated, phase after phase: VERL (HybridFlow, arXiv 2409.19256).

    As its authors run it: engines on every device, the batch split evenly, prompts prefilled once (vLLM's automatic prefix
    caching), weights resharded in place at the in-process rate, log-probabilities recomputed before learning (`compute_log_prob`
    in its trainer), learning sharded over every device with packed micro-batches.
    """
    run = roll_out(terms, given, "fixed", engines=terms.engines, prefer=1.0)
    tokens, d = float(given.tokens.sum()), terms.devices
    after = terms.prepare_s(tokens, d) + terms.learn_s(tokens, d)
    end = run.end_s + after
    busy = decode_busy(terms, given, len(run.leases)) + run.prefill_s * d + after * d
    return StepRun(
        "fixed", end, end * d, busy, run.end_s, 0, (Hold("all phases", d, 0.0, end),), f"{d} devices for everything"
    )


def fixed_plus(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """`fixed` with our overlap: still every device held throughout and no response ever moves, but the devices whose engines are
    done first form a learner that prepares and takes gradients while the others decode. Its size is planned like ours."""
    knobs = planner.knobs("fixed+", lambda view, k: _fixed_plus(terms, view, k), candidates(terms, "fixed+"))
    return _fixed_plus(terms, given, knobs, planner.expected)


def _fixed_plus(terms: Terms, given: StepInput, knobs: Knobs, expected: tuple[float, float] | None = None) -> StepRun:
    d = terms.devices
    run = roll_out(terms, given, "random", engines=terms.engines, prefer=1.0)
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
    """Engines and trainers on devices of their own, both held throughout: OpenRLHF (arXiv 2405.11143) without its hybrid engine.

    Engines never sleep and have the whole memory for KV; new weights are broadcast to them between processes; the trainers prepare and
    learn when the rollout is over. The split is the static one that the planner finds fastest for this setting.
    """
    split = planner.knobs(
        "disaggregated", lambda view, k: _disaggregated(terms, view, k), candidates(terms, "disaggregated"), prefer=1.0
    )
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
    """A serverless launcher with this rollout policy: engines released when they are done, then every device for preparing and
    learning, which is released afterwards. Nothing overlaps."""

    def step(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
        run = roll_out(terms, given, rollout, engines=terms.engines, prefer=terms.setting.prefer)
        return _then_learn(rollout, terms, given, run, terms.devices)

    step.__doc__ = phased.__doc__
    return step


def _then_learn(name: str, terms: Terms, given: StepInput, run: Rollout, m: int) -> StepRun:
    tokens = float(given.tokens.sum())
    work = terms.prepare_s(tokens, m) + terms.learn_s(tokens, m)
    learn, begin = learner_hold(terms, run, m, run.end_s, work)
    holds = (*run.holds(terms.width), learn)
    busy = run.busy(terms.width) + work * m
    return StepRun(
        name, begin + work, sum(h.cost for h in holds), busy, run.end_s, run.result.moves, holds, f"then {m} devices learn"
    )


def learner_hold(terms: Terms, run: Rollout, m: int, over_s: float, work_s: float) -> tuple[Hold, float]:
    """The learner's lease on m devices, and when it can begin to work. Its state is loaded beforehand where m devices are free for that
    long, else after `over_s`; it is moved off afterwards, billed, beside the next rollout."""
    load = terms.state_s(m)
    early = run.free_from((terms.devices - m) // terms.width) <= over_s - load
    begin = over_s if early else over_s + load
    return Hold("learn", m, begin - load, begin + work_s + load), begin


def rlhfless_paper(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """RLHFless (arXiv 2602.22718): equal-count length groups, a number of actors scaled by weighted time and cost, local cut;
    finished actors released; then every device learns, as in the VERL it builds on."""
    return phased("rlhfless-paper")(terms, given, planner)


def global_cut(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """RLHFuse's inter-stage fusion (arXiv 2409.13221): past a threshold the remaining responses are gathered on a few engines and the
    freed devices make the forward passes of preparing at once; learning follows on every device.

    Its authors hold the cluster throughout; here it may also give back what is idle (RLHFless compares with it so), which only
    helps its cost.
    """
    d = terms.devices
    run = roll_out(terms, given, "global-cut", engines=terms.engines, prefer=terms.setting.prefer)
    tail = max((lease.to_s for lease in run.leases), default=0.0)
    freed = sorted({lease.to_s for lease in run.leases if lease.to_s < tail})
    cut = max(freed, key=lambda at: sum(lease.to_s == at for lease in run.leases)) if freed else run.end_s
    kept = sum(lease.to_s > cut for lease in run.leases)
    m = d - kept * terms.width
    if cut >= run.end_s or m < terms.gang:
        return _then_learn("global-cut", terms, given, run, d)
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


def ours(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """Engines as many as pay, grouped and consolidated by forecast scenarios; a learner of planned size works beside the tail on
    devices that were never leased or already released; every device is given back when its phase ends."""
    knobs = planner.knobs("ours", lambda view, k: elastic(terms, view, k), candidates(terms, "ours"))
    return elastic(terms, given, knobs, expected=planner.expected)


def oracle(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """`ours` that knows every length: rollout and step plan see the truth."""
    true = StepInput(given.lengths, given.prompts, given.group, given.lengths[:, None], given.seed)
    knobs = planner.at(true, lambda view, k: elastic(terms, view, k, rollout="oracle"), candidates(terms, "ours"))
    return elastic(terms, true, knobs, rollout="oracle", name="oracle")


def elastic(
    terms: Terms,
    given: StepInput,
    knobs: Knobs,
    *,
    rollout: str = "ours",
    name: str = "ours",
    expected: tuple[float, float] | None = None,
    gradients: bool = True,
) -> StepRun:
    """One step with these knobs: the rollout on at most `knobs.engines`, the early learner from the moment that the planned share has
    ended and its devices are free for good, the late learner when the rollout is over."""
    run = roll_out(terms, given, rollout, engines=knobs.engines, prefer=knobs.prefer, transfer_s=_transfer_s(terms, knobs))
    if not knobs.early:
        return _renamed(_then_learn(name, terms, given, run, knobs.late), knobs.reason, expected)
    free = run.free_from((terms.devices - knobs.early) // terms.width)
    ready = np.sort(run.finish_s)[min(len(given.lengths) - 1, int(knobs.share * len(given.lengths)))]
    lease, load = max(free, float(ready)), terms.state_s(knobs.early)
    if lease + load >= run.end_s:
        return _renamed(_then_learn(name, terms, given, run, knobs.late), knobs.reason, expected)
    done = learn_beside(terms, given, run, knobs.early, knobs.late, lease + load, gradients=gradients)
    unload, most = terms.state_s(knobs.late), max(knobs.early, knobs.late)
    regang = terms.regang_s(knobs.early, knobs.late)
    holds = [*run.holds(terms.width), Hold("learn", knobs.early, lease, done.grown_s - regang)]
    holds.append(Hold("learn", most, done.grown_s - regang, done.grown_s))
    holds.append(Hold("learn", knobs.late, done.grown_s, done.end_s + unload))
    full = sum(h.cost for h in holds)
    return StepRun(
        name,
        done.end_s,
        full,
        run.busy(terms.width) + done.busy,
        run.end_s,
        run.result.moves,
        tuple(holds),
        knobs.reason,
        expected,
    )


def _transfer_s(terms: Terms, knobs: Knobs) -> float:
    """New weights reach engines on the learner's own devices in place; engines elsewhere are sent them between processes."""
    return terms.reshard_s if knobs.late >= knobs.engines * terms.width else terms.broadcast_s


def _renamed(run: StepRun, reason: str, expected: tuple[float, float] | None) -> StepRun:
    return StepRun(run.policy, run.time_s, run.full, run.busy, run.rollout_s, run.moves, run.holds, reason, expected)


def candidates(terms: Terms, policy: str) -> list[Knobs]:
    """The step plans that a policy chooses among."""
    d, w = terms.devices, terms.width
    if policy == "fixed+":
        return [Knobs(terms.engines, 1.0, m, d) for m in [0, *terms.sizes(d - w)]]
    if policy == "disaggregated":
        return [Knobs((d - m) // w, 1.0, 0, m) for m in terms.sizes(d - w)]
    found = []
    for engines in sorted({terms.engines, max(1, terms.engines // 2)}):
        for prefer in sorted({0.3, 0.6, 0.85, 1.0}):
            found += [Knobs(engines, prefer, 0, late) for late in terms.sizes()[-2:]]
            for early in terms.sizes(d - w):
                for share in (0.0, 0.3, 0.6, 0.8, 0.9):
                    found += [Knobs(engines, prefer, early, late, share) for late in sorted({early, d})]
    return found


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
