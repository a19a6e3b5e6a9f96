"""Predict a step by its plan, and weigh slots and processes that have no work meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

import numpy as np

from placement.measurements.correction import Correction
from placement.measurements.trial import Trial
from placement.scaling.keep_warm import Prewarm, hold_slot, keep_alive, prewarm, start_cost
from placement.scaling.overlapped_step import Update
from placement.scaling.resize_policy import Decision, Park, Release
from rlhfless_ray.autoscaler.criteria import Criteria
from rlhfless_ray.autoscaler.predictor import REGRANT_S, Predictor
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.step.rollout_plan import Prediction, RolloutPlan
from rlhfless_ray.types import Prompt

INTERVAL = 0.9  # share of measurements that a prediction's interval should hold
CAUSE_SHARE = 0.2  # of a step's time or of a response's tokens from which something explains a wrong forecast
BUSY = 1.5  # threads that want to run, for each core, from which a machine is busy with other programs
ONE_SIGMA = 0.6827  # share of a normal distribution within a standard deviation
MIN_LEFT_S = 1e-3
KEEP_WARM_FACTOR = 3.0  # processes are kept this many times the planned time, so that a single slow step does not end them


class StepPredictor:
    """Predict what a plan takes. Slots count as held where that is cheaper than to release them and request them again."""

    def __init__(self, predictor: Predictor, criteria: Criteria) -> None:
        self.predictor, self.criteria = predictor, criteria
        self.correction = 1.0  # factor on the rollout times that the models predict, for the plans of one step
        self.newest_s = 0.0  # the newest rollout time that they predicted
        self.tried: dict[str, bool] = {}  # measures on trial that this step wanted → whether it takes them
        self.tried_ahead: dict[str, bool] = {}  # the same of the step after it

    def correct_rollout(self) -> float:
        """Return the factor on predicted rollout times. One for all plans of a step, so that it changes no order among them."""
        return self.predictor.terms.rollout.factor(self.newest_s) if self.newest_s else 1.0

    def predict_step(
        self, decision: Decision, lengths: np.ndarray, prompts: list[Prompt], warm: int, update: Update | None
    ) -> tuple[Prediction, Prediction, Prediction]:
        """Predict seconds of the rollout phase, slot-seconds of its leases, and seconds of the whole step."""
        start_s = self.predictor.terms.cold_start.predict() if decision.actors > warm else 0.0
        phase_s, slot_s = self._predict_phase(decision, lengths, self.predictor.prompt_tokens(prompts), start_s, update)
        step_s = self._step_s(phase_s, lengths, update)
        self.newest_s = (phase_s - start_s) / self.correction
        by_model_s = self.newest_s + start_s
        rollout = Prediction(by_model_s, phase_s, *self.predictor.terms.rollout.interval(by_model_s, INTERVAL))
        return rollout, _corrected(self.predictor.terms.cost, slot_s), _corrected(self.predictor.terms.step, step_s)

    def takes(self, measure: Literal["moves", "early_wake"], *, ahead: bool = False) -> bool:
        """Decide whether a step that wants this measure takes it: whether it pays is on trial in every run.

        Steps beside an update overlap with others, so they cannot be compared. They take what the planner wants. `ahead`: the measure is
        for the next step, and is taken while this one's update works.
        """
        if self.predictor.recipe.rollout.rolls_out_ahead:
            return True
        tried = self.tried_ahead if ahead else self.tried
        if measure not in tried:
            trial: Trial = getattr(self.predictor.terms, measure)
            tried[measure] = self.predictor.safely("a trial", trial.decide, lambda: True)
        return tried[measure]

    def observe_plan(self, plan: RolloutPlan, row: JsonObject) -> None:
        """Compare a finished step with its plan. `row`: the step's metrics.

        A rollout beside an update is in the step before, so only the whole step is compared then. An evaluation is in no plan.
        """
        tried, self.tried, self.tried_ahead = self.tried, self.tried_ahead, {}
        if row["phase/eval_s"]:
            return
        self._observe_trials(tried, plan, row)
        if not self.predictor.recipe.rollout.rolls_out_ahead:
            self.predictor.terms.rollout.observe(plan.rollout.by_model, row["phase/rollout_s"])
            self.predictor.terms.cost.observe(plan.cost.by_model, row["cost/rollout_slot_s"])
        self.predictor.terms.step.observe(plan.step.by_model, row["step_s"])

    def accuracy(self) -> JsonObject:
        """Return metrics of how good the newest predictions of each quantity were, see `Accuracy`."""
        return {
            f"accuracy/{name}/{figure}": value
            for name, found in self.predictor.terms.accuracies().items()
            for figure, value in asdict(found).items()
        }

    def far_off(self, row: JsonObject) -> list[str]:
        """Return a sentence for each quantity whose newest forecasts were all far off, with what the step's metrics know of the cause."""
        return [f"{sentence} ({_cause(row)})" for sentence in self.predictor.terms.take_far_off()]

    def _observe_trials(self, tried: Mapping[str, bool], plan: RolloutPlan, row: JsonObject) -> None:
        """Judge the measures that the step wanted by its time and its rollout's cost, both as the objective weighs them."""
        price = 1 / self.criteria.value_per_s if self.predictor.recipe.functions.elastic else 0.0
        planned = plan.step.corrected + price * plan.cost.corrected
        if planned > 0:
            measured = row["step_s"] + price * row["cost/rollout_slot_s"]
            for measure, is_taken in tried.items():
                getattr(self.predictor.terms, measure).observe(is_taken, measured / planned)

    def _step_s(self, phase_s: float, lengths: np.ndarray, update: Update | None) -> float:
        tokens = float(lengths.mean(1).sum())
        apart_s, update_s = (
            self.predictor.apart_s(tokens, len(lengths)),
            self.predictor.learner.predict(self.predictor.learner_slots, tokens),
        )
        if update is not None and (rest_s := update.rest_s(phase_s)) is not None:
            return apart_s + update.seconds + rest_s
        is_beside = self.predictor.recipe.rollout.rolls_out_ahead and (update is not None or self.predictor.recipe.rollout.partial == "off")
        return apart_s + (max(phase_s, update_s) if is_beside else phase_s + update_s)

    def _predict_phase(
        self, decision: Decision, lengths: np.ndarray, prompt_tokens: np.ndarray, before_s: float, update: Update | None
    ) -> tuple[float, float]:
        """Return seconds of the rollout phase and slot-seconds of its leases, including overhead besides decoding.

        Slots are counted as held for the next phase that needs them if that is cheaper than releasing and requesting them again.
        """
        overhead_s = (
            self.correction * self.predictor.terms.around.predict() + before_s
        )  # of each engine; the plan has it and the slowdown too
        slowdown = self.correction * (1 + self.predictor.engines.fit.overhead)
        phase_s = decision.time_s + before_s
        if decision.plan is None:
            return phase_s, self.predictor.engines.width * decision.actors * phase_s
        speed, slot_s = self.predictor.engine_speed, 0.0
        needed_next = self.predictor.engines.width * decision.actors <= self.predictor.learner_slots * self.predictor.ranks
        for group in decision.plan.groups:
            own_s = speed.rollout_s(lengths[group].astype(float), prompt_tokens[group]) * slowdown + overhead_s
            tail_s = max(0.0, phase_s - own_s)
            if update is None:
                held = self.drained(tail_s, needed_next).action == "Hold"
            else:
                apart_s = update.apart_s if update.rest is None else 0.0  # a partial rollout goes on as soon as the update has ended
                held = self.hold_idle(max(phase_s, update.seconds) - own_s + apart_s).action == "Hold"
            slot_s += self.predictor.engines.width * (phase_s if held else min(own_s, phase_s))
        return phase_s, slot_s

    def drained(self, tail_s: float, needed_next: bool) -> Decision:
        """Decide about the lease of an idle engine while others work for `tail_s` more seconds."""
        return self.hold_idle(tail_s) if needed_next else Release(0, "the next phase does not need the slot")

    def hold_idle(self, seconds: float) -> Decision:
        """Decide whether to hold a lease that is needed again in so many seconds."""
        return self.predictor.safely(
            "weighing an idle slot",
            lambda: hold_slot(seconds, 1.0, start_cost(REGRANT_S, 1.0, self.criteria.value_per_s)),
            lambda: Release(0, "weighing the idle slot failed"),
        )

    def keep_warm_s(self, gaps_s: Sequence[float], hold_price: float) -> float:
        """Return how many seconds to keep a parked process.

        `gaps_s`: durations for which such processes were idle so far. `hold_price`: cost of keeping it, as a share of a slot's
        price.
        """

        def weigh() -> float:
            start = start_cost(self.predictor.terms.cold_start.predict(), self.predictor.engines.width, self.criteria.value_per_s)
            decision = keep_alive(gaps_s, hold_price, start)
            return KEEP_WARM_FACTOR * decision.keep_s if isinstance(decision, Park) else 0.0

        return self.predictor.safely("weighing parked processes", weigh, lambda: 0.0)

    def prewarm_now(self, phase_left_s: float, start_s: float, hold_price: float) -> bool:
        """Return whether to start the process of the next phase now."""
        spread = self.predictor.engines.fit.spread * phase_left_s
        return self.predictor.safely(
            "timing a start ahead",
            lambda: prewarm(phase_left_s, spread, start_s, 0.5 * start_s, hold_price, self.criteria.value_per_s).at_s <= 0,
            lambda: False,
        )

    def time_wake(self, update_left_s: float, slots: int) -> Prewarm | None:
        """Decide when engines wake on so many free slots, for a rollout that begins when the update ends. Returns None after a failure."""
        wake_s = self.predictor.terms.warm_start.predict()

        def weigh() -> Prewarm:
            left_s = max(update_left_s, MIN_LEFT_S)
            low_s, high_s = self.predictor.terms.step.interval(left_s, ONE_SIGMA)  # steps vary by about as much as their updates
            return prewarm(update_left_s, (high_s - low_s) / 2, wake_s, 0.5 * wake_s, slots, self.criteria.value_per_s)

        return self.predictor.safely("timing a wake", weigh, lambda: None)


def _cause(row: JsonObject) -> str:
    """Say why a step went otherwise than forecast, as far as its metrics tell."""
    step_s, tokens = row["step_s"], row.get("length/mean") or 0.0
    if row.get("faults/replaced"):
        return "processes were lost and replaced"
    if row.get("phase/lease_s", 0.0) > CAUSE_SHARE * step_s:
        return f"the step waited {row['phase/lease_s']:.3g} s for slots"
    if abs(bias := row.get("forecast/bias_tokens") or 0.0) > CAUSE_SHARE * tokens:
        return f"responses had {tokens:.4g} tokens on average, and {tokens + bias:.4g} were forecast: the policy's lengths change"
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        return f"other programs may slow this machine: {load:.2g} threads want to run on {cores} cores"
    return "the cause is not known"


def _corrected(correction: Correction, by_model: float) -> Prediction:
    return Prediction(by_model, correction.correct(by_model), *correction.interval(by_model, INTERVAL))
