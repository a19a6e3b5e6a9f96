"""The baseline of each advantage estimator, by name. `common.estimators` has their other properties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from rlhfless_ray.common.estimators import ESTIMATORS
from rlhfless_ray.learn.advantage import batch_centred, discounted_returns, gae, group_advantages, leave_one_out, uncentred
from rlhfless_ray.learn.preference_pairs import pair_advantages
from rlhfless_ray.learn.reward_shaping import token_rewards

centred = partial(group_advantages, normalize_std=False)
BASELINES: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # rewards (prompts, samples) → shaped rewards
    "gae": uncentred,
    "reinforce": uncentred,
    "rloo": leave_one_out,
    "reinforce_baseline": centred,
    "group_norm": partial(group_advantages, epsilon=1e-9),
    "dr_grpo": centred,
    "flash_reinforce": batch_centred,
    "on_policy_distill": lambda rewards: 0.0 * uncentred(rewards),  # NaN of a missing reward stays
    "online_dpo": uncentred,
}


def shaped_rewards(
    name: str,
    rewards: np.ndarray,
    lengths: np.ndarray,
    *,
    kl: np.ndarray | None = None,
    kl_coefficient: float = 0.0,
    clip_range: tuple[float, float] | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Return the reward of each token after baseline, clip and KL, (Σ length,) float64, NaN for the tokens of a sample without a reward.

    `rewards` (prompts, samples) after penalties, NaN if missing. `lengths` (prompts · samples,) tokens of each response in the same
    order. `kl` and `mask` (Σ length,); `mask` is True on action tokens.
    """
    shaped = BASELINES[name](rewards).reshape(-1)
    if clip_range is not None:
        shaped = np.clip(shaped, *clip_range)
    if ESTIMATORS[name].pairs:
        return pair_advantages(shaped.reshape(rewards.shape), lengths, kl, kl_coefficient, mask)
    return token_rewards(shaped, lengths, kl, kl_coefficient, mask)


def advantages_of(
    name: str,
    reward: np.ndarray,
    lengths: np.ndarray,
    *,
    values: np.ndarray | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages per token, not yet whitened, and returns: both (Σ length,) float64, 0 outside the mask.

    `reward`, `values` and `mask` (Σ length,); see `gae` for time steps. Estimators that do not discount use gamma 1, as in OpenRLHF.
    """
    estimator = ESTIMATORS[name]
    action = np.ones(len(reward), bool) if mask is None else np.asarray(mask, bool)
    if estimator.critic:
        assert values is not None
        advantages, returns = gae(reward, np.where(action, values, 0.0), lengths, gamma, lambd)
    else:
        alone = estimator.teacher or estimator.pairs  # rewards are not summed over later tokens
        returns = discounted_returns(reward, lengths, 0.0 if alone else gamma if estimator.discounts else 1.0)
        advantages = returns
    return np.where(action, advantages, 0.0), np.where(action, returns, 0.0)
