"""Choose the number of groups that are generated at once with `rollout.oversample: auto`, from the run's measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from placement.scaling.partial_rollout import Oversample, StepCosts, choose_share
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.step.step import Step

FADE = 0.8  # factor per step on the weight of earlier steps


@dataclass
class StaleCost:
    """Loss of learning value per version of lag: c in exp(-c · mean lag), fitted to the importance weights' effective sample size."""

    lost: float = 0.0
    lags: float = 0.0

    def observe(self, lag: float, effective_share: float) -> None:
        """Record a step's mean lag, and the effective share of its tokens."""
        if effective_share > 0:
            self.lost = FADE * self.lost - math.log(effective_share)
            self.lags = FADE * self.lags + lag

    @property
    def per_version(self) -> float:
        return self.lost / self.lags if self.lags > 0 else 0.0


def choose_oversample(autoscaler: Autoscaler, step: Step, stale_cost: float) -> Oversample | None:
    """Choose from the forecasts of `step`, the newest planned step. Returns None before the first measurement."""
    recipe = autoscaler.recipe
    if not autoscaler.engines.fit.records or step.forecast is None or not autoscaler.actors:
        return None
    count, lengths = recipe.rollout.samples_per_prompt, step.forecast.lengths
    groups = lengths.reshape(-1, count, lengths.shape[1]).transpose(2, 0, 1).reshape(-1, count)
    tokens = float(lengths.mean(1).sum()) * recipe.prompts.batch_prompts * count / len(lengths)
    costs = StepCosts(
        autoscaler.engines.fit.speed,
        autoscaler.actors,
        float(np.mean([len(prompt.token_ids) for prompt in step.prompts])),
        autoscaler.predictor.predict_learn_s(tokens),
        autoscaler.predictor.learner_slots * autoscaler.predictor.ranks,
        recipe.rollout.ahead,
        recipe.rollout.partial_kv == "recompute",
    )
    bound, prefer = recipe.rollout.max_lag_steps, recipe.objective.prefer
    return autoscaler.safely(
        "choosing rollout.oversample",
        lambda: choose_share(groups, recipe.prompts.batch_prompts, bound, costs, prefer, stale_cost),
        lambda: None,
    )
