"""Ours and its clairvoyant twin: engines as many as pay, a learner beside the tail, every device given back when it is
done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.simulate.planning import Planner
from placement.simulate.step import Hold, Knobs, Rollout, StepInput, StepRun, learn_beside, roll_out
from placement.simulate.terms import Terms

PREFERS = (0.5, 0.9)  # of the rollout within the step, which weighs the tail less than a rollout alone would
SHARES = (0.0, 0.4, 0.7, 0.85, 0.95)  # of the responses, ended before the early learner is leased


def ours(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """Engines as many as pay, grouped and consolidated by forecast scenarios; a learner of planned size works beside the
    tail on devices that were never leased or already released; every device is given back when its phase ends."""
    knobs = planner.knobs("ours", lambda view, k: elastic(terms, view, k), candidates(terms))
    return elastic(terms, given, knobs, expected=planner.expected)


def oracle(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """`ours` that knows every length: rollout and step plan see the truth."""
    true = StepInput(given.lengths, given.prompts, given.group, given.lengths[:, None], given.seed)
    knobs = planner.clairvoyant("oracle", true, lambda view, k: elastic(terms, view, k, rollout="oracle"), candidates(terms))
    return elastic(terms, true, knobs, rollout="oracle", name="oracle")


def candidates(terms: Terms) -> list[Knobs]:
    """The step plans that are tried: all engines and learning afterwards; and an early learner of about a quarter, a half or
    three quarters of the cluster, on devices that no engine ever had or (all engines at first) that were released, which may
    grow to the whole cluster after the rollout."""
    d, w = terms.devices, terms.width
    sizes = terms.sizes(d - w)
    found = [Knobs(terms.engines, PREFERS[-1], 0, late) for late in terms.sizes()[-2:]]
    for early in sorted({min(sizes, key=lambda m: abs(m - share * d)) for share in (0.25, 0.5, 0.75)} if sizes else ()):
        fast, split = PREFERS[-1], (d - early) // w
        tried = [(terms.engines, fast, early), (terms.engines, fast, d), (split, fast, d)]
        tried += [(split, prefer, early) for prefer in PREFERS]
        for engines, prefer, late in dict.fromkeys(tried):
            found += [Knobs(engines, prefer, early, late, share) for share in SHARES]
    return found


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
    """One step with these knobs: the rollout on at most `knobs.engines`, the early learner from the moment that the planned
    share has ended and its devices are free for good, the late learner when the rollout is over.

    rollout: the rollout policy. gradients: whether gradients may be taken early at all (for ablation).
    """
    run, wake_s = _roll_out_prewarmed(terms, given, knobs, rollout)
    free = run.free_from((terms.devices - knobs.early) // terms.width)
    ready = np.sort(run.finish_s)[min(len(given.lengths) - 1, int(knobs.share * len(given.lengths)))]
    lease, load = max(free, float(ready)), terms.state_s(knobs.early) if knobs.early else 0.0
    if not knobs.early or lease + load >= run.end_s:
        return _woken(then_learn(name, terms, given, run, knobs.late), terms.width, wake_s, knobs.reason, expected)
    done = learn_beside(terms, given, run, knobs.early, knobs.late, lease + load, gradients=gradients)
    unload, most = terms.state_s(knobs.late), max(knobs.early, knobs.late)
    regang = terms.regang_s(knobs.early, knobs.late)
    holds = (
        *run.holds(terms.width),
        Hold("learn", knobs.early, lease, done.grown_s - regang),
        Hold("learn", most, done.grown_s - regang, done.grown_s),
        Hold("learn", knobs.late, done.grown_s, done.end_s + unload),
    )
    busy, full = run.busy(terms.width) + done.busy, sum(h.cost for h in holds)
    step = StepRun(name, done.end_s, full, busy, run.end_s, run.result.moves, holds)
    return _woken(step, terms.width, wake_s, knobs.reason, expected)


def _woken(step: StepRun, width: int, wake_s: float, reason: str, expected: tuple[float, float] | None) -> StepRun:
    """The step with the waking of its first engines (none: `wake_s` 0), billed before its beginning.

    They can wake beside the end of the step before only while that learns: steps are alike, so for as long as this one
    learns after its rollout. What is longer delays the step.
    """
    late = max(0.0, wake_s - (step.time_s - step.rollout_s))
    first = [h for h in step.holds if h.what == "rollout" and h.from_s == 0] if wake_s else []
    moved = tuple(replace(h, from_s=h.from_s + late, to_s=h.to_s + late) for h in step.holds)
    holds = (*(Hold("wake", width, late - wake_s, late) for _ in first), *moved)
    return replace(
        step,
        time_s=step.time_s + late,
        rollout_s=step.rollout_s + late,
        full=sum(h.cost for h in holds),
        holds=holds,
        reason=reason,
        planned=expected,
    )


def _roll_out_prewarmed(terms: Terms, given: StepInput, knobs: Knobs, rollout: str) -> tuple[Rollout, float]:
    """The rollout, and the seconds for which its engines are woken beforehand.

    Where the learner leaves enough devices free, the first engines wake beside the end of the step before and only wait for
    the new weights, which are sent to them between processes. Otherwise they are the learner's devices: they wake when it is
    done and get the weights in place, as in `fixed`. A rollout that opens engines later wakes all of them when it needs them.
    """
    if terms.devices - knobs.late >= knobs.engines * terms.width:
        run = roll_out(
            terms, given, rollout, engines=knobs.engines, prefer=knobs.prefer, wake_s=0.0, transfer_s=terms.broadcast_s
        )
        if not any(lease.from_s > 0 for lease in run.leases):
            return run, terms.wake_s
    return roll_out(terms, given, rollout, engines=knobs.engines, prefer=knobs.prefer), 0.0


def then_learn(name: str, terms: Terms, given: StepInput, run: Rollout, m: int, woken: tuple[Hold, ...] = ()) -> StepRun:
    """A rollout, then m devices that prepare and learn: nothing overlaps."""
    tokens = float(given.tokens.sum())
    work = terms.prepare_s(tokens, m) + terms.learn_s(tokens, m)
    learn, begin = learner_hold(terms, run, m, run.end_s, work)
    holds = (*run.holds(terms.width), learn)
    busy = run.busy(terms.width) + work * m
    return StepRun(
        name, begin + work, sum(h.cost for h in holds), busy, run.end_s, run.result.moves, holds, f"then {m} devices learn"
    )


def learner_hold(terms: Terms, run: Rollout, m: int, over_s: float, work_s: float) -> tuple[Hold, float]:
    """The learner's lease on m devices, and when it can begin to work. Its state is loaded beforehand where m devices are
    free for that long, else after `over_s`; it is moved off afterwards, billed, beside the next rollout."""
    load = terms.state_s(m)
    early = run.free_from((terms.devices - m) // terms.width) <= over_s - load
    begin = over_s if early else over_s + load
    return Hold("learn", m, begin - load, begin + work_s + load), begin
