"""What of a step's learning may be done while others of its samples are still being answered: gradients of complete groups, and
passes over samples that the update begins with."""

from __future__ import annotations

from typing import Any

from rlhfless_ray.learn.credit import obstacle as of_credit
from rlhfless_ray.recipe import Recipe


def obstacle(recipe: Recipe) -> str | None:
    """Why a run does not do so, or None where it does."""
    if recipe.learner.overlap == "off":
        return "learner.overlap is off"
    return inexact(recipe.algorithm.model_dump(), recipe.learner_section())


def passes(algorithm: dict[str, Any], learner: dict[str, Any], samples: int) -> tuple[str, ...]:
    """What an update of so many samples begins with, of every token, by the learner: `old`, its log-probabilities before the first
    optimizer step; `reference`, those of the policy that the run began with; `kl`, the estimate between the two. Sections of the
    recipe. Each hangs on its sample and the step's weights only, so it is the same, to rounding, whenever it is computed."""
    kl, most = algorithm["kl"], algorithm["batch_samples"]
    if kl["coefficient"] and kl["place"] == "reward":
        return "old", "reference", "kl"
    several = algorithm["updates_per_step"] > 1 or algorithm["epochs"] > 1 or (most is not None and most < samples)
    old = several or learner["lora"]["dropout"] > 0
    return (*(["old"] if old else []), *(["reference"] if kl["coefficient"] else []))


def passes_obstacle(recipe: Recipe) -> str | None:
    """Why a run does not make such passes ahead, or None where it does."""
    if recipe.learner.overlap == "off":
        return "learner.overlap is off"
    if recipe.algorithm.filter_range is not None:
        return "algorithm.filter_range: which groups are learned from is known when all are scored"
    return None


def inexact(algorithm: dict[str, Any], learner: dict[str, Any]) -> str | None:
    """Why the result would not be that of the whole batch, or None where it is, to rounding. Sections of the recipe.

    Gradients add up over a batch as long as all of them are taken at the same weights and nothing in a sample's loss
    depends on samples that are not there yet, but for a common divisor that can be applied at the end.
    """
    later = "a later update needs weights that the first one must have changed already"
    if algorithm["updates_per_step"] > 1:
        return f"algorithm.updates_per_step: {later}"
    if algorithm["epochs"] > 1:
        return f"algorithm.epochs: {later}"
    if algorithm["batch_samples"] is not None:
        return f"algorithm.batch_samples: they are drawn from all samples, and {later}"
    if reason := of_credit(algorithm):
        return reason
    if algorithm["filter_range"] is not None:
        return "algorithm.filter_range: which groups are learned from is known when all are scored"
    if learner["lora"]["dropout"]:
        return "lora.dropout: what is left out of a sample hangs on its place in the whole batch"
    if learner["zero_stage"] == 3:
        return "learner.zero_stage 3: DeepSpeed offers no place to divide its gradients before the step"
    return None
