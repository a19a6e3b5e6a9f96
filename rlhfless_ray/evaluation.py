"""Exact accuracy (mean reward) on the held-out prompts, one response each, sampled and greedy."""

from __future__ import annotations

import numpy as np

from rlhfless_ray.reward.stage import ScoreStage
from rlhfless_ray.rollout.stage import RolloutStage
from rlhfless_ray.types import Prompt, Sample, WeightVersion


def evaluate(
    rollout: RolloutStage, scoring: ScoreStage, prompts: list[Prompt], weights: WeightVersion, step: int
) -> dict[str, float]:
    """{metric: value}; empty without held-out prompts."""
    if not prompts:
        return {}
    recipe = rollout.site.recipe
    temperatures = {"sampled": recipe.rollout.temperature}
    if recipe.evaluate.greedy:
        temperatures["greedy"] = 0.0
    with rollout.site.phases.phase("eval", "evaluating"):
        samples = rollout.answer(prompts, list(temperatures.values()), weights)
        with scoring.phase("eval_score"):  # its time is part of the evaluation's
            scoring.score(samples, step, "evaluation")
    return accuracies(samples, list(temperatures))


def accuracies(samples: list[Sample], names: list[str]) -> dict[str, float]:
    """`samples`: of one temperature after the other, `names` theirs. A temperature without any reward has no accuracy."""
    found = {"eval/length_mean": float(np.mean([len(s.completion.token_ids) for s in samples]))}
    size = len(samples) // len(names)
    for k, name in enumerate(names):
        if rewards := [s.reward for s in samples[k * size : (k + 1) * size] if s.reward is not None]:
            found[f"eval/accuracy_{name}"] = float(np.mean(rewards))
    return found
