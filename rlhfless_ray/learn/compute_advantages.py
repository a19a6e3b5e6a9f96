"""Compute advantages and returns per token from a step's rewards, by the recipe. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhfless_ray.learn.batch import counts_of, spans_of
from rlhfless_ray.learn.estimators import advantages_of, shaped_rewards
from rlhfless_ray.learn.reward_shaping import overlong_penalty, stop_properly
from rlhfless_ray.learn.whiten import whiten

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig, RewardConfig


def compute_advantages(
    algorithm: AlgorithmConfig,
    reward: RewardConfig,
    rewards: np.ndarray,
    lengths: np.ndarray,
    truncated: np.ndarray,
    max_tokens: int,
    *,
    kl: np.ndarray | None = None,
    kl_coefficient: float = 0.0,
    values: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute advantages and returns of the whole rollout batch.

    Rewards go through these steps, in this order: length penalties, baseline, clip, KL per token, discount, whitening over all
    tokens of the batch.

    Args:
        algorithm, reward: sections of the recipe.
        rewards: (prompts, samples), NaN for a missing reward. The tokens of such a sample are NaN, and it affects no other sample.
        lengths: (prompts · samples,) tokens of each response.
        truncated: (prompts · samples,) whether the response was cut at `max_tokens`.
        kl, values: (Σ length,) per token.
        mask: (Σ length,) True for tokens of the policy; None: all are. Other tokens have no reward, value or advantage, but count
            as time steps, as in OpenRLHF.

    Returns:
        Advantages and returns, both (Σ length,) float64, and each response's reward before discount and whitening,
        (prompts · samples,), with the KL summed over its tokens.
    """
    shaped = penalized(reward, rewards, lengths, truncated, max_tokens, mask)
    section = algorithm.advantage
    name = section.estimator
    earned = shaped_rewards(name, shaped, lengths, kl=kl, kl_coefficient=kl_coefficient, clip_range=reward.clip_range, mask=mask)
    advantages, returns = advantages_of(name, earned, lengths, values=values, gamma=section.gamma, lambd=section.lambd, mask=mask)
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), earned, len(lengths))
    return whiten(advantages, mask, section.normalize_std) if section.whitens else advantages, returns, sums


def penalized(
    reward: RewardConfig, rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, max_tokens: int, mask: np.ndarray | None = None
) -> np.ndarray:
    """Apply the length penalties of the recipe's section `reward`. Returns float64 in the shape of `rewards`.

    The arguments are those of `compute_advantages`.
    """
    shaped = np.asarray(rewards, np.float64)
    if reward.overlong_buffer_tokens is not None:
        measured = lengths if mask is None else (spans_of if reward.overlong_feedback else counts_of)(mask, lengths)
        limit = reward.overlong_limit_tokens or max_tokens
        penalty = overlong_penalty(measured, limit, reward.overlong_buffer_tokens, reward.overlong_penalty)
        shaped = shaped + penalty.reshape(shaped.shape)
    if reward.stop_properly_penalty is not None:
        shaped = stop_properly(shaped, truncated.reshape(shaped.shape), reward.stop_properly_penalty)
    return shaped
