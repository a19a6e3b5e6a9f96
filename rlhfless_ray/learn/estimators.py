"""The baseline of each advantage estimator, by name. `common.estimators` has their other properties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from rlhfless_ray.common.estimators import ESTIMATORS, Estimator
from rlhfless_ray.learn.advantage import batch_centred, discounted_returns, gae, group_advantages, leave_one_out, uncentred
from rlhfless_ray.learn.preference_pairs import pair_advantages
from rlhfless_ray.learn.reward_shaping import clipped, token_rewards
from rlhfless_ray.learn.whiten import Moments, whiten

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


def estimator_of(name: str) -> Estimator:
    """Return the properties of an estimator. Raises ValueError, which lists the choices, for an unknown name."""
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def estimate(
    name: str,
    rewards: np.ndarray,
    lengths: np.ndarray,
    *,
    kl: np.ndarray | None = None,
    kl_coefficient: float = 0.0,
    clip_range: tuple[float, float] | None = None,
    values: np.ndarray | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages per token, not yet whitened, and returns: both (Σ length,) float64, 0 outside the mask.

    `rewards` (prompts, samples) after penalties, NaN if missing: the tokens of that sample are NaN. `lengths` (prompts · samples,)
    tokens of each response in the same order. `kl`, `values` and `mask` (Σ length,); `mask` is True on action tokens. See `gae` for
    time steps. Estimators that do not discount use gamma 1, as in OpenRLHF.
    Raises ValueError for an unknown name, too few samples, missing critic values or wrong shapes.
    """
    by_token = shaped_rewards(name, rewards, lengths, kl=kl, kl_coefficient=kl_coefficient, clip_range=clip_range, mask=mask)
    return advantages_of(name, by_token, lengths, values=values, gamma=gamma, lambd=lambd, mask=mask)


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
    """Return the reward of each token after baseline, clip and KL, (Σ length,) float64: the first half of `estimate`.

    Raises ValueError as `estimate` does.
    """
    estimator = estimator_of(name)
    if rewards.shape[1] < estimator.least_samples:
        raise ValueError(f"{name} compares the samples of a prompt: at least {estimator.least_samples}, there is {rewards.shape[1]}")
    shaped = BASELINES[name](rewards).reshape(-1)
    if clip_range is not None:
        shaped = clipped(shaped, *clip_range)
    if estimator.pairs:
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
    """Return advantages and returns from the reward of each token, all (Σ length,): the second half of `estimate`."""
    estimator = estimator_of(name)
    action = np.ones(len(reward), bool) if mask is None else np.asarray(mask, bool)
    if estimator.critic:
        if values is None:
            raise ValueError(f"{name} needs the critic's values")
        advantages, returns = gae(reward, np.where(action, values, 0.0), lengths, gamma, lambd)
    else:
        alone = estimator.teacher or estimator.pairs  # rewards are not summed over later tokens
        returns = discounted_returns(reward, lengths, 0.0 if alone else gamma if estimator.discounts else 1.0)
        advantages = returns
    return np.where(action, advantages, 0.0), np.where(action, returns, 0.0)


def normalise(
    name: str,
    advantages: np.ndarray,
    mask: np.ndarray | None = None,
    moments: Moments | None = None,
    divide: bool = True,
    whitens: bool | None = None,
) -> np.ndarray:
    """Whiten advantages if the estimator does so, and else return them unchanged.

    `advantages` and `mask` (tokens,). `moments`: of the whole rollout batch, if this is a part of it. Without `divide` advantages are
    only centred. `whitens` overrides the estimator's property. Tokens outside the mask stay 0.
    """
    if not (estimator_of(name).whitens if whitens is None else whitens):
        return advantages
    moments = Moments.of(advantages, mask) if moments is None else moments
    out = whiten(advantages, moments, divide)
    return out if mask is None else np.where(np.asarray(mask, bool), out, 0.0).astype(out.dtype, copy=False)
