"""What the planner knows of a run, and the plan of each step: forecast → frontier → choice → decision.

Everything it decides is a value; the runtime acts on it. It never raises in a running loop: where planning fails the last
good plan's size is kept, and the reason says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from placement.bounds import rollout_bounds
from placement.choice import Objective, choose_nearest
from placement.frontier import frontier
from placement.keep_warm import hold_slot, keep_alive, prewarm, start_cost
from placement.learner_size import LearnerSize
from placement.lengths import LengthForecaster, Scenarios, forecast_quality
from placement.plan import Plan
from placement.policy import (
    Decision,
    Hold,
    Park,
    Release,
    ResizeHistory,
    Transition,
    deal,
    decide,
    failed,
    plan_of_current,
    safe_decide,
    time_value,
)
from placement.speed import Speed, SpeedFit
from placement.terms import Term, Terms
from rlhfless_ray.errors import trouble
from rlhfless_ray.first_speed import ExpectedEngine
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import EngineStep, Prompt, Sample

T = TypeVar("T")
THIN = 0.005  # points of the frontier differ by at least this share
AROUND_S = 0.03  # seed: what a rollout takes besides decoding (weights, calls, answers)
OUTSIDE_S = 0.03  # seed: what a step takes outside rollout, scoring and the update
RETAKE_S = 0.8  # taking a released slot again, at worst (Ray's retry tick)
LEAST_SECOND = 1e-3  # slot-seconds: even to a run that minds cost only, a second is worth something
LATER = 3.0  # times as long as gaps lasted that were worth keeping processes warm for: a step that takes longer is no new habit
SHOWN = 24  # points of the frontier that go into metrics and report


@dataclass(frozen=True)
class RolloutPlan:
    """A step's decision, the plan behind it, and what there was to choose from (empty: nothing was, see the reason)."""

    decision: Decision
    actors: int
    frontier: tuple[Plan, ...] = ()
    predicted_s: float = 0.0  # of the whole phase: loading weights and talking to engines included
    predicted_slot_s: float = 0.0  # of the leases it holds, those that wait for the next phase included
    predicted_step_s: float = 0.0  # scoring, learning and all else with it

    @property
    def reason(self) -> str:
        return self.decision.reason

    def shares(self, engines: int, expected: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
        """Which sequences each of `engines` engines gets: the plan's groups, or those of the frontier's largest plan that
        fits when fewer engines could be had; whole prompts by expected tokens where no plan has groups for them."""
        fitting = [plan for plan in (self.decision.plan, *self.frontier) if plan is not None and plan.actors <= engines]
        if self.decision.plan in fitting[:1]:
            return list(fitting[0].groups)
        best = max(fitting, key=lambda plan: plan.actors, default=None)
        return list(best.groups) if best is not None else deal(expected, groups, engines)

    def metrics(self) -> dict[str, Any]:
        points = self.frontier[:: -(-len(self.frontier) // SHOWN)] if self.frontier else ()
        return {
            "plan/actors": self.actors, "pool/decision": self.decision.action, "pool/reason": self.reason,
            "plan/rollout_s": self.predicted_s, "plan/cost_slot_s": self.predicted_slot_s,
            "plan/step_s": self.predicted_step_s, "plan/failed": failed(self.decision),
            "plan/frontier_time_s": [plan.time_s for plan in points], "plan/frontier_cost_slot_s": [p.cost for p in points],
            "plan/frontier_actors": [plan.actors for plan in points],
        }


class Autoscaler:
    """Forecasts, plans, and learns from what happened. Its state survives a resume."""

    def __init__(self, recipe: Recipe, first_speed: Speed) -> None:
        self.recipe = recipe
        self.samples = recipe.rollout.samples_per_prompt
        most = recipe.rollout.max_tokens if not recipe.agent.path else None  # several turns have no limit of their own
        self.forecaster = LengthForecaster(recipe.rollout.max_tokens / 2, max_tokens=most)
        self.speed, self.capacity = SpeedFit(first_speed), math.inf
        self.objective = _objective(recipe)
        self.terms, self.around, self.outside = Terms(), Term(AROUND_S), Term(OUTSIDE_S)
        self.learner = LearnerSize(recipe.learner.max_slots_per_rank)
        self.learner_slots = recipe.learner.max_slots_per_rank  # of each rank, in the next update as far as is known
        self.history = ResizeHistory()
        self.second = 1.0  # what a second of the step is worth, in slot-seconds
        self.actors = 0  # engines of the last step
        self.last: Decision | None = None
        self.update_s = 0.0  # of the last update
        self.passes_s = 0.0  # before it
        self.unlearned: list[list[EngineStep]] = []  # step records of rollouts that no plan has been made after yet
        self.troubles: list[str] = []  # since they were last told

    def expect(self, engine: ExpectedEngine) -> None:
        """What an engine is like as far as it can be told before one has run."""
        self.speed = SpeedFit(engine.speed)
        self.capacity = engine.capacity or math.inf

    def forecast(self, prompts: list[Prompt], step: int) -> Scenarios:
        """Joint draws of the lengths of every response to `prompts`, siblings side by side."""
        rows, tokens = _asked(prompts)
        draws = self.recipe.objective.scenarios
        return self.safely(
            "the forecast", lambda: self.forecaster.predict(rows, tokens, self.samples).draw(draws, step),
            lambda: Scenarios.of_matrix(np.full((len(prompts) * self.samples, draws), self.forecaster.default_tokens)),
        )

    def expected(self, prompts: list[Prompt]) -> np.ndarray:
        """(prompts,) expected tokens of one response to each."""
        rows, tokens = _asked(prompts)
        return self.safely(
            "the forecast", lambda: self.forecaster.forecast(rows, tokens),
            lambda: np.full(len(prompts), self.forecaster.default_tokens),
        )

    def safely(self, what: str, make: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """What concerns only planning must not end a run: it goes on with `otherwise`, and `troubles` is told to the user."""
        try:
            return make()
        except Exception as error:
            told = trouble(what, error)
            if told not in self.troubles:  # some of it is asked for many times a step
                self.troubles.append(told)
            return otherwise()

    def plan(self, scenarios: Scenarios, prompts: list[Prompt], max_actors: int, *, step: int, warm: int) -> RolloutPlan:
        """How many engines, and which sequences each gets. `warm`: processes that could start without a cold start."""
        if not self.recipe.functions.elastic:
            return RolloutPlan(Hold(max_actors, "functions.elastic is off: all engines, always"), max_actors)
        self.learn()
        least = self.recipe.rollout.min_actors
        plans: list[Plan] = []

        def make() -> Decision:
            plans.extend(self._frontier(scenarios.lengths, prompts, max_actors))
            return self._decide(plans, step, warm)

        decision = safe_decide(self.last, make, fallback=min(max(self.actors, least), max_actors))
        if not failed(decision):
            self.last = decision
        predicted = self.safely(
            "predicting the step", lambda: self._predict_step(decision, scenarios.lengths, prompts, warm), lambda: (0.0, 0.0, 0.0)
        )
        return RolloutPlan(decision, max(least, decision.actors), tuple(plans), *predicted)

    def _predict_step(
        self, decision: Decision, lengths: np.ndarray, prompts: list[Prompt], warm: int
    ) -> tuple[float, float, float]:
        """Seconds of the rollout phase, slot-seconds of its leases, seconds of the whole step."""
        start_s = self.terms.cold_start.predict() if decision.actors > warm else 0.0
        phase_s, slot_s = self._predict(decision, lengths, self._prompt_tokens(prompts), start_s)
        tokens = float(lengths.mean(1).sum())
        learn_s = self.learner.predict(self.learner_slots, tokens)
        if self.terms.passes.records:  # else there are none, or none yet
            learn_s += self.terms.passes.predict(tokens)
        return phase_s, slot_s, phase_s + self.terms.score.predict(len(lengths)) + learn_s + self.outside.predict()

    def size_learner(self, samples: list[Sample]) -> Decision:
        """Slots that each rank is given for the update on `samples`."""
        if not self.recipe.functions.elastic:
            return Hold(self.recipe.learner.max_slots_per_rank, "functions.elastic is off: all slots, always")
        decision = self.safely(
            "sizing the learner",
            lambda: self.learner.decide(self.learner_slots, float(response_tokens(samples).sum()), second=self.second),
            lambda: Hold(self.learner_slots, "as before: sizing the learner failed"),
        )
        self.learner_slots = decision.actors
        return decision

    def observe_update(self, slots: int, samples: list[Sample], seconds: float) -> None:
        """`slots`: of each rank."""
        self.update_s = seconds
        self.learner.observe(slots, float(response_tokens(samples).sum()), seconds)

    def observe_passes(self, samples: list[Sample], seconds: float) -> None:
        """What the learn phase took before that update: passes that were not made ahead, and the critic's update."""
        self.passes_s = seconds
        self.terms.passes.observe(float(response_tokens(samples).sum()), seconds)

    def _predict(
        self, decision: Decision, lengths: np.ndarray, prompt_tokens: np.ndarray, before_s: float
    ) -> tuple[float, float]:
        """Seconds of the rollout phase and slot-seconds of its leases: the plan's, with what surrounds decoding, and with
        slots held for the learner where that is cheaper than to take them again."""
        around, slower = self.around.predict() + before_s, 1 + self.speed.overhead
        phase_s = decision.time_s * slower + around
        if decision.plan is None:
            return phase_s, decision.actors * phase_s
        speed, slot_s = self.engine_speed, 0.0
        for group in decision.plan.groups:
            own_s = speed.rollout_s(lengths[group].astype(float), prompt_tokens[group]) * slower + around
            tail_s = max(0.0, phase_s - own_s)
            held = self.drained(tail_s, decision.actors <= self.learner_slots * self.recipe.learner.ranks).action == "Hold"
            slot_s += phase_s if held else min(own_s, phase_s)
        return phase_s, slot_s

    def drained(self, tail_s: float, needed_next: bool) -> Decision:
        """An engine has nothing left to do and others will work for `tail_s` more: what becomes of its lease?"""
        if not needed_next:
            return Release(0, "the next phase does not need the slot")
        return self.safely(
            "weighing an idle slot", lambda: hold_slot(tail_s, 1.0, start_cost(RETAKE_S, 1.0, self.second)),
            lambda: Release(0, "weighing it failed"),
        )

    def keep_warm_s(self, gaps_s: Sequence[float], hold_price: float) -> float:
        """For how long a parked process is worth keeping. `gaps_s`: for how long such processes lay idle before; `hold_price`: what
        it costs meanwhile, as a share of a slot's price."""
        def weigh() -> float:
            start = start_cost(self.terms.cold_start.predict(), 1.0, self.second)
            decision = keep_alive(gaps_s, hold_price, start)
            return LATER * decision.keep_s if isinstance(decision, Park) else 0.0

        return self.safely("weighing parked processes", weigh, lambda: 0.0)

    def prewarm_now(self, phase_left_s: float, start_s: float, hold_price: float) -> bool:
        """Whether it is time to start the process that the next phase needs."""
        spread = self.speed.spread * phase_left_s
        return self.safely(
            "timing a start ahead",
            lambda: prewarm(phase_left_s, spread, start_s, 0.5 * start_s, hold_price, self.second).at_s <= 0, lambda: False,
        )

    def _frontier(self, lengths: np.ndarray, prompts: list[Prompt], max_actors: int) -> list[Plan]:
        """lengths (n,) known or (n, S) scenarios."""
        tokens = self._prompt_tokens(prompts)
        longest = float((lengths.reshape(len(tokens), -1).max(1) + tokens).max())  # an engine takes every sequence by itself
        capacity = math.ceil(max(self.capacity, longest)) if math.isfinite(self.capacity) else None
        return frontier(lengths, self.engine_speed, max_actors=max_actors, prompts=tokens, capacity=capacity, thin=THIN)

    @property
    def engine_speed(self) -> Speed:
        """Fitted to decode steps, with what a prompt token takes before them."""
        return replace(self.speed.speed, prefill_s=self.terms.prefill.per_unit_s)

    def _prompt_tokens(self, prompts: list[Prompt]) -> np.ndarray:
        """(samples,) prompt tokens of every response."""
        return np.repeat([len(p.token_ids) for p in prompts], self.samples).astype(float)

    def _decide(self, plans: list[Plan], step: int, warm: int) -> Decision:
        felt = self._felt(plans)
        choice = choose_nearest(felt, self.objective)
        chosen = plans[choice.index]
        self.second = max(time_value(self.objective, plans), LEAST_SECOND)
        self.history = self.history.saw(step, chosen.actors)
        best = plan_of_current(felt, self.actors, self.objective) if self.actors else None
        stay = next((plan for plan, as_felt in zip(plans, felt, strict=True) if as_felt is best), None)
        start = self.terms.warm_start if chosen.actors <= warm else self.terms.cold_start
        decision = decide(
            self.actors, chosen, stay, step=step, history=self.history, second=self.second,
            transition=Transition(start.predict(), return_s=self.terms.warm_start.predict()),
            steps_left=self.recipe.run.steps - step + 1, gamma=self.recipe.objective.payback,
        )
        if decision.plan is chosen:
            return replace(decision, reason=f"{choice.reason}; {decision.reason}")
        return decision

    def _felt(self, plans: list[Plan]) -> list[Plan]:
        """The plans as an objective in seconds or slot-seconds means them: with what surrounds decoding, which a deadline or a
        budget covers too."""
        if self.objective.deadline_s is None and self.objective.budget is None:
            return plans
        around, slower = self.around.predict(), 1 + self.speed.overhead
        return [
            replace(plan, time_s=plan.time_s * slower + around, cost=plan.cost * slower + around * plan.actors) for plan in plans
        ]

    # ---- learning from what happened -----------------------------------------------------------------------------

    def observe_rollout(self, steps: list[EngineStep], around_s: float | None) -> None:
        """The engines' step records of a rollout, and what it took besides the longest engine's steps (None: a cold start)."""
        if around_s is not None:
            self.around.observe(0.0, around_s)
        self.unlearned.append(steps)

    def learn(self) -> None:
        """Fit the speed to what the engines told since. Takes some milliseconds: to be called where nobody waits."""
        while self.unlearned:
            self._learn(self.unlearned.pop(0))

    def settle(self) -> None:
        """Fit what was observed: whoever asks for a time next need not wait for it."""
        for one in (*vars(self.terms).values(), self.around, self.outside, self.learner):
            self.safely("fitting what was observed", one.settle, lambda: None)

    def _learn(self, steps: list[EngineStep]) -> None:
        running, new = np.array([s.running for s in steps]), np.array([s.new_tokens for s in steps])
        seconds = np.array([s.seconds for s in steps])
        context, prefill = np.array([s.context_tokens for s in steps]), new > running
        self.safely("fitting the speed", lambda: self.speed.observe(running, seconds, context, new), lambda: None)
        self.terms.prefill.observe(new[prefill], seconds[prefill])

    def observe_load(self, weight_bytes: int, seconds: float, away: bool = False) -> None:
        """An engine took a weight version, from the learner's node or on it."""
        (self.terms.transfer_away if away else self.terms.transfer).observe(float(weight_bytes), seconds)

    def around_s(self, weight_bytes: int, away: bool, lacks_weights: bool) -> float:
        """What an engine takes before it decodes, and its slot after that until the learner has it: `away`, on another node than
        the learner's, weights come over the network, and the learner has to ask for a slot of its own node."""
        transfer = self.terms.transfer_away if away else self.terms.transfer
        return (transfer.predict(float(weight_bytes)) if lacks_weights else 0.0) + (RETAKE_S if away else 0.0)

    def work_s(self, lengths: np.ndarray, prompt_tokens: np.ndarray) -> float:
        """For how long one engine decodes these; lengths (n, S) draws, prompt_tokens (n,)."""
        return self.engine_speed.rollout_s(lengths.astype(float), prompt_tokens.astype(float))

    def observe_step(self, phases: dict[str, float], wall_s: float, samples: int) -> None:
        """Where a finished step's wall time went, evaluation apart. The gangs' own time comes by `observe_update` and
        `observe_passes`."""
        self.terms.score.observe(float(samples), phases.get("score", 0.0))
        known = sum(phases.get(name, 0.0) for name in ("prefill", "rollout", "score", "eval"))
        self.outside.observe(0.0, wall_s - known - self.update_s - self.passes_s)

    def observe_samples(self, prompts: list[Prompt], samples: list[Sample]) -> None:
        lengths = response_tokens(samples).reshape(len(prompts), self.samples)
        rows, tokens = _asked(prompts)
        self.safely("learning from lengths", lambda: self.forecaster.observe(rows, tokens, list(lengths)), lambda: None)

    def quality(self, scenarios: Scenarios, samples: list[Sample], prompts: list[Prompt], max_actors: int) -> dict[str, Any]:
        """How good the step's forecast was, what the same objective would have chosen with the true lengths, and what no
        plan could have beaten."""
        self.learn()
        row = {"pool/rollout_actors": self.actors}
        return row | self.safely(
            "judging the plan", lambda: self._quality(scenarios, samples, prompts, max_actors), lambda: {}
        )

    def _quality(
        self, scenarios: Scenarios, samples: list[Sample], prompts: list[Prompt], max_actors: int
    ) -> dict[str, Any]:
        lengths = response_tokens(samples)
        found = asdict(forecast_quality(scenarios.lengths, lengths))
        row = {f"forecast/{name}": value for name, value in found.items() if name not in ("responses", "pit_deciles")}
        known = self._frontier(lengths, prompts, max_actors)
        best = choose_nearest(known, self.objective).plan
        bounds = rollout_bounds(lengths, self.engine_speed, max_actors, prompts=self._prompt_tokens(prompts))
        return row | {
            "plan/clairvoyant_s": best.time_s, "plan/clairvoyant_cost_slot_s": best.cost,
            "plan/bound_s": bounds.time_s, "plan/bound_cost_slot_s": bounds.cost, "plan/speed_spread": self.speed.spread,
        }

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        self.learn()
        return {
            "forecaster": self.forecaster.state(), "speed": self.speed.state(), "actors": self.actors,
            "terms": self.terms.state(), "history": asdict(self.history),
            "second": self.second, "around": self.around.state(), "outside": self.outside.state(),
            "learner": self.learner.state(), "learner_slots": self.learner_slots,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.forecaster.restore(state["forecaster"])
        self.speed.restore(state["speed"])
        self.actors = state["actors"]
        self.terms.restore(state["terms"])
        self.history = ResizeHistory(**state["history"])
        self.second = state["second"]
        self.around.restore(state["around"])
        self.outside.restore(state["outside"])
        self.learner.restore(state["learner"])
        self.learner_slots = state["learner_slots"]


def _asked(prompts: list[Prompt]) -> tuple[list[int], list[int]]:
    """(prompts,) rows and tokens: what the forecaster knows prompts by."""
    return [p.index for p in prompts], [len(p.token_ids) for p in prompts]


def response_tokens(samples: list[Sample]) -> np.ndarray:
    """(samples,) tokens of each response that were generated; 1 for an agent's sample that failed before its first."""
    return np.array([max(1, sample.written_tokens) for sample in samples], float)


def _objective(recipe: Recipe) -> Objective:
    goal = recipe.objective
    if goal.knee or goal.deadline_s or goal.budget:
        return Objective(deadline_s=goal.deadline_s, budget=goal.budget, knee=goal.knee)
    return Objective(prefer=goal.prefer)
