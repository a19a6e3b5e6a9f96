"""Forecast response lengths and times from a run's measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from placement.forecast.forecaster import LengthForecaster, Scenarios
from placement.measurements.registry import Measurements
from placement.scaling.engine_width import slots
from placement.scaling.learner_ranks import LearnerRanks, RestOfStep
from placement.scaling.learner_size import LearnerSize
from placement.scaling.overlapped_step import Rest, Update
from placement.speed.decode_speed import Speed, SpeedFit
from rlhfless_ray.autoscaler.engine_speeds import EngineSpeeds
from rlhfless_ray.common.errors import describe_failure
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Prompt, Sample

T = TypeVar("T")
REGRANT_S = 0.8  # time to get a released slot back, at worst (Ray's retry interval)


class Predictor:
    """Forecast lengths, and fit models of time to measurements. Its state survives a resume."""

    def __init__(self, recipe: Recipe, first_speed: Speed) -> None:
        self.recipe = recipe
        self.samples = recipe.rollout.samples_per_prompt
        self.engines = EngineSpeeds(recipe.rollout.least_width, first_speed)
        limit = recipe.rollout.max_tokens if not recipe.agent.is_used else None  # multi-turn responses have no limit
        self.forecaster = LengthForecaster(recipe.rollout.max_tokens / 2, max_tokens=limit)
        self.terms = Measurements()
        self.learners = LearnerRanks([recipe.learner.ranks], recipe.learner.max_slots_per_rank, fixed=recipe.run.exact)
        self.terms.include(lambda: {f"update on {slots(count)}": term for count, term in self.learner.terms.items()})
        self.learner_slots = recipe.learner.max_slots_per_rank  # slots per rank in the newest update, or the next one if it is sized
        self.update_tokens = 0.0  # tokens of the newest update
        self.update_s = 0.0  # duration of the last update
        self.passes_s = 0.0  # duration of the passes before it
        self.step_s = 0.0  # duration of the last step, without evaluation
        self.calls_took = 0.0, 0.0  # seconds and slot-seconds of the calls of the last learn phase
        self.beside_calls = 0.0  # slots that other functions held meanwhile
        self.rest_of_step = RestOfStep()  # besides these calls, of the last step without an evaluation
        self.tokens_per_step = 1.0  # tokens of a sequence in an engine step of the last rollout: more than one with drafts
        self.pending_steps: list[EngineSteps] = []  # step records that the speed is not fitted to yet
        self.pending_of_pools: list[tuple[str, EngineSteps]] = []  # the same by pool of nodes
        self.troubles: list[str] = []  # failures since the last report

    @property
    def ranks(self) -> int:
        """Number of the learner's ranks."""
        return self.learners.current

    @property
    def learner(self) -> LearnerSize:
        """Slots of each of them, and the times of their updates."""
        return self.learners.size

    def safely(self, what: str, make: Callable[[], T], fallback: Callable[[], T]) -> T:
        """Return `make()`, or `fallback()` after an exception, which is added to `troubles`: planning must not end a run."""
        try:
            return make()
        except Exception as error:
            message = describe_failure(what, error)
            if message not in self.troubles:  # some calls are repeated many times per step
                self.troubles.append(message)
            return fallback()

    def forecast(self, prompts: list[Prompt], step: int) -> Scenarios:
        """Draw joint lengths of all responses to `prompts`; those of one prompt are adjacent."""
        rows, tokens = _prompt_features(prompts)
        draws = self.recipe.objective.scenarios
        return self.safely(
            "the forecast",
            lambda: self.forecaster.predict(rows, tokens, self.samples).draw(draws, step),
            lambda: Scenarios.from_matrix(np.full((len(prompts) * self.samples, draws), self.forecaster.default_tokens)),
        )

    def expected(self, prompts: list[Prompt]) -> np.ndarray:
        """Return (prompts,) expected tokens of one response to each prompt."""
        rows, tokens = _prompt_features(prompts)
        return self.safely(
            "the forecast", lambda: self.forecaster.forecast(rows, tokens), lambda: np.full(len(prompts), self.forecaster.default_tokens)
        )

    def prompt_tokens(self, prompts: list[Prompt]) -> np.ndarray:
        """Return (samples,) prompt tokens of every response."""
        return np.repeat([len(p.token_ids) for p in prompts], self.samples).astype(float)

    @property
    def engine_speed(self) -> Speed:
        """Speed fitted to decode steps, with the prefill time of a prompt token."""
        return self.speed_of(self.engines.width)

    def speed_of(self, width: int) -> Speed:
        """Return the speed of engines of a width, with the prefill time of a prompt token."""
        return replace(self.engines.fit_of(width).speed, prefill_s=self.terms.prefill.per_unit_s)

    def work_s(self, lengths: np.ndarray, prompt_tokens: np.ndarray) -> float:
        """Return the seconds in which one engine decodes n responses. `lengths`: (n, S) draws in tokens; `prompt_tokens`: (n,)."""
        return self.engine_speed.rollout_s(lengths.astype(float), prompt_tokens.astype(float))

    def overhead_s(self, weight_bytes: int, away: bool, lacks_weights: bool) -> float:
        """Return the seconds that an engine holds its slot without decoding, until the learner has the slot.

        `away`: the engine is not on the learner's node. Weights then come over the network, and the learner has to request
        another slot on its own node.
        """
        transfer = self.terms.transfer_away if away else self.terms.transfer
        return (transfer.predict(float(weight_bytes)) if lacks_weights else 0.0) + (REGRANT_S if away else 0.0)

    def update_beside(self, learner_slots: int, lengths: np.ndarray, rest: Rest | None) -> Update | None:
        """Return the update beside a rollout of these lengths, or None if there is none or no update was measured yet.

        `rest`: where the rollout goes on after it.
        """
        if not learner_slots or not self.learner.is_measured:
            return None
        return self.update_of(self.learner_slots, learner_slots, self.update_tokens, lengths, rest)

    def update_of(self, per_rank: int, learner_slots: int, tokens: float, lengths: np.ndarray, rest: Rest | None) -> Update:
        """Return the update on so many tokens with `per_rank` slots a rank, beside a rollout of these lengths."""
        apart_s = self.apart_s(float(lengths.mean(1).sum()), len(lengths))
        return Update(learner_slots, self.learner.predict(per_rank, tokens), apart_s, rest)

    def apart_s(self, tokens: float, samples: int) -> float:
        """Return the seconds of a step besides its rollout and its update."""
        parts = lambda: self._passes_s(tokens) + self.terms.score.predict(samples) + self.terms.outside.predict()  # noqa: E731
        return self.safely("predicting the step", parts, lambda: 0.0)

    def _passes_s(self, tokens: float) -> float:
        return self.terms.passes.predict(tokens) if self.terms.passes.records else 0.0

    def predict_learn_s(self, tokens: float) -> float:
        """Return the seconds of the learn phase for so many generated tokens."""
        return self.learner.predict(self.learner_slots, tokens) + self._passes_s(tokens)

    @property
    def expected_update_s(self) -> float:
        """Predicted seconds of the newest update; 0 before the first measurement."""
        if not self.learner.is_measured:
            return 0.0
        return self.safely("predicting the update", lambda: self.learner.predict(self.learner_slots, self.update_tokens), lambda: 0.0)

    # ---- learning from what happened -----------------------------------------------------------------------------

    def observe_rollout(self, steps: EngineSteps, overhead_s: float | None) -> None:
        """Record a rollout's engine steps, and its time besides the longest engine's steps (None after a cold start)."""
        if overhead_s is not None:
            self.terms.around.observe(0.0, overhead_s)
        self.pending_steps.append(steps)
        if drawn := float(steps.column("running").sum()):
            self.tokens_per_step = 1 + float(steps.column("accepted").sum()) / drawn

    def observe_pool(self, pool: str, steps: EngineSteps) -> None:
        """Record the engine steps of one pool of nodes, which `observe_rollout` has recorded too."""
        self.pending_of_pools.append((pool, steps))

    def observe_load(self, weight_bytes: int, seconds: float, away: bool = False) -> None:
        """Record an engine's load of a weight version. `away`: the engine is not on the learner's node."""
        (self.terms.transfer_away if away else self.terms.transfer).observe(float(weight_bytes), seconds)

    def observe_step(self, phases: dict[str, float], wall_s: float, samples: int, slot_s: float = 0.0) -> None:
        """Record a finished step: seconds by phase, `wall_s` with all of them, evaluation included, and slot-seconds of all holders.

        `observe_update` and `observe_passes` record the worker groups' own times.
        """
        self.step_s = wall_s - phases.get("eval", 0.0)
        if self.step_s == wall_s:
            calls_s, calls_slot_s = self.calls_took
            rest_slot_s = slot_s - calls_slot_s - self.beside_calls * calls_s
            self.rest_of_step = RestOfStep(max(0.0, wall_s - calls_s), max(0.0, rest_slot_s), self.beside_calls)
        self.terms.score.observe(float(samples), phases.get("score", 0.0))
        if self.recipe.rollout.rolls_out_ahead:  # the learn phase includes the next step's prefill and rollout
            self.terms.outside.observe(0.0, wall_s - sum(phases.get(name, 0.0) for name in ("rollout", "score", "learn", "eval")))
            return
        known = sum(phases.get(name, 0.0) for name in ("prefill", "rollout", "score", "eval"))
        self.terms.outside.observe(0.0, wall_s - known - self.update_s - self.passes_s)

    def observe_update(self, slots: int, samples: Sequence[Sample], seconds: float) -> None:
        """Record an update's duration, after which other calls of the learn phase may be recorded. `slots`: per rank."""
        self.update_s, self.learner_slots, self.calls_took = seconds, slots, (seconds, self.ranks * slots * seconds)
        self.learner.observe(slots, float(response_tokens(samples).sum()), seconds)

    def observe_passes(self, samples: Sequence[Sample], seconds: float) -> None:
        """Record the duration of the learn phase before the update: passes that were not made ahead, and the critic's update."""
        self.passes_s = seconds
        self.terms.passes.observe(float(response_tokens(samples).sum()), seconds)

    def observe_samples(self, prompts: list[Prompt], samples: Sequence[Sample]) -> None:
        lengths = response_tokens(samples).reshape(len(prompts), self.samples)
        rows, tokens = _prompt_features(prompts)
        self.safely("learning from lengths", lambda: self.forecaster.observe(rows, tokens, list(lengths)), lambda: None)

    def learn(self) -> None:
        """Fit the speed to recorded engine steps. Call it where nothing waits: the 40,000 steps of 32 engines take 70 ms."""
        while self.pending_steps:
            self._learn(self.pending_steps.pop(0))
        while self.pending_of_pools:
            pool, steps = self.pending_of_pools.pop(0)
            self.safely("fitting the speed", partial(self._fit, self.engines.observe_pool(pool), steps), lambda: None)

    def _learn(self, steps: EngineSteps) -> None:
        new, seconds = steps.column("new_tokens").astype(int), steps.token_s()
        prefill = new > steps.column("running").astype(int)
        self.safely("fitting the speed", lambda: self._fit(self.engines.fit, steps), lambda: None)
        self.terms.prefill.observe(new[prefill], seconds[prefill])

    @staticmethod
    def _fit(fit: SpeedFit, steps: EngineSteps) -> None:
        running, new, context = (steps.column(name).astype(int) for name in ("running", "new_tokens", "context_tokens"))
        fit.observe(running, steps.token_s(), context, new)

    def settle(self) -> None:
        """Fit all observed times now, so that later predictions need not wait for it."""
        for settle in (self.terms.settle, self.learners.settle):
            self.safely("fitting what was observed", settle, lambda: None)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> JsonObject:
        self.learn()
        return {
            **self.engines.state(),
            "forecaster": self.forecaster.state(),
            "speed": self.engines.fit.state(),
            "speed_by_pool": {pool: fit.state() for pool, fit in self.engines.by_pool.items()},
            "terms": self.terms.state(),
            "learner_by_ranks": self.learners.state(),
            "learner_ranks": self.ranks,
            "learner_slots": self.learner_slots,
        }

    def restore(self, state: JsonObject) -> None:
        self.forecaster.restore(state["forecaster"])
        if state.get("width") in self.engines.expected:
            self.engines.restore(state)
        self.engines.fit.restore(state["speed"])
        for pool, fit in state.get("speed_by_pool", {}).items():
            self.engines.observe_pool(pool).restore(fit)
        before = {name: state[name] for name in ("around", "outside") if name in state}  # of runs before 2026-11-29
        self.terms.restore(before | state["terms"])
        self.learners.restore(state.get("learner_by_ranks") or {str(self.ranks): state["learner"]})  # of runs before 2026-11-29
        self.learner_slots = state["learner_slots"]


def _prompt_features(prompts: list[Prompt]) -> tuple[list[int], list[int]]:
    """Return (prompts,) row indices and token counts, by which the forecaster identifies prompts."""
    return [p.index for p in prompts], [len(p.token_ids) for p in prompts]


def response_tokens(samples: Sequence[Sample]) -> np.ndarray:
    """Return (samples,) generated tokens of each response; 1 for an agent's sample that failed before its first."""
    return np.array([max(1, sample.written_tokens) for sample in samples], float)
