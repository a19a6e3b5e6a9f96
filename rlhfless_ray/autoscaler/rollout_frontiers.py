"""The frontier of a step's rollout, with times and costs as the run measures them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from placement.forecast.forecaster import Scenarios, forecast_quality
from placement.forecast.quality import LengthRanks
from placement.planning.bounds import rollout_bounds
from placement.planning.frontier import frontier
from placement.planning.objective import choose_nearest
from placement.planning.partition import pareto
from placement.planning.plan import Plan, Pool
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.predictor import response_tokens
from rlhfless_ray.autoscaler.step_predictor import StepPredictor
from rlhfless_ray.types import Prompt, Sample

MIN_FRONTIER_GAP = 0.005  # relative distance between points of the frontier


class RolloutFrontiers:
    """Frontiers by a run's speeds and corrections."""

    def __init__(self, steps: StepPredictor) -> None:
        self.steps, self.predictor, self.criteria = steps, steps.predictor, steps.criteria

    def best(self, lengths: np.ndarray, prompts: list[Prompt], max_actors: int, width: int | None = None) -> list[Plan]:
        """Return the frontier's plans with their predicted time and cost, overhead besides decoding and correction included.

        `lengths`: (n,) known, or (n, S) scenarios. `width`: of the engines, if not the present one.
        """
        width = width or self.predictor.engines.width
        slowdown = self.steps.correction * (1 + self.predictor.engines.fit.overhead)
        overhead_s = self.steps.correction * self.predictor.terms.around.predict()
        return [
            replace(plan, time_s=plan.time_s * slowdown + overhead_s, cost=plan.cost * slowdown + overhead_s * plan.actors * width)
            for plan in self.plans(lengths, self.predictor.prompt_tokens(prompts), max_actors, width, self.predictor.speed_of(width))
        ]

    def plans(self, lengths: np.ndarray, tokens: np.ndarray, max_actors: int, width: int, speed: Speed) -> list[Plan]:
        """Return the frontier's plans, with the time and cost of decoding alone. `tokens`: (n,) that each sequence has before.

        On a shared pool there is always one with the fewest actors, even if it is no cheaper: it may be all that others leave. If they
        leave more, `pareto` drops it again.
        """
        longest = float((lengths.reshape(len(tokens), -1).max(1) + tokens).max())  # an engine can hold every single sequence
        holds = self.predictor.engines.capacity_of(width)
        capacity = math.ceil(max(holds, longest)) if math.isfinite(holds) else None
        pool = Pool(speed, max_actors=max_actors, capacity=capacity, devices=width)
        plans = frontier(lengths, pools=[pool], prompts=tokens, thin=MIN_FRONTIER_GAP)
        fewest = max(1, self.criteria.least)
        if self.criteria.bids is not None and min(plan.actors for plan in plans) > fewest:
            plans += frontier(lengths, pools=[replace(pool, max_actors=fewest)], prompts=tokens, thin=MIN_FRONTIER_GAP)
        return plans

    def best_engines(self, lengths: np.ndarray, tokens: np.ndarray, max_actors: int) -> int:
        """Return how many engines the objective chooses for `lengths` (n,) or (n, S). `tokens`: (n,) that each sequence has before."""
        width = self.predictor.engines.width
        plans = self.plans(np.maximum(lengths, 1.0), tokens.astype(float), max_actors, width, self.predictor.engines.fit.speed)
        return choose_nearest(plans, self.criteria.objective).plan.actors

    def judge(self, scenarios: Scenarios, samples: Sequence[Sample], prompts: list[Prompt], max_actors: int) -> dict[str, Any]:
        """Return metrics of the forecast, of the best plan for the true lengths, and of the lower bounds. Calibrates the forecaster."""
        lengths = response_tokens(samples)
        ranks = LengthRanks.of(scenarios.lengths, lengths)
        quality = asdict(forecast_quality(scenarios.lengths, lengths, ranks))
        self.predictor.terms.observe_lengths(scenarios.lengths, lengths)
        self.predictor.forecaster.calibrate(ranks)
        row = {f"forecast/{name}": value for name, value in quality.items() if name != "responses"}
        known = pareto(self.best(lengths, prompts, max_actors))
        best = choose_nearest(known, self.criteria.objective).plan
        bounds = rollout_bounds(
            lengths,
            self.predictor.engine_speed,
            max_actors,
            prompts=self.predictor.prompt_tokens(prompts),
            price=float(self.predictor.engines.width),
        )
        return row | {
            "plan/clairvoyant_s": best.time_s,
            "plan/clairvoyant_cost_slot_s": best.cost,
            "plan/bound_s": bounds.time_s,
            "plan/bound_cost_slot_s": bounds.cost,
            "plan/speed_spread": self.predictor.engines.fit.spread,
        }
