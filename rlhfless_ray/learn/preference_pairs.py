"""Online DPO as an advantage estimator: each prompt's best and worst response are a pair. Pure numpy."""

from __future__ import annotations

import numpy as np

from rlhfless_ray.learn.advantage import differ


def pair_advantages(
    rewards: np.ndarray, lengths: np.ndarray, kl: np.ndarray | None, beta: float, mask: np.ndarray | None = None
) -> np.ndarray:
    """Return per-token advantages whose policy gradient is the gradient of DPO's loss, negated: (Σ length,) float64.

    DPO's loss of a pair is -log σ(h), with h = β · (log π/π_ref of the chosen response - the same of the rejected one) (Rafailov et
    al. 2023, arXiv 2305.18290; from the policy's own responses: Guo et al. 2024, arXiv 2402.04792). Its gradient is that of
    -β · σ(-h) · (log π(chosen) - log π(rejected)). So each token of the chosen response gets β · σ(-h), each of the rejected one the
    negative, and every other token 0. All are multiplied by tokens per pair, because the loss divides by the step's tokens while DPO
    divides by its pairs. This holds for a single optimizer step, before which π is the policy that `kl` was computed with.

    Args:
        rewards: (prompts, samples), NaN where missing: the tokens of that sample are NaN. A prompt whose rewards are equal up to
            rounding has no pair. Among equal rewards the first response is taken.
        lengths: (prompts · samples,) tokens of each response.
        kl: (Σ length,) log π/π_ref of each token. None: 0.
        beta: β.
        mask: (Σ length,) True on the policy's tokens. None: all are.
    """
    lengths, flat = np.asarray(lengths), rewards.reshape(-1)
    written = np.ones(int(lengths.sum()), bool) if mask is None else np.asarray(mask, bool)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    gaps = np.bincount(owner, np.where(written, 0.0 if kl is None else kl, 0.0), len(lengths))  # log π/π_ref of each response
    firsts = np.arange(len(rewards)) * rewards.shape[1]
    chosen = firsts + np.where(np.isnan(rewards), -np.inf, rewards).argmax(axis=1)
    rejected = firsts + np.where(np.isnan(rewards), np.inf, rewards).argmin(axis=1)
    is_pair = differ(flat[chosen], flat[rejected])
    chosen, rejected = chosen[is_pair], rejected[is_pair]
    of_response = np.where(np.isnan(flat), np.nan, 0.0)
    if len(chosen):
        tokens = np.count_nonzero(written & ~np.isnan(flat)[owner])
        weight = beta / (1 + np.exp(beta * (gaps[chosen] - gaps[rejected]))) * tokens / len(chosen)
        of_response[chosen], of_response[rejected] = weight, -weight
    return np.where(written, of_response[owner], 0.0)
