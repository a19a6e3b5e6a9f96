"""Decide what the learner may compute while other samples of the step are still generated.

These are gradients of complete groups, and the forward passes over samples at the beginning of the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.early_gradients import Obstacle, early_gradient_obstacle
from rlhfless_ray.common.estimators import ESTIMATORS

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig, LearnerConfig, LoraConfig, Recipe

LAGS = "rollout.max_lag_steps: while engines decode, the learner works on the step before"
EXACT = "run.exact: bits would depend on which samples end before others"
AHEAD = "rollout.ahead: the rollout of a step begins before the update of the step before it"


def obstacle(recipe: Recipe) -> str | None:
    """Return why a run computes no gradients ahead, or None if it does."""
    if recipe.learner.overlap == "off":
        return "learner.overlap is off"
    if recipe.run.exact:
        return EXACT
    if recipe.rollout.rolls_out_ahead:
        return LAGS
    if recipe.critic.freeze_policy_steps:
        return "critic.freeze_policy_steps: gradients of steps in which the policy is frozen would be left over"
    return inexact(recipe.algorithm, recipe.learner, recipe.lora)


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


def inexact(algorithm: AlgorithmConfig, learner: LearnerConfig, lora: LoraConfig) -> str | None:
    """Return why gradients computed ahead would differ from those of the whole batch, or None if they agree up to rounding.

    Gradients add up over a batch if all are taken at the same weights and no sample's loss depends on samples that are not there yet.
    A common divisor is an exception: it can be applied at the end. The arguments are sections of the recipe.
    """
    advantage, estimator = algorithm.advantage, ESTIMATORS[algorithm.advantage.estimator]
    several = {
        "updates_per_step": algorithm.updates_per_step > 1,
        "epochs": algorithm.epochs > 1,
        "batch_samples": algorithm.batch_samples is not None,
    }
    found = early_gradient_obstacle(
        updates=1 + any(several.values()),
        critic=estimator.critic,
        whole_batch=advantage.whitens or estimator.whole_batch,
        sharded_weights=learner.zero_stage == 3,
    )
    if found is Obstacle.UPDATES:
        return f"algorithm.{next(key for key, is_set in several.items() if is_set)}: {found.value}"
    if found is Obstacle.SHARDED_WEIGHTS:
        return f"learner.zero_stage 3: {found.value}"
    if found is not None:
        return f"algorithm.advantage.estimator {advantage.estimator}: {found.value}"
    own_mean = algorithm.regularization_mean not in (None, algorithm.loss_mean)
    if own_mean and (algorithm.loss.entropy_coefficient or (algorithm.kl.coefficient and algorithm.kl.place == "loss")):
        return "algorithm.regularization_mean: gradients of two means would need two divisors at the end"
    if algorithm.kl.coefficient and algorithm.kl.place == "reward":
        return "algorithm.kl.place reward: rewards need the KL of the whole batch first"
    if algorithm.loss.router_aux:
        return "algorithm.loss.router_aux: the auxiliary loss depends on which samples share a micro-batch"
    if algorithm.filter_range is not None:
        return "algorithm.filter_range: the trained groups are known only when all are scored"
    if lora.dropout:
        return "lora.dropout: a sample's dropout mask depends on its place in the whole batch"
    return None
