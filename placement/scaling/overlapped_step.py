"""Size a rollout and the update that it works beside, together.

With a lag of one step, the next step's rollout works beside this step's update. Both hold their slots at once, and the step waits for the
slower one. A rollout that ends before the update needs no more engines, and an update that ends before the rollout no more slots.

A partial rollout that outlasts the update may pause, and go on under the new weights on all slots (`Rest`). A part of it that is left then
takes the same part of the time and cost of the whole rollout there. So the learner's slots count for the update and the step's other work,
whose passes need them, but not for the rest of the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from placement.planning.objective import Objective, choose_nearest, in_words
from placement.planning.plan import Plan
from placement.scaling.engine_width import slots
from placement.scaling.resize_policy import MIN_SAVING, time_value


@dataclass(frozen=True)
class Rest:
    """Where a partial rollout goes on after the update: its slots, and seconds and slot-seconds of the whole rollout on them.

    pause_s: seconds before it goes on.
    """

    slots: int
    seconds: float
    cost: float
    pause_s: float


@dataclass(frozen=True)
class Update:
    """An update beside a rollout: the learner's slots, its seconds on them, and seconds of the step's other work (apart_s).

    rest: where a partial rollout goes on after the update. None: it ends where it began.
    """

    slots: int
    seconds: float
    apart_s: float = 0.0
    rest: Rest | None = None

    def rest_s(self, rollout_s: float) -> float | None:
        """Return the seconds after the update in which a rollout of so many seconds goes on elsewhere. None: it ends sooner where it is."""
        if self.rest is None or rollout_s <= self.seconds:
            return None
        after_s = self.rest.pause_s + (1 - self.seconds / rollout_s) * self.rest.seconds
        return after_s if after_s < rollout_s - self.seconds else None


@dataclass(frozen=True)
class Sizes:
    """The update and the rollout that were chosen together, and why. `plan` has the rollout's own time and cost.

    `costs`: of a step with the best rollout beside each update, in slot-seconds with its seconds at their worth, by the learner's slots.
    """

    update: Update
    plan: Plan
    reason: str
    costs: Mapping[int, float]


def step_plan(plan: Plan, update: Update, objective: Objective) -> Plan:
    """Return a rollout's plan with the seconds and slot-seconds of a step in which it works beside the update.

    The learner holds its slots throughout the step, except while a partial rollout goes on without it. An engine is billed until its own
    last response, as in every plan. An objective's deadline or budget is one of the rollout alone: that axis keeps the rollout's figure.
    """
    step_s = held_s = max(plan.time_s, update.seconds) + update.apart_s
    cost = plan.cost
    if update.rest is not None and (rest_s := update.rest_s(plan.time_s)) is not None:
        before, held_s = update.seconds / plan.time_s, update.seconds + update.apart_s
        step_s = held_s + rest_s
        cost = before * plan.cost + (1 - before) * update.rest.cost + update.rest.slots * update.rest.pause_s
    return replace(
        plan,
        time_s=step_s if objective.deadline_s is None else plan.time_s,
        cost=cost + update.slots * held_s if objective.budget is None else plan.cost,
    )


def size_together(plans: Mapping[Update, Sequence[Plan]], objective: Objective, current: int = 0) -> Sizes:
    """Choose an update and a rollout for the slots that it leaves.

    Every pair is tried. Pairs are compared by the whole step: the longer of update and rollout and what overlaps with neither, and the
    slot-seconds of both.

    Parameters
    ----------
    plans : mapping
        For each update that is possible, the frontier of rollouts on the slots that it leaves.
    objective : Objective
        Which pair to choose.
    current : int
        Slots of the learner now. They are kept unless another pair saves `MIN_SAVING` of a step's cost.

    Raises
    ------
    ValueError
        If there are no plans.
    """
    pairs = [(update, plan, step_plan(plan, update, objective)) for update, some in plans.items() for plan in some]
    choice = choose_nearest([step for *_, step in pairs], objective)
    update, plan, step = pairs[choice.index]
    worth = time_value(objective, [step for *_, step in pairs])
    best = {one: choose_nearest([step for other, _, step in pairs if other is one], objective).plan for one, some in plans.items() if some}
    held = [pair for pair in pairs if pair[0].slots == current]
    if held and update.slots != current:
        stay = choose_nearest([step for *_, step in held], objective)
        before, after = (one.cost + worth * one.time_s for one in (stay.plan, step))
        if stay.met == choice.met and before - after <= MIN_SAVING * before:
            update, plan, step = held[stay.index]
    others = [f"{slots(one.slots)} beside {in_words(other)}" for one, other in best.items() if one != update]
    pair = f"{slots(update.slots)} for an update of {update.seconds:.3g} s beside {engines_in_words(plan.actors)}"
    rest = f", the rest on {slots(update.rest.slots)}" if update.rest is not None and update.rest_s(plan.time_s) is not None else ""
    reason = f"{pair} for a rollout of {plan.time_s:.3g} s{rest}: step of {step.time_s:.3g} s, {step.cost:.3g} slot-s"
    reason += f" ({'; '.join(others)})" * bool(others)
    return Sizes(update, plan, reason, {one.slots: other.cost + worth * other.time_s for one, other in best.items()})


def engines_in_words(engines: int) -> str:
    """Return "1 engine" or "2 engines"."""
    return f"{engines} engine" + "s" * (engines != 1)
