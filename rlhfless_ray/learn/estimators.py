"""The advantage estimators by name: which baseline, critic, discount and whitening each has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlhfless_ray.learn.advantage import batch_centred, discounted_returns, gae, group_advantages, leave_one_out, uncentred
from rlhfless_ray.learn.reward_shaping import clipped, token_rewards
from rlhfless_ray.learn.whiten import Moments, whiten


@dataclass(frozen=True)
class Estimator:
    """`baseline`: rewards (prompts, samples) → shaped rewards. `discounts`: gamma other than 1 is meant to be used."""

    baseline: Callable[[np.ndarray], np.ndarray]
    whitens: bool = False
    discounts: bool = False
    critic: bool = False
    least_samples: int = 1
    whole_batch: bool = False  # the baseline needs every reward of the rollout batch, not only the group's


centred = partial(group_advantages, normalize_std=False)
ESTIMATORS = {
    "gae": Estimator(uncentred, whitens=True, discounts=True, critic=True),  # arXiv 1506.02438, with 1707.06347
    "reinforce": Estimator(uncentred, whitens=True, discounts=True),  # REINFORCE++, arXiv 2501.03262
    "rloo": Estimator(leave_one_out, least_samples=2),  # arXiv 2402.14740
    "reinforce_baseline": Estimator(centred, whitens=True, least_samples=2),  # REINFORCE++-baseline, arXiv 2501.03262
    "group_norm": Estimator(partial(group_advantages, epsilon=1e-9), least_samples=2),  # GRPO, arXiv 2402.03300
    "dr_grpo": Estimator(centred, least_samples=2),  # arXiv 2503.20783; the constant-length division is the loss's
    "flash_reinforce": Estimator(batch_centred, whole_batch=True),
}


def estimator_of(name: str) -> Estimator:
    """Raises ValueError, naming the choices, when there is no such estimator."""
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def estimate(
    name: str, rewards: np.ndarray, lengths: np.ndarray, *, kl: np.ndarray | None = None, kl_coefficient: float = 0.0,
    clip_range: tuple[float, float] | None = None, values: np.ndarray | None = None, gamma: float = 1.0, lambd: float = 1.0,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Per-token advantages, not yet whitened, and returns: both (Σ length,) float64, 0 off the mask.

    rewards (prompts, samples) after penalties, NaN where missing: the tokens of that sample are NaN. lengths (prompts ·
    samples,) tokens of each response in the same order; kl, values, mask (Σ length,), mask true on action tokens. Time counts
    the tokens laid out (see `gae`). Estimators that do not discount take gamma as 1, as OpenRLHF does.
    Raises ValueError for an unknown name, too few samples, missing critic values or wrong shapes.
    """
    by_token = shaped_rewards(name, rewards, lengths, kl=kl, kl_coefficient=kl_coefficient, clip_range=clip_range, mask=mask)
    return advantages_of(name, by_token, lengths, values=values, gamma=gamma, lambd=lambd, mask=mask)


def shaped_rewards(
    name: str, rewards: np.ndarray, lengths: np.ndarray, *, kl: np.ndarray | None = None, kl_coefficient: float = 0.0,
    clip_range: tuple[float, float] | None = None, mask: np.ndarray | None = None,
) -> np.ndarray:
    """The first half of `estimate`: baseline, clip and KL, (Σ length,) float64, what each token earns. Raises as it does."""
    estimator = estimator_of(name)
    if rewards.shape[1] < estimator.least_samples:
        raise ValueError(f"{name} compares the samples of a prompt: at least {estimator.least_samples}, there is {rewards.shape[1]}")
    shaped = estimator.baseline(rewards).reshape(-1)
    if clip_range is not None:
        shaped = clipped(shaped, *clip_range)
    return token_rewards(shaped, lengths, kl, kl_coefficient, mask)


def advantages_of(
    name: str, reward: np.ndarray, lengths: np.ndarray, *, values: np.ndarray | None = None, gamma: float = 1.0, lambd: float = 1.0,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The second half of `estimate`: from what each token earns, reward (Σ length,), its advantage and return."""
    estimator = estimator_of(name)
    action = np.ones(len(reward), bool) if mask is None else np.asarray(mask, bool)
    if estimator.critic:
        if values is None:
            raise ValueError(f"{name} needs the critic's values")
        advantages, returns = gae(reward, np.where(action, values, 0.0), lengths, gamma, lambd)
    else:
        returns = discounted_returns(reward, lengths, gamma if estimator.discounts else 1.0)
        advantages = returns
    return np.where(action, advantages, 0.0), np.where(action, returns, 0.0)


def normalise(
    name: str, advantages: np.ndarray, mask: np.ndarray | None = None, moments: Moments | None = None, divide: bool = True
) -> np.ndarray:
    """Whitened advantages where the estimator whitens, otherwise the advantages as they are.

    advantages, mask (tokens,); `moments` of the whole rollout batch where this is a part of it; without `divide` they are
    only centred. Tokens off the mask stay 0.
    """
    if not estimator_of(name).whitens:
        return advantages
    moments = Moments.of(advantages, mask) if moments is None else moments
    out = whiten(advantages, moments, divide)
    return out if mask is None else np.where(np.asarray(mask, bool), out, 0.0).astype(out.dtype, copy=False)
