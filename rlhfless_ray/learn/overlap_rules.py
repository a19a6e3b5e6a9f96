"""Decide which forward passes the learner makes before an update, and whether they may begin while samples are still generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig, LoraConfig, Recipe

EXACT = "run.exact: bits would depend on which samples end before others"
AHEAD = "rollout.ahead: the rollout of a step begins before the update of the step before it"


def passes(algorithm: AlgorithmConfig, lora: LoraConfig, samples: int, apart: bool = False) -> tuple[str, ...]:
    """Return the names of the learner's forward passes before an update of `samples` samples.

    `old`: log-probabilities before the first optimizer step. `reference`: those of the initial policy, if that is the learner's model
    without its adapters and the reference is not a worker group `apart`. Each depends on its sample and the step's weights
    only. It is the same, up to rounding, whenever it is computed.
    """
    kl, batch_samples = algorithm.kl, algorithm.batch_samples
    several = algorithm.updates_per_step > 1 or algorithm.epochs > 1 or (batch_samples is not None and batch_samples < samples)
    several |= algorithm.remainder == "carry"  # a sample may be learned from after steps of its own rollout
    old = several or lora.dropout > 0 or (kl.coefficient > 0 and kl.place == "reward")
    reference = kl.coefficient > 0 and lora.rank > 0 and not apart
    return (*(["old"] if old else []), *(["reference"] if reference else []))


def passes_obstacle(recipe: Recipe) -> str | None:
    """Return why a run makes no passes ahead, or None if it does.

    One step off, the learner makes its own while it waits for the rollout beside its update. The others' are not made ahead.
    """
    if recipe.learner.overlap == "off":
        return "learner.overlap is off"
    if recipe.run.exact:
        return EXACT
    if recipe.rollout.ahead:
        return AHEAD
    if recipe.algorithm.filter_range is not None:
        return "algorithm.filter_range: the trained groups are known only when all are scored"
    return None
