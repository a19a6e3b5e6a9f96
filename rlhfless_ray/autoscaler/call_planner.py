"""Plan the calls of the learn phase, where critic or reference work beside the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from placement.call_slots import CallOptions, CallPlan, choose_call_slots
from placement.calls import TRAIN_CRITIC, TRAIN_POLICY, StepGraph
from placement.scaling.engine_width import slots as slots_text
from placement.scaling.learner_size import MIN_TRIALS
from placement.scaling.resize_policy import Decision
from rlhfless_ray.autoscaler.criteria import Criteria
from rlhfless_ray.autoscaler.predictor import Predictor

FIXED = "plan.search is fixed: calls take turns"


@dataclass(frozen=True)
class CallToPlan:
    """A call to plan: its ranks, and the tokens of the samples that it works on."""

    ranks: int
    tokens: float


class CallPlanner:
    """Chooses the slots of calls, and whether they run side by side.

    How much two calls slow each other down on the same machine is not assumed. Where the plan's times promise a gain, it is on trial: some
    steps let the calls take turns, and both kinds of steps are compared by what their calls took.
    """

    def __init__(self, predictor: Predictor, criteria: Criteria) -> None:
        self.predictor, self.criteria = predictor, criteria
        self.obstacle = ""  # why the updates of policy and critic may not run at once
        self.planned: CallPlan | None = None  # in turn, to which the step on trial is compared

    def plan(self, graph: StepGraph, stages: list[dict[str, CallToPlan]], decision: Decision, room: int) -> CallPlan:
        """Plan the calls of the phase.

        Args:
            stages: calls by name. Those of a stage start when the stage before has ended.
            decision: of the policy's update, if it were alone.
            room: slots that the run may hold for all calls together.
        """
        self.planned = None
        in_turn = CallPlan({name: decision.actors for stage in stages for name in stage}, False, reason="calls take turns")
        return self.predictor.safely(
            "planning calls of the learn phase", lambda: self._plan(graph, stages, decision, room), lambda: in_turn
        )

    def _plan(self, graph: StepGraph, stages: list[dict[str, CallToPlan]], decision: Decision, room: int) -> CallPlan:
        predictor = self.predictor
        options = {name: self._options(name, call, decision) for stage in stages for name, call in stage.items()}
        value_per_s = self.criteria.value_per_s

        def best(together: bool) -> CallPlan:
            plans = [
                choose_call_slots(graph, {name: options[name] for name in stage}, room, value_per_s, together=together) for stage in stages
            ]
            slots = {name: count for plan in plans for name, count in plan.slots.items()}
            return CallPlan(slots, together, sum(plan.seconds for plan in plans), sum(plan.slot_seconds for plan in plans))

        in_turn = best(False)
        if all(len(stage) < 2 for stage in stages):
            return in_turn
        if predictor.recipe.plan.search == "fixed" or not predictor.recipe.functions.elastic:
            return replace(in_turn, reason=FIXED if predictor.recipe.functions.elastic else "")
        if self.obstacle and TRAIN_CRITIC in options:
            return replace(in_turn, reason=f"calls take turns: {self.obstacle}")
        beside = best(True)
        times = f"{beside.seconds:.3g} s side by side, {in_turn.seconds:.3g} s in turn"
        if not beside.value(value_per_s) < in_turn.value(value_per_s):
            return replace(in_turn, reason=f"calls take turns on {slots_text(room)} ({times})")
        if all(predictor.terms.calls.knows(name) for name in options if name != TRAIN_POLICY) and predictor.learner.is_measured:
            self.planned = in_turn
        trial = predictor.terms.side_by_side
        chosen, what = (beside, "calls run side by side") if trial.decide() else (in_turn, "calls take turns")
        return replace(chosen, reason=f"{what} ({times}; {trial.reason})")

    def _options(self, name: str, call: CallToPlan, decision: Decision) -> CallOptions:
        learner, times, tokens = self.predictor.learner, self.predictor.terms.calls, call.tokens
        if name != TRAIN_POLICY:
            predicted = {
                count: times.predict(name, count, tokens, lambda count: learner.predict(count, tokens)) for count in learner.counts
            }
            return CallOptions(call.ranks, predicted)
        most = decision.actors
        is_trial = learner.tried.get(most, 0) < MIN_TRIALS
        counts = [count for count in learner.counts if count <= most and not is_trial and learner.tried[count] >= MIN_TRIALS] or [most]
        return CallOptions(call.ranks, {count: learner.predict(count, tokens) for count in counts})

    def observe(self, plan: CallPlan, tokens: Mapping[str, float], took: Mapping[str, tuple[int, float]], wall_s: float) -> None:
        """Record calls. `tokens`: of each. `took`: slots of all ranks and seconds of each. `wall_s`: seconds in which any of them ran."""
        predictor, planned, value_per_s = self.predictor, self.planned, self.criteria.value_per_s
        for name, (_, seconds) in took.items():
            if name != TRAIN_POLICY:
                predictor.terms.calls.observe(name, plan.slots[name], tokens[name], seconds)
        if planned is not None:
            worth = sum(slots * seconds for slots, seconds in took.values()) + value_per_s * wall_s
            predictor.terms.side_by_side.observe(plan.together, worth / planned.value(value_per_s))
