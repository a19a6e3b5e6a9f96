"""Plan the calls of the learn phase, where critic or reference work beside the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from placement.call_schedule import Option, Problem
from placement.calls import TRAIN_CRITIC, TRAIN_POLICY, StepGraph, in_turn, part, with_needs, with_passes_first
from placement.execution_plan import ExecutionPlan, PlannedCall, plan_again, plan_at, plan_with
from placement.layouts import Layout
from placement.scaling.engine_width import slots as slots_text
from placement.scaling.learner_size import MIN_TRIALS
from placement.scaling.resize_policy import Decision, Hold
from rlhfless_ray.autoscaler.criteria import Criteria
from rlhfless_ray.autoscaler.predictor import Predictor

FIXED = "plan.search is fixed: calls take turns"
TURNS = "calls take turns"


@dataclass(frozen=True)
class CallToPlan:
    """A call to plan: its ranks, and the tokens of the samples that it works on."""

    ranks: int
    tokens: float


class CallPlanner:
    """Chooses the slots of calls, and whether they run side by side: the execution plan of least cost, by measured times of calls.

    Their layouts are fixed but for the slots of each rank. The search runs beside the update (`search`). The next learn phase takes what it
    has found, with the times of its own tokens, and searches again only if that is not possible any more.

    How much two calls slow each other down on the same machine is not assumed. Where the plan's times promise a gain, it is on trial: some
    steps let the calls take turns, and both kinds of steps are compared by what their calls took.
    """

    def __init__(self, predictor: Predictor, criteria: Criteria) -> None:
        self.predictor, self.criteria = predictor, criteria
        self.runs_beside = False  # whether calls run side by side in this phase
        self.obstacle = ""  # why the updates of policy and critic may not run at once
        self.planned: ExecutionPlan | None = None  # in turn, to which the step on trial is compared
        self.layouts: list[dict[str, Layout]] = [{}, {}]  # found in turn, and side by side

    def plan(self, graph: StepGraph, calls: Mapping[str, CallToPlan], decision: Decision, room: int) -> ExecutionPlan:
        """Plan the calls of the phase, by name.

        Args:
            graph: of the whole step.
            decision: of the policy's update, if it were alone.
            room: slots that the run may hold for all calls together.
        """
        self.planned, self.runs_beside = None, False
        return self.predictor.safely(
            "planning calls of the learn phase",
            lambda: self._plan(graph, calls, decision, room),
            lambda: _unplanned(in_turn(part(graph, calls)), calls, decision),
        )

    def search(self, graph: StepGraph, calls: Mapping[str, CallToPlan], decision: Decision, room: int) -> None:
        """Search plans for the next learn phase, if it is like this one. Takes up to 50 ms: call it while the learner works."""

        def find() -> None:
            for kind, problem in enumerate(self._problems(graph, calls, decision, room)):
                self.layouts[kind] = plan_again(problem, self.layouts[kind], self.criteria.value_per_s).layouts

        self.predictor.safely("searching plans of the learn phase", find, lambda: None)

    def price_ranks(self, graph: StepGraph, on_ranks: Mapping[int, Mapping[str, CallToPlan]], room: int) -> None:
        """Tell the choice of ranks what the other calls add to an update. `on_ranks`: the calls as they would be, by the learner's ranks.

        They run as they do now, side by side or in turn. Each number of ranks and slots takes a search: call it while the learner works.
        """
        learners, value_per_s = self.predictor.learners, self.criteria.value_per_s

        def price() -> None:
            found = {}
            for ranks, calls in on_ranks.items():
                for update_s, slots in learners.updates(ranks, calls[TRAIN_POLICY].tokens, room):
                    problem = self._problems(graph, calls, Hold(slots // ranks, ""), room)[self.runs_beside]
                    update = [Option(Layout(ranks, threads=slots // ranks), update_s)]
                    plan = plan_at(replace(problem, options={**problem.options, TRAIN_POLICY: update}), value_per_s)
                    found[ranks, slots] = plan.seconds - update_s, plan.slot_seconds - slots * update_s
            learners.others = found

        self.predictor.safely("pricing other numbers of ranks", price, learners.others.clear)

    def _plan(self, graph: StepGraph, calls: Mapping[str, CallToPlan], decision: Decision, room: int) -> ExecutionPlan:
        predictor, value_per_s, plans = self.predictor, self.criteria.value_per_s, []
        problems = self._problems(graph, calls, decision, room)
        for kind, problem in enumerate(problems):
            found = plan_with(problem, self.layouts[kind], value_per_s)
            if found is None:  # urgent
                found = plan_again(problem, {}, value_per_s)
                self.layouts[kind] = found.layouts
            plans.append(found)
        turns, beside = plans
        if problems[0].graph == problems[1].graph:
            return replace(turns, reason=f"{TURNS}: {self.obstacle}" if self.obstacle and TRAIN_CRITIC in calls else "")
        if predictor.recipe.plan.search == "fixed" or not predictor.recipe.functions.elastic:
            return replace(turns, reason=FIXED if predictor.recipe.functions.elastic else "")
        times = f"{beside.seconds:.3g} s side by side, {turns.seconds:.3g} s in turn"
        if not beside.value(value_per_s) < turns.value(value_per_s):
            return replace(turns, reason=f"{TURNS} on {slots_text(room)} ({times})")
        if all(predictor.terms.calls.knows(name) for name in calls if name != TRAIN_POLICY) and predictor.learner.is_measured:
            self.planned = turns
        trial = predictor.terms.side_by_side
        self.runs_beside = trial.decide()
        chosen, what = (beside, "calls run side by side") if self.runs_beside else (turns, TURNS)
        why = f"; updates take turns: {self.obstacle}" if self.obstacle and TRAIN_CRITIC in calls else ""
        return replace(chosen, reason=f"{what} ({times}; {trial.reason}): {chosen.reason}{why}")

    def _problems(self, graph: StepGraph, calls: Mapping[str, CallToPlan], decision: Decision, room: int) -> tuple[Problem, Problem]:
        """Return what there is to decide if calls take turns, and if they may run side by side."""
        options = {name: self._options(name, call, decision) for name, call in calls.items()}
        most = max(room, *(min(one.layout.slots for one in some) for some in options.values()))  # a call that needs more runs alone
        fitting = {name: [one for one in some if one.layout.slots <= most] for name, some in options.items()}
        beside = with_passes_first(part(graph, calls))
        if self.obstacle and {TRAIN_CRITIC, TRAIN_POLICY} <= calls.keys():
            beside = with_needs(beside, {TRAIN_POLICY: (TRAIN_CRITIC,)})
        turns = in_turn(beside)
        return Problem(turns, fitting, 1, most), Problem(beside, fitting, 1, most)

    def _options(self, name: str, call: CallToPlan, decision: Decision) -> list[Option]:
        learner, times = self.predictor.learner, self.predictor.terms.calls

        def update_s(count: int) -> float:
            return learner.predict(count, call.tokens)

        if name != TRAIN_POLICY:
            predicted = {count: times.predict(name, call.ranks, count, call.tokens, update_s) for count in learner.counts}
        else:
            most = decision.actors
            is_trial = learner.tried.get(most, 0) < MIN_TRIALS
            counts = [count for count in learner.counts if count <= most and not is_trial and learner.tried[count] >= MIN_TRIALS] or [most]
            predicted = {count: update_s(count) for count in counts}
        return [Option(Layout(call.ranks, threads=count), seconds) for count, seconds in predicted.items()]

    def observe(self, plan: ExecutionPlan, tokens: Mapping[str, float], took: Mapping[str, tuple[int, float]], wall_s: float) -> None:
        """Record calls. `tokens`: of each. `took`: slots of all ranks and seconds of each. `wall_s`: seconds in which any of them ran."""
        predictor, planned, value_per_s = self.predictor, self.planned, self.criteria.value_per_s
        for name, (_, seconds) in took.items():
            if name != TRAIN_POLICY:
                layout = plan[name].layout
                predictor.terms.calls.observe(name, layout.ranks, layout.threads, tokens[name], seconds)
        slot_s = sum(slots * seconds for slots, seconds in took.values())
        predictor.calls_took = wall_s, slot_s
        if planned is not None:
            worth = (slot_s + value_per_s * wall_s) / planned.value(value_per_s)
            predictor.terms.side_by_side.observe(plan.graph != planned.graph, worth)


def _unplanned(graph: StepGraph, calls: Mapping[str, CallToPlan], decision: Decision) -> ExecutionPlan:
    """Return the plan of a planner that has failed: calls take turns, with as many slots a rank as the policy's update has."""
    planned = (PlannedCall(call.name, (), 0.0, 0.0, Layout(calls[call.name].ranks, threads=decision.actors)) for call in graph.calls)
    return ExecutionPlan(tuple(planned), 0.0, 0.0, TURNS, graph=graph)
