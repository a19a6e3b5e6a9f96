"""Evaluate the policy: mean rewards of sampled and greedy responses, the best of several, and by data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.runtime.step_records import StepRecords
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample, Scored

Sampling = dict[str, tuple[float, int]]  # name → temperature, responses to each prompt


@dataclass
class Evaluations:
    stages: Stages
    records: StepRecords

    def is_due(self, number: int) -> bool:
        every = self.stages.context.recipe.evaluate.every_steps
        return number == self.records.session.last_step or (every > 0 and number % every == 0)

    def make_up(self) -> None:
        """Evaluate before the first step, or if a stop has interrupted an evaluation. No step's time and costs include it, or the start."""
        if not self.records.state.owes_evaluation:
            self.records.leave_out_start()
            return
        self.record(self.evaluate())

    def record(self, found: dict[str, float]) -> None:
        """Record an evaluation before the next step, and save a checkpoint if it is due because of it."""
        state = self.records.state
        state.owes_evaluation = False
        metric = state.best.read_metric(found)  # raises at once instead of in an hour if no evaluation has the metric
        self.records.evaluation(found)
        if state.steps_done and ((best := state.best.improved(metric)) or state.is_due(state.steps_done)):
            state.save(metric=metric, best=best, export=True)  # the one of the stop that interrupted the evaluation has no metric

    def run(self, step: Step) -> None:
        """Evaluate the step's weights if an evaluation is due."""
        if self.is_due(step.number):
            step.evaluation = self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights on the held-out prompts. Returns {metric: value}, empty without held-out prompts."""
        weights, prompts, recipe = (
            self.records.session.wait_for_weights(),
            self.records.state.inputs.prompts.heldout,
            self.stages.context.recipe,
        )
        if not prompts:
            return {}
        sampling = choose_sampling(recipe)
        with self.stages.context.phases.phase("eval", "evaluating"):
            samples = self.stages.rollout.answer(prompts, list(sampling.values()), weights)
            sampled = samples[: len(prompts) * recipe.evaluate.samples_per_prompt]
            if self.stages.agreement is not None:
                self.stages.agreement.check(sampled, weights, sampling["sampled"][0], parks=True)
            with self.stages.score.phase("eval_score"):  # its time is part of the evaluation's
                scored = self.stages.score.score(samples, self.records.session.step.number, "evaluation")
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
