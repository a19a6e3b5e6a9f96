"""Evaluate the policy: mean rewards of sampled and greedy responses, the best of several, and by data source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.types import Prompt, Sample, Scored, WeightVersion

Sampling = dict[str, tuple[float, int]]  # name → temperature, responses to each prompt


def evaluate(
    rollout: RolloutStage,
    scoring: ScoreStage,
    prompts: list[Prompt],
    weights: WeightVersion,
    step: int,
    check: Callable[[list[Sample], float], None] = lambda samples, temperature: None,
) -> dict[str, float]:
    """Evaluate on the held-out prompts. Returns {metric: value}, empty without held-out prompts.

    `check`: called with the sampled responses and their temperature before they are scored.
    """
    if not prompts:
        return {}
    recipe = rollout.context.recipe
    sampling = choose_sampling(recipe)
    with rollout.context.phases.phase("eval", "evaluating"):
        samples = rollout.answer(prompts, list(sampling.values()), weights)
        sampled = samples[: len(prompts) * recipe.evaluate.samples_per_prompt]
        check(sampled, sampling["sampled"][0])
        with scoring.phase("eval_score"):  # its time is part of the evaluation's
            scored = scoring.score(samples, step, "evaluation")
    metrics = compute_accuracies(scored, sampling)
    by_source: dict[str, list[Scored]] = {}
    for sample in scored[: len(sampled)]:
        by_source.setdefault(str(sample.prompt.row.get(recipe.evaluate.source_column, "default")), []).append(sample)
    if recipe.evaluate.path or list(by_source) != ["default"]:
        for source, part in by_source.items():
            metrics |= compute_source_metrics(source, part, recipe.evaluate.samples_per_prompt)
    return metrics


def choose_sampling(recipe: Recipe) -> Sampling:
    section = recipe.evaluate
    temperature = recipe.rollout.temperature if section.temperature is None else section.temperature
    return {"sampled": (temperature, section.samples_per_prompt), **({"greedy": (0.0, 1)} if section.greedy else {})}


def compute_accuracies(samples: list[Scored], sampling: Sampling) -> dict[str, float]:
    """Return accuracies and lengths. `samples`: by temperature, the responses to a prompt adjacent.

    Accuracies leave out responses without a reward, which `eval/failed` counts. A temperature without any reward has no accuracy.
    """
    failed = sum(sample.reward is None for sample in samples)
    metrics = {**_compute_lengths("eval", samples), "eval/samples": float(len(samples)), "eval/failed": float(failed)}
    prompts = len(samples) // sum(count for _, count in sampling.values())
    start = 0
    for name, (_, count) in sampling.items():
        part = samples[start : start + prompts * count]
        start += prompts * count
        if (rewards := compute_mean_and_best(part, count)) is not None:
            metrics[f"eval/accuracy_{name}"] = rewards[0]
            if count > 1:
                metrics[f"eval/pass{count}"] = rewards[1]
    return metrics


def compute_source_metrics(source: str, samples: list[Scored], count: int) -> dict[str, float]:
    """Return the metrics of one data source, with `count` adjacent responses to each prompt."""
    metrics = _compute_lengths(f"eval/{source}", samples)
    if (rewards := compute_mean_and_best(samples, count)) is not None:
        metrics |= dict(zip((f"eval/{source}/pass1", f"eval/{source}/pass{count}"), rewards, strict=True))
    return metrics


def _compute_lengths(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    return {
        f"{prefix}/length_mean": float(np.mean([s.written_tokens for s in samples])),
        f"{prefix}/truncated_share": float(np.mean([s.completion.finish_reason == "length" for s in samples])),
    }


def compute_mean_and_best(samples: list[Scored], count: int) -> tuple[float, float] | None:
    """Return the means over prompts of the mean and of the best reward of their responses.

    Responses that could not be scored are left out. None if no prompt has a scored response.
    """
    rewards = np.array([np.nan if s.reward is None else s.reward for s in samples], float).reshape(-1, count)
    rewards = rewards[np.isfinite(rewards).any(1)]
    if not len(rewards):
        return None
    return float(np.nanmean(rewards, 1).mean()), float(np.nanmax(rewards, 1).mean())
