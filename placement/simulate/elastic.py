"""Ours and its clairvoyant twin: engines as many as pay, a learner beside the tail, every device given back when it is
done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from placement.simulate.narrow import Narrowing
from placement.simulate.planning import Planner, Try
from placement.simulate.plans import beside, candidates, held
from placement.simulate.step import Hold, Knobs, Rollout, StepInput, StepRun, learn_beside, roll_out
from placement.simulate.terms import Terms

ROUGH = "consolidate"  # a rollout policy that decides in no time, to rank step plans by


def ours(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """Engines as many as pay, grouped and consolidated by forecast scenarios; a learner of planned size works beside the
    tail on devices that were never leased or already released; every device is given back when its phase ends."""
    knobs = planner.searched("ours", trial(terms, "ours"), trial(terms, ROUGH), candidates(terms), partial(beside, terms))
    return elastic(terms, given, knobs, expected=planner.expected)


def oracle(terms: Terms, given: StepInput, planner: Planner) -> StepRun:
    """`ours` that knows every length: rollout and step plan see the truth."""
    true = StepInput(given.lengths, given.prompts, given.group, given.lengths[:, None], given.seed)
    known = trial(terms, "oracle")  # one draw is all there is: every plan is tried in earnest
    knobs = planner.searched("oracle", known, known, candidates(terms), partial(beside, terms), true)
    return elastic(terms, true, knobs, rollout="oracle", name="oracle")


def trial(terms: Terms, rollout: str) -> Try:
    """A step with some knobs, its rollout under this policy."""
    return lambda view, knobs: elastic(terms, view, knobs, rollout=rollout)


def elastic(
    terms: Terms,
    given: StepInput,
    knobs: Knobs,
    *,
    rollout: str = "ours",
    name: str = "ours",
    expected: tuple[float, float] | None = None,
    gradients: bool = True,
    prewarmed: bool = True,
) -> StepRun:
    """One step with these knobs: the rollout on at most `knobs.engines`, the early learner from the moment that the planned
    share has ended and its devices are free for good, the late learner when the rollout is over.

    rollout: the rollout policy. For ablation: gradients, whether they may be taken early at all; prewarmed, whether engines
    may be awake when the step begins.
    """
    if knobs.held:
        within = replace(knobs, held=0)
        step = elastic(held(terms, knobs.held), given, within, rollout=rollout, name=name, gradients=gradients, prewarmed=prewarmed)
        whole = Hold("held", knobs.held, 0.0, step.time_s)
        return replace(step, full=whole.cost, holds=(whole,), reason=knobs.reason, planned=expected)
    terms = terms.learner(linear=knobs.linear, awake=knobs.awake, hosted=knobs.hosted)
    run, waking = _roll_out(terms, given, knobs, rollout, prewarmed)
    free = run.free_from((terms.devices - knobs.early) // terms.width)
    ready = np.sort(run.finish_s)[min(len(given.lengths) - 1, int(knobs.share * len(given.lengths)))]
    lease, load = max(free, float(ready)), terms.state_s(knobs.early) if knobs.early else 0.0
    if not knobs.early or lease + load >= run.end_s:
        return _woken(then_learn(name, terms, given, run, knobs.late), terms.width, waking, knobs.reason, expected)
    done = learn_beside(terms, given, run, knobs.early, knobs.late, lease + load, gradients=gradients, linear=knobs.linear)
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
    return _woken(step, terms.width, waking, knobs.reason, expected)


@dataclass(frozen=True)
class Waking:
    """What wakes before a step begins: engines on devices of their own (`beside`) and on the learner's (`within`), in
    `seconds`."""

    seconds: float = 0.0
    beside: int = 0
    within: int = 0


def _woken(step: StepRun, width: int, waking: Waking, reason: str, expected: tuple[float, float] | None) -> StepRun:
    """The step with the waking of its first engines, billed before its beginning (on the learner's devices, which are held
    anyway, only from then on).

    They can wake beside the end of the step before only while that learns: steps are alike, so for as long as this one
    learns after its rollout. What is longer delays the step.
    """
    some = waking.beside + waking.within
    late = max(0.0, waking.seconds - (step.time_s - step.rollout_s)) if some else 0.0
    moved = tuple(replace(h, from_s=h.from_s + late, to_s=h.to_s + late) for h in step.holds)
    woken = [Hold("wake", width, late - waking.seconds, late)] * waking.beside + [Hold("wake", width, 0.0, late)] * waking.within
    holds = (*woken, *moved)
    return replace(
        step,
        time_s=step.time_s + late,
        rollout_s=step.rollout_s + late,
        full=sum(h.cost for h in holds),
        holds=holds,
        reason=reason,
        planned=expected,
    )


def _roll_out(terms: Terms, given: StepInput, knobs: Knobs, rollout: str, prewarmed: bool) -> tuple[Rollout, Waking]:
    """The rollout, and the engines that are woken before it.

    Engines on devices that the learner leaves free wake beside the end of the step before and only wait for the new weights,
    which are sent to them between processes. Those on the learner's own devices stay awake or wake while it learns, where
    its memory allows that, and get the weights in place; where it does not, everybody waits until they have woken, as in `fixed`. A
    rollout that opens engines later wakes all of them when it needs them.
    """
    d, w = terms.devices, terms.width
    narrowings: tuple[Narrowing, ...] = ()
    if knobs.narrow:
        narrowings = (Narrowing(knobs.share, (d - knobs.early) // w),)

    def generate(**start: float | int) -> Rollout:
        return roll_out(
            terms,
            given,
            rollout,
            engines=knobs.engines,
            prefer=knobs.prefer,
            narrowings=narrowings,
            **start,  # type: ignore[arg-type]
        )

    beside = min((d - knobs.late) // w, knobs.engines)
    awake = knobs.engines - beside
    room = terms.awake_capacity(knobs.late) if awake else terms.capacity
    if prewarmed and terms.holds_one(room):
        transfer = max(terms.broadcast_s if beside else 0.0, terms.reshard_s if awake else 0.0)
        run = generate(wake_s=0.0, transfer_s=transfer, capacity=room)
        if not any(lease.from_s > 0 for lease in run.leases):
            beside = min(beside, len(run.leases))
            return run, Waking(terms.wake_s, beside, len(run.leases) - beside)
    return generate(), Waking()


def then_learn(name: str, terms: Terms, given: StepInput, run: Rollout, m: int) -> StepRun:
    """A rollout, then m devices that prepare and learn: nothing overlaps."""
    tokens = float(given.tokens.sum())
    work = terms.prepare_s(tokens, m) + terms.learn_s(tokens, m)
    learn, begin = learner_hold(terms, run, m, run.end_s, work)
    holds = (*run.holds(terms.width), learn)
    busy = run.busy(terms.width) + work * m
    return StepRun(name, begin + work, sum(h.cost for h in holds), busy, run.end_s, run.result.moves, holds, f"then {m} devices learn")


def learner_hold(terms: Terms, run: Rollout, m: int, over_s: float, work_s: float) -> tuple[Hold, float]:
    """The learner's lease on m devices, and when it can begin to work. Its state is loaded beforehand where m devices are
    free for that long, else after `over_s`; it is moved off afterwards, billed, beside the next rollout."""
    load = terms.state_s(m)
    early = run.free_from((terms.devices - m) // terms.width) <= over_s - load
    begin = over_s if early else over_s + load
    return Hold("learn", m, begin - load, begin + work_s + load), begin
