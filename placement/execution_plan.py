"""An execution plan of a step: which call runs when, on which slots and in which layout (ReaLHF, arXiv 2406.14088).

Calls that share a slot take turns, and others run side by side. A plan is chosen by its seconds and slot-seconds, as a rollout's plan is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from placement.call_schedule import Problem
from placement.calls import StepGraph
from placement.layouts import Layout
from placement.planning.objective import Objective
from placement.scaling.resize_policy import MIN_SAVING, pays_back, preferred_value
from placement.schedule_search import Found, Goal, ScheduleSearch

MANY = 1000.0  # slots' worth of a second if only time counts


@dataclass(frozen=True)
class PlannedCall:
    """A call of a step. `slots`: their numbers, from the first of the first node. Times count from the start of the step."""

    call: str
    slots: tuple[int, ...]
    start_s: float
    end_s: float
    layout: Layout


@dataclass(frozen=True)
class ExecutionPlan:
    """The calls of a step in order of their starts.

    slot_seconds: of all calls, each billed for its own slots while it runs. reason: in words. is_exact: no plan is better by the same
    times. graph: what each call waits for.
    """

    calls: tuple[PlannedCall, ...]
    seconds: float
    slot_seconds: float
    reason: str
    is_exact: bool = True
    graph: StepGraph = field(default=StepGraph(()), compare=False)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Return the layout of each call, by its name."""
        return {call.call: call.layout for call in self.calls}

    def has_beside(self, name: str, other: str) -> bool:
        """Return whether both calls are in the plan and run at the same time."""
        one, two = (next((call for call in self.calls if call.call == wanted), None) for wanted in (name, other))
        return one is not None and two is not None and one.start_s < two.end_s and two.start_s < one.end_s

    def value(self, value_per_s: float) -> float:
        """Return the cost of the calls, with their seconds at their worth."""
        return self.slot_seconds + value_per_s * self.seconds

    def __getitem__(self, name: str) -> PlannedCall:
        """Return the call of this name. Raises KeyError."""
        for call in self.calls:
            if call.call == name:
                return call
        raise KeyError(name)


def plan_step(problem: Problem, objective: Objective) -> tuple[ExecutionPlan, float]:
    """Return the plan that meets an objective best, and the worth of a second by which it was chosen.

    Where none meets a deadline or a budget, the nearest plan is returned, and its reason says so.
    """
    search = ScheduleSearch(problem)
    least_slot_s = sum(min(one.slot_seconds for one in problem.options[call.name]) for call in problem.graph.calls)
    fastest = search.best(Goal(MANY * problem.slots))
    of_time = preferred_value(1.0, least_slot_s, fastest.seconds)
    met, value_per_s = "", of_time
    if objective.deadline_s is not None:
        value_per_s = 0.0
        found = search.best(Goal(0.0, most_s=objective.deadline_s))
        if not found.is_allowed:
            found, met = fastest, f"no plan takes {objective.deadline_s:g} s or less; the fastest takes "
    elif objective.budget is not None:
        found = search.best(Goal(MANY * problem.slots, most_slot_s=objective.budget))
        if not found.is_allowed:
            found, met = search.best(Goal(0.0)), f"no plan costs {objective.budget:g} slot-s or less; the cheapest takes "
    else:
        if objective.knee:
            cheapest = search.best(Goal(0.0))
            value_per_s = (fastest.slot_seconds - cheapest.slot_seconds) / max(cheapest.seconds - fastest.seconds, 1e-12)
        elif objective.prefer is not None:
            value_per_s = preferred_value(objective.prefer, least_slot_s, fastest.seconds)
        found = search.best(Goal(value_per_s))
    plan = execution_plan(problem, found)
    return replace(plan, reason=met + plan.reason), value_per_s


def plan_at(problem: Problem, value_per_s: float) -> ExecutionPlan:
    """Return the plan of least cost, with seconds at their worth."""
    return execution_plan(problem, ScheduleSearch(problem).best(Goal(value_per_s)))


def plan_with(problem: Problem, layouts: Mapping[str, Layout], value_per_s: float) -> ExecutionPlan | None:
    """Return the best plan with these layouts, by the calls' names. None if the problem has no such option of a call."""
    options = {name: [one for one in some if one.layout == layouts.get(name)] for name, some in problem.options.items()}
    return plan_at(replace(problem, options=options), value_per_s) if all(options.values()) else None


def plan_again(problem: Problem, layouts: Mapping[str, Layout], value_per_s: float) -> ExecutionPlan:
    """Return the best plan, or the one with these layouts, unless another saves `MIN_SAVING` of its cost: a change of slots costs nothing.

    Where these layouts are not possible any more, the change is urgent.
    """
    best, now = plan_at(problem, value_per_s), plan_with(problem, layouts, value_per_s)
    if now is None:
        return best
    before = now.value(value_per_s)
    pays, _ = pays_back(before - best.value(value_per_s), before, once=0.0, lasts=1.0, gamma=1.0, min_saving=MIN_SAVING)
    return best if pays else now


def execution_plan(problem: Problem, found: Found) -> ExecutionPlan:
    """Return the plan of a schedule: slots by number, and the reason in words."""
    calls = _with_numbers(problem, found)
    turns = sum(call.end_s - call.start_s for call in calls)
    reason = f"{found.seconds:.3g} s for {found.slot_seconds:.3g} slot-s: {_in_words(calls)}"
    if turns > found.seconds * (1 + 1e-6):
        reason += f" (one after the other: {turns:.3g} s)"
    return ExecutionPlan(calls, found.seconds, found.slot_seconds, reason, found.is_exact, problem.graph)


def _with_numbers(problem: Problem, found: Found) -> tuple[PlannedCall, ...]:
    """Number the slots of each call: those that its model had before, as far as they are free, then the lowest."""
    busy_until: dict[int, float] = {}
    last: dict[str, tuple[int, ...]] = {}
    planned = []
    starts, ends = found.schedules.starts[0], found.schedules.ends[0]
    for number in found.order.tolist():
        call, start_s, end_s = problem.graph.calls[number], float(starts[number]), float(ends[number])
        layout, chosen = found.options[number].layout, []
        for node in np.nonzero(found.schedules.nodes[0, number])[0].tolist():
            numbers = range(node * problem.slots_per_node, (node + 1) * problem.slots_per_node)
            free = [slot for slot in numbers if busy_until.get(slot, 0.0) <= start_s]
            free.sort(key=lambda slot: (slot not in last.get(call.model, ()), slot))
            chosen += sorted(free[: min(layout.slots, problem.slots_per_node)])
        busy_until |= dict.fromkeys(chosen, end_s)
        last[call.model] = tuple(chosen)
        planned.append(PlannedCall(call.name, tuple(chosen), start_s, end_s, layout))
    return tuple(planned)


def _in_words(calls: tuple[PlannedCall, ...]) -> str:
    """Return the calls with their slots. Those that run at the same time are joined by "beside"."""
    together: list[list[PlannedCall]] = []
    end_s = 0.0
    for call in calls:
        if together and call.start_s < end_s:
            together[-1].append(call)
        else:
            together.append([call])
        end_s = max(end_s, call.end_s)
    return ", then ".join(" beside ".join(f"{call.call} on {len(call.slots)}" for call in group) for group in together)
