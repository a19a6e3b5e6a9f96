"""The plan of each step: forecast → frontier → choice → decision.

Every decision is a value, on which the runtime acts. Planning never raises in a running loop: after a failure the last good
plan's size is kept, and the reason says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from placement.forecast.forecaster import Scenarios
from placement.planning.objective import choose_nearest
from placement.planning.partition import pareto
from placement.planning.plan import Plan
from placement.scaling.engine_width import WidthDecision, best_width, decide_width, slots
from placement.scaling.learner_size import LearnerSize
from placement.scaling.overlapped_step import Rest, Update, step_plan
from placement.scaling.phase_delay import Delay
from placement.scaling.resize_policy import (
    Decision,
    Hold,
    ResizeHistory,
    Transition,
    best_held_plan,
    counted_from,
    decide,
    started_later,
    time_value,
    with_starts,
)
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.call_planner import CallPlanner
from rlhfless_ray.autoscaler.criteria import MIN_SECOND_VALUE, Criteria
from rlhfless_ray.autoscaler.initial_speed import ExpectedEngine
from rlhfless_ray.autoscaler.learner_sizing import LearnerSizing
from rlhfless_ray.autoscaler.predictor import Predictor, response_tokens
from rlhfless_ray.autoscaler.rollout_frontiers import RolloutFrontiers
from rlhfless_ray.autoscaler.step_predictor import StepPredictor
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import ObjectiveConfig, Recipe
from rlhfless_ray.step.rollout_plan import Prediction, RolloutPlan
from rlhfless_ray.types import Prompt, Sample

DRAFTS_MATTER = 1.02  # tokens of a sequence in an engine step from which a plan's reason mentions drafts


class Autoscaler:
    """Plan each step from its forecast. Its state survives a resume."""

    def __init__(self, recipe: Recipe, first_speed: Speed) -> None:
        self.predictor, self.criteria = Predictor(recipe, first_speed), Criteria.of(recipe)
        self.steps = StepPredictor(self.predictor, self.criteria)
        self.engines, self.terms = self.predictor.engines, self.predictor.terms
        self.safely, self.troubles = self.predictor.safely, self.predictor.troubles
        self.width_history = ResizeHistory()
        self.unit = "slot-s"  # of costs, in reasons: "core-s" or "GPU-s" once the kind of slots is known
        self.note = ""  # begins the next plan's reason: what has changed since the plan before
        self.frontiers, self.sizing = RolloutFrontiers(self.steps), LearnerSizing(self.predictor, self.criteria)
        self.learner_delay = Delay(0.0, self.predictor.learner_slots, "")  # of the next update, for slots that another run gives back
        self.calls = CallPlanner(self.predictor, self.criteria)  # of critic and reference beside the learner
        self.history = ResizeHistory()
        self.actors = 0  # engines of the last step
        self.last: Decision | None = None
        self.running_update: Update | None = None  # beside the rollout that runs, on such a pool
        self.update_ends_s = 0.0  # when it will end by its prediction, on the clock of time.monotonic

    @property
    def recipe(self) -> Recipe:
        return self.predictor.recipe

    @property
    def learner(self) -> LearnerSize:
        return self.predictor.learner

    def expect(self, engines: dict[int, ExpectedEngine], note: str) -> None:
        """Set initial estimates of engines, see `EngineSpeeds.expect`. `note`: why there is one width only."""
        self.engines.expect(engines)
        self.note = note

    def use_width(self, width: int) -> None:
        """Plan engines of another width from now on. None works yet."""
        self.engines.use(width)
        self.actors = 0

    def set_objective(self, objective: ObjectiveConfig) -> None:
        """Choose plans by another objective from now on."""
        self.predictor.recipe = self.recipe.model_copy(update={"objective": objective})
        self.criteria.set_objective(objective)

    def plan(
        self,
        scenarios: Scenarios,
        prompts: list[Prompt],
        max_actors: int,
        *,
        step: int,
        warm: int,
        others: Mapping[int, tuple[int, int]] | None = None,
        learner_slots: int = 0,
        rooms: Mapping[int, Mapping[int, int]] | None = None,
        rest_actors: int = 0,
    ) -> RolloutPlan:
        """Plan the number of engines and each engine's sequences, with the speed that `learn` has fitted.

        Args:
            warm: number of processes without a cold start.
            others: (max_actors, warm) of further widths that engines may have.
            learner_slots: slots that the learner holds, for a rollout beside an update.
            rooms: most engines beside the next update, by the learner's slots per rank and the engines' width.
            rest_actors: most engines once the update has ended, on which a partial rollout goes on. 0: it does not.
        """
        if not self.recipe.functions.elastic:
            return RolloutPlan(Hold(max_actors, "functions.elastic is off: all engines, always"), max_actors)
        self.steps.correction = self.safely("correcting predictions", self.steps.correct_rollout, lambda: 1.0)
        if learner_slots:  # the pool may have granted fewer than were wanted
            self.predictor.learner_slots = max(1, learner_slots // self.predictor.ranks)
        rest = self.safely("predicting the rest", lambda: self._rest(scenarios.lengths, prompts, rest_actors), lambda: None)
        update = self.safely(
            "predicting the update", lambda: self.predictor.update_beside(learner_slots, scenarios.lengths, rest), lambda: None
        )
        self.criteria.least = min_actors = min(self.recipe.rollout.min_actors, max_actors)
        self.actors = min(self.actors, max_actors)  # the slots of the others are gone, or the learner has them
        limits = {self.engines.width: (max_actors, warm), **(others or {})}
        warm_by_width = {width: count for width, (_, count) in limits.items()}
        plans: list[Plan] = []

        def make() -> Decision:
            frontiers = {width: self.frontiers.best(scenarios.lengths, prompts, count, width) for width, (count, _) in limits.items()}
            frontiers, note = self._shared(frontiers, update, warm_by_width, step)
            if not others:
                plans.extend(frontiers[self.engines.width])
                decision = self._decide(plans, step, warm, update)
                return replace(decision, reason=f"{note}; {decision.reason}") if note else decision
            chosen = self._decide_width(frontiers, {width: count for width, (_, count) in limits.items()}, step, update)
            plans.extend(frontiers[chosen.width])
            reason = f"{note}; {chosen.reason}" if note else chosen.reason
            if chosen.width == self.engines.width:
                decision = self._decide(plans, step, warm, update)
                return replace(decision, reason=f"{reason}; {decision.reason}")
            self.use_width(chosen.width)
            return self._decide(plans, step, limits[chosen.width][1], update, urgent=reason)

        made = self.safely("planning engines", make, lambda: None)
        if made is None:
            decision = self._keep_last(min(max(self.actors, min_actors), max_actors), max_actors)
        else:
            drafts = f"drafts make {self.predictor.tokens_per_step:.2f} tokens of a sequence in an engine step, so few sequences are faster"
            decision = replace(made, reason=f"{made.reason}; {drafts}") if self.predictor.tokens_per_step > DRAFTS_MATTER else made
            self.last = decision
        if self.note:
            decision, self.note = replace(decision, reason=f"{self.note}; {decision.reason}"), ""
        predicted = self.safely(
            "predicting the step",
            lambda: self.steps.predict_step(decision, scenarios.lengths, prompts, limits[self.engines.width][1], update),
            lambda: (Prediction(), Prediction(), Prediction()),
        )
        if made is not None and (start_s := predicted[0].corrected - decision.time_s) > 0:
            starts = f"{predicted[0].corrected:.4g} s with {start_s:.3g} s of cold starts before"
            decision = replace(decision, reason=f"{decision.reason}; {starts}")
        if rooms:
            size = partial(
                self.sizing.together,
                scenarios.lengths,
                rooms,
                rest,
                lambda most, width: self.frontiers.best(scenarios.lengths, prompts, most, width),
                lambda width, plan: self._with_starts(plan, width, warm_by_width.get(width, 0), step),
            )
            self.sizing.sizes = self.safely("sizing learner and engines", size, lambda: None)
        width = self.engines.width if self.engines.expected else None
        actors = max(min_actors, decision.actors)
        return RolloutPlan(decision, actors, tuple(plans), *predicted, width=width, update=update, has_failed=made is None)

    def _keep_last(self, fallback_actors: int, most: int) -> Decision:
        """Hold the last plan's engines, `most` at most, or `fallback_actors` if there is none.

        Its groups are of other sequences, so they are left out.
        """
        if (last := self.last) is None:
            return Hold(fallback_actors, f"the planner failed; no plan before it, {fallback_actors} engines")
        return Hold(min(last.actors, most), f"the planner failed; the last good plan is kept: {last.reason}", last.time_s, last.cost)

    def _shared(
        self, frontiers: dict[int, list[Plan]], update: Update | None, warm: Mapping[int, int], step: int
    ) -> tuple[dict[int, list[Plan]], str]:
        """Return the plans that a pool shared with other runs has slots for, by width, and why others were left out.

        Beside an update, slots are worth what they save of the step. `warm`: processes of each width without a cold start.
        """
        if self.criteria.bids is None:
            return frontiers, ""
        learner = self.predictor.ranks * self.predictor.learner_slots if self.recipe.rollout.rolls_out_ahead else 0

        def started(width: int, plan: Plan) -> Plan:
            return self._with_starts(plan, width, warm[width], step)

        if update is None:
            kept, note = self.criteria.bids.divide(frontiers, learner, started)
            return {width: pareto(plans) for width, plans in kept.items()}, note
        compared = {width: self._compared(plans, update) for width, plans in frontiers.items()}
        kept, note = self.criteria.bids.divide(compared, learner, started)
        left = {id(plan) for plans in kept.values() for plan in plans}
        pairs = {width: zip(plans, compared[width], strict=True) for width, plans in frontiers.items()}
        return {width: pareto(plan for plan, figures in both if id(figures) in left) for width, both in pairs.items()}, note

    def _with_starts(self, plan: Plan, width: int, warm: int, step: int) -> Plan:
        """Count engines' starts in a plan as a decision alone does: not in the first step, and not against a deadline or budget."""
        if not self.actors or self.criteria.objective.deadline_s is not None:
            return plan
        lasts = max(1.0, min(self.history.record(step, plan.actors).horizon(step), self.recipe.run.steps - step + 1))
        held = self._held(warm) if width == self.engines.width else 0
        started = with_starts(plan, held, self._transition(width, warm), lasts, self.recipe.objective.payback)
        return started if self.criteria.objective.budget is None else replace(started, cost=plan.cost)

    def begin_rollout(self, plan: RolloutPlan, grows: bool) -> tuple[RolloutPlan, Delay]:
        """Begin a rollout on a pool that the run shares with others. `grows`: whether it takes and gives slots while it runs.

        Returns whether it waits for slots that another run gives back, and the plan with the engines for which it waits.
        """
        width = plan.width or self.engines.width
        if self.criteria.bids is None:
            return plan, Delay(0.0, plan.actors * width, "")
        self.running_update, self.update_ends_s = plan.update, time.monotonic() + (plan.update.seconds if plan.update else 0.0)
        delay = self.criteria.bids.begin_rollout(plan.actors * width, plan.predicted_s, grows, self.criteria.value_per_s)
        return replace(plan, actors=max(self.criteria.least, delay.slots // width)) if delay.seconds else plan, delay

    def renew_rollout(self, left: np.ndarray, context: np.ndarray, working: int, warm: int, max_actors: int) -> int:
        """Bid for the rest of a rollout on a shared pool, and return how many engines have work by now, `max_actors` at most.

        Args:
            left: (n,) expected tokens that the unfinished responses still get.
            context: (n,) tokens that they have, prompts included.
            working: engines that work. Further ones have to start first.
            warm: parked engines that could work on slots that are free now.
        """
        if self.criteria.bids is None or not len(left):
            return max_actors
        bids, width, tokens = self.criteria.bids, self.engines.width, np.maximum(left, 1.0)

        def renew() -> int:
            plans = self.frontiers.plans(tokens, context.astype(float), max_actors, width, self.engines.fit.speed)
            if there := [plan for plan in plans if plan.actors <= working]:
                now, transition = min(there, key=lambda plan: plan.time_s), self._transition(width, working + warm)
                plans = [started_later(plan, now, transition) for plan in plans]
            if self.running_update is not None:
                left_s = max(0.0, self.update_ends_s - time.monotonic())
                plans = self._compared(plans, replace(self.running_update, seconds=left_s, rest=None))
            return bids.renew_rollout(plans, width)

        return self.safely("renewing the bid", renew, lambda: max_actors)

    def _rest(self, lengths: np.ndarray, prompts: list[Prompt], rest_actors: int) -> Rest | None:
        """Return where a partial rollout of these lengths goes on once the update beside it has ended.

        The pause includes the overhead besides decoding, so the rest does not.
        """
        if not rest_actors:
            return None
        width, around_s = self.engines.width, self.steps.correction * self.terms.around.predict()
        plans = self.frontiers.best(lengths, prompts, rest_actors)
        if self.criteria.bids is not None:
            room = self.criteria.bids.room_for_rest([(plan.actors * width, plan) for plan in plans])
            most = max(min(plan.actors for plan in plans), room // width)
            plans = [plan for plan in plans if plan.actors <= most]
        best = choose_nearest(plans, self.criteria.objective).plan
        slots = best.actors * width
        return Rest(slots, best.time_s - around_s, best.cost - around_s * slots, self.terms.pause.predict())

    def most_after_update(self, most: int) -> int:
        """Return how many engines a rollout has slots for once the update beside it has ended, `most` at most."""
        return most if self.criteria.bids is None else min(most, max(self.criteria.least, self.criteria.bids.room // self.engines.width))

    def size_learner(self, samples: Sequence[Sample], is_beside_rollout: bool = False) -> Decision:
        """Decide the number of slots per rank for the update on `samples`. `is_beside_rollout`: the next step's works beside it."""
        if not self.recipe.functions.elastic:
            return Hold(self.recipe.learner.max_slots_per_rank, "functions.elastic is off: all slots, always")
        tokens = self.predictor.update_tokens = float(response_tokens(samples).sum())
        alone = partial(
            self.learner.decide, self.predictor.learner_slots, tokens, value_per_s=self.criteria.value_per_s, retries=self.sizing.may_retry
        )
        decision = self.safely(
            "sizing the learner",
            (lambda: self.sizing.beside_rollout(tokens)) if is_beside_rollout else alone,
            lambda: Hold(self.predictor.learner_slots, "as before: sizing the learner failed"),
        )
        self.predictor.learner_slots, self.learner_delay = decision.actors, Delay(0.0, decision.actors, "")
        if self.criteria.bids is not None and not self.recipe.rollout.rolls_out_ahead:
            delay, fewer = self.criteria.bids.begin_update(self.learner, decision.actors, tokens, self.criteria.value_per_s)
            self.learner_delay, self.predictor.learner_slots = delay, delay.slots
            return replace(decision, actors=delay.slots, reason="; ".join(filter(None, (delay.reason, fewer, decision.reason))))
        if self.criteria.bids is not None and is_beside_rollout:
            self.criteria.bids.begin_pair(self.predictor.expected_update_s)
        return decision

    def _decide_width(self, frontiers: dict[int, list[Plan]], warm: dict[int, int], step: int, update: Update | None) -> WidthDecision:
        """Decide about the engines' width. `warm`: processes of each width without a cold start."""
        adjusted = {width: self._compared(plans, update) for width, plans in frontiers.items()}
        width, best = best_width(adjusted, self.criteria.objective)
        now = choose_nearest(adjusted[self.engines.width], self.criteria.objective)
        self.width_history = self.width_history.record(step, width)
        start = self.terms.warm_start if best.plan.actors <= warm[width] else self.terms.cold_start
        return decide_width(
            self.engines.width,
            now.plan if now.met or not best.met else None,
            width,
            best.plan,
            start_s=start.predict(),
            value_per_s=max(time_value(self.criteria.objective, [plan for plans in adjusted.values() for plan in plans]), MIN_SECOND_VALUE),
            lasts=min(self.width_history.horizon(step), self.recipe.run.steps - step + 1),
            gamma=self.recipe.objective.payback,
            unit=self.unit,
        )

    def _held(self, warm: int) -> int:
        """Return how many of the last step's engines need no start. On a shared pool other runs may hold the devices of the others.

        `warm`: see `plan`. One engine is always needed, so its start decides nothing.
        """
        return self.actors if self.criteria.bids is None or not self.actors else max(1, min(self.actors, warm))

    def _transition(self, width: int, warm: int) -> Transition:
        """Return what the starts of engines take, of which `warm` are parked or work."""
        cold_s, warm_s = self.terms.cold_start.predict(), self.terms.warm_start.predict()
        return Transition(cold_s, restart_s=warm_s, price=width, warm=warm)

    def _decide(self, plans: list[Plan], step: int, warm: int, update: Update | None, urgent: str = "") -> Decision:
        adjusted = self._compared(plans, update)
        choice = choose_nearest(adjusted, self.criteria.objective, self.unit)
        chosen = choice.plan
        self.criteria.value_per_s = max(time_value(self.criteria.objective, adjusted), MIN_SECOND_VALUE)
        self.history = self.history.record(step, chosen.actors)
        held = self._held(warm)

        def best_for(actors: int) -> Plan | None:
            return best_held_plan(adjusted, actors, self.criteria.objective) if actors else None

        weigh = partial(
            decide,
            held,
            stay=best_for(held),
            step=step,
            history=self.history,
            value_per_s=self.criteria.value_per_s,
            transition=self._transition(self.engines.width, warm),
            least=self.criteria.least,
            steps_left=self.recipe.run.steps - step + 1,
            gamma=self.recipe.objective.payback,
            urgent=urgent,
            unit=self.unit,
        )
        decision = weigh(chosen)
        fewer = best_for(warm) if decision.plan is not chosen and held < warm < chosen.actors else None
        if fewer is not None and fewer.actors > held and (without_cold_starts := weigh(fewer)).plan is fewer:
            decision = replace(without_cold_starts, reason=f"{decision.reason}; {without_cold_starts.reason}")
        if decision.plan is chosen:
            decision = replace(decision, reason=f"{choice.reason}; {decision.reason}")
        if held < self.actors:
            ready = min(warm, self.actors)
            decision = counted_from(decision, self.actors, f"{ready} of the last step's {self.actors} engines need no start")
        if update is None:
            return decision
        own = next(plan for plan, figure in zip(plans, adjusted, strict=True) if figure is decision.plan)
        reason = f"beside an update of {update.seconds:.3g} s on {slots(update.slots)}: {decision.reason}"
        return replace(decision, reason=reason, plan=own, time_s=own.time_s, cost=own.cost)

    def _compared(self, plans: list[Plan], update: Update | None) -> list[Plan]:
        """Return the plans with the time and cost by which the objective compares them: beside an update, those of the step."""
        return plans if update is None else [step_plan(plan, update, self.criteria.objective) for plan in plans]

    def quality(self, scenarios: Scenarios, samples: Sequence[Sample], prompts: list[Prompt], max_actors: int) -> JsonObject:
        """Return metrics of the step's forecast, of the best plan for the true lengths, and of the lower bounds."""
        self.predictor.learn()
        row = {"pool/rollout_actors": self.actors}
        return row | self.safely("judging the plan", lambda: self.frontiers.judge(scenarios, samples, prompts, max_actors), lambda: {})

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> JsonObject:
        return {
            **self.predictor.state(),
            **({"width_history": asdict(self.width_history)} if self.engines.expected else {}),
            "actors": self.actors,
            "history": asdict(self.history),
            "second": self.criteria.value_per_s,
        }

    def restore(self, state: JsonObject) -> None:
        self.predictor.restore(state)
        if state.get("width") in self.engines.expected:
            self.width_history = ResizeHistory(**state["width_history"])
        self.actors = state["actors"]
        self.history = ResizeHistory(**state["history"])
        self.criteria.value_per_s = state["second"]
