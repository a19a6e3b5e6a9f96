"""Do our advantages and losses, and their gradients, equal verl's and OpenRLHF's on random tensors?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.estimate import estimate
from benchmarks.peers.peer_functions import openrlhf_advantages
from rlhfless_ray.common.estimators import ESTIMATORS
from rlhfless_ray.learn.advantage import gae, group_advantages, leave_one_out
from rlhfless_ray.learn.importance import correction_weights
from rlhfless_ray.learn.kl_estimators import bounded_kl, unbiased_kl
from rlhfless_ray.learn.losses import clipped_loss, sequence_ratios, token_ratios, token_weights, value_loss
from rlhfless_ray.learn.reward_shaping import overlong_penalty, stop_properly
from rlhfless_ray.learn.whiten import whiten
from rlhfless_ray.recipe.algorithm_sections import LossConfig

SHARED = [name for name, estimator in ESTIMATORS.items() if not estimator.pairs]  # OpenRLHF's loop has no DPO
PROMPTS, SAMPLES, LENGTH = 16, 8, 60
CORRECTIONS: list[tuple[str, str, str, list[float]]] = [
    ("token", "clip", "ratio", [0.5, 2.0]),
    ("token", "mask", "ratio", [0.7, 1.4]),
    ("seq", "mask", "ratio", [0.9, 1.1]),
    ("token", "mask", "binary_kl", [0.0, 0.02]),
    ("seq", "mask", "binary_kl", [0.0, 0.02]),
    ("token", "mask", "tv", [0.0, 0.05]),
    ("seq", "mask", "tv", [0.0, 0.05]),
]


class AgreementCase:
    """Padded tensors in float64, ragged, with holes in the mask as an environment's answers leave them."""

    def __init__(self, seed: int, holes: bool) -> None:
        rng = np.random.default_rng(seed)
        count = PROMPTS * SAMPLES
        self.lengths = rng.integers(1, LENGTH + 1, count)
        self.inside = np.arange(LENGTH)[None] < self.lengths[:, None]
        self.mask = self.inside.copy()
        if holes:
            self.mask &= rng.random((count, LENGTH)) < 0.8
            self.mask[np.arange(count), self.lengths - 1] = True
        self.rewards = rng.normal(0, 3, (PROMPTS, SAMPLES))
        self.truncated = self.lengths > 0.9 * LENGTH
        self.kl, self.values, self.old_values, self.returns, self.advantages = rng.normal(0, 0.5, (5, count, LENGTH))
        self.logprobs = -rng.gamma(1.0, 1.0, (count, LENGTH))
        self.old, self.reference, self.sampler = (np.minimum(self.logprobs + rng.normal(0, 0.2, (count, LENGTH)), 0) for _ in range(3))
        self.sequence = torch.from_numpy(np.nonzero(self.mask)[0])

    def padded(self, name: str) -> Tensor:
        return torch.from_numpy(getattr(self, name))

    def flat(self, name: str) -> Tensor:
        return self.padded(name)[torch.from_numpy(self.mask)]


def advantages_differ(openrlhf: SimpleNamespace, seeds: int) -> dict[str, float]:
    """Largest difference of advantages and returns per estimator, over settings with penalties, clipping, KL and discount."""
    worst = dict.fromkeys(SHARED, 0.0)
    for seed in range(seeds):
        for gamma, lambd, divide, stop in ((1.0, 1.0, True, None), (0.97, 0.9, True, 0.5), (0.9, 0.5, False, -0.5)):
            case = AgreementCase(seed, holes=bool(seed % 2))
            settings: dict[str, Any] = {
                "gamma": gamma,
                "lambd": lambd,
                "clip_range": (-2.0, 3.0),
                "kl_coefficient": 0.1,
                "divide": divide,
                "max_new_tokens": LENGTH,
                "overlong_buffer": 10.0,
                "stop_properly": stop,
            }
            answers = case.mask.sum(1)
            shaped = case.rewards + overlong_penalty(answers, LENGTH, 10.0, 0.7).reshape(PROMPTS, SAMPLES)
            if stop is not None:
                shaped = stop_properly(shaped, case.truncated.reshape(PROMPTS, SAMPLES), stop)
            inside, action = case.inside, case.mask[case.inside]
            for name in SHARED:
                theirs = openrlhf_advantages(
                    openrlhf,
                    name,
                    case.padded("rewards"),
                    case.padded("kl"),
                    case.padded("values"),
                    case.padded("mask").long(),
                    case.padded("truncated"),
                    settings,
                )
                found, returns = estimate(
                    name,
                    shaped,
                    case.lengths,
                    kl=case.kl[inside],
                    kl_coefficient=0.1,
                    clip_range=(-2.0, 3.0),
                    values=case.values[inside],
                    gamma=gamma,
                    lambd=lambd,
                    mask=action,
                )
                found = whiten(found, action, divide) if ESTIMATORS[name].whitens else found
                for mine, their in zip((found, returns), theirs, strict=True):
                    worst[name] = max(worst[name], float(np.abs(mine[action] - their.numpy()[case.mask]).max()))
    return worst


def losses_differ(openrlhf: SimpleNamespace, verl: Any, seeds: int) -> dict[str, float]:
    """Largest difference of loss or gradient, ours against theirs."""
    worst: dict[str, float] = {}
    for seed in range(seeds):
        case = AgreementCase(seed, holes=bool(seed % 2))
        for name, field, ours, theirs in loss_pairs(case, openrlhf, verl):
            flat, padded = case.flat(field).requires_grad_(), case.padded(field).clone().requires_grad_()
            mine, their = ours(flat), theirs(padded)
            (a,), (b,) = torch.autograd.grad(mine, flat), torch.autograd.grad(their, padded)
            apart = [float((mine - their).abs().detach()), float((a - b[torch.from_numpy(case.mask)]).abs().max())]
            worst[name] = max(worst.get(name, 0.0), *apart)
    return worst


Scalar = Callable[[Tensor], Tensor]


def loss_pairs(case: AgreementCase, openrlhf: SimpleNamespace, verl: Any) -> Iterator[tuple[str, str, Scalar, Scalar]]:
    """(what, the tensor that has the gradient, our loss of the flat one, their loss of the padded one)."""
    mask = case.padded("mask").double()
    lengths = mask.sum(1).long()
    weight = {mean: token_weights(lengths, mean)[case.sequence] for mean in ("token", "sequence")}
    old, advantages, sampler, reference, old_values, returns = (
        case.flat(n) for n in ("old", "advantages", "sampler", "reference", "old_values", "returns")
    )
    rows = {n: case.padded(n) for n in ("old", "advantages", "sampler", "reference", "old_values", "returns")}

    def ppo(x: Tensor, mean: str = "token", dual: float | None = None, extra: Tensor | float = 1.0) -> Tensor:
        return (weight[mean] * extra * clipped_loss(token_ratios(x, old), advantages, 0.2, 0.27, dual)[0]).sum()

    def gspo(x: Tensor, before: Tensor) -> Tensor:
        ratios = sequence_ratios(x, before, case.sequence, len(lengths))
        return (weight["sequence"] * clipped_loss(ratios, advantages, 0.05, 0.08)[0]).sum()

    def critic(x: Tensor, clip: float | None) -> Tensor:
        return (weight["token"] * value_loss(x, old_values, returns, clip)[0]).sum()

    def kl(x: Tensor, estimator: str, unbiased: bool) -> Tensor:
        each = unbiased_kl(x, reference, old, estimator) if unbiased else bounded_kl(x, reference, estimator)
        return (weight["token"] * each).sum()

    def their_policy(x: Tensor, **settings: Any) -> Tensor:
        module = openrlhf.PolicyLoss(**{"clip_eps_low": 0.2, "clip_eps_high": 0.27, **settings})
        return module(x, rows["old"], rows["advantages"], mask, rows["sampler"])[0]

    def their_kl(x: Tensor, estimator: str, unbiased: bool) -> Tensor:
        return (openrlhf.kl(x, rows["reference"], rows["old"], estimator, unbiased) * mask).sum() / mask.sum()

    for dual in (None, 3.0):
        for mean in ("token", "sequence"):
            theirs = partial(their_policy, dual_clip=dual, token_level_loss=mean == "token")
            yield f"OpenRLHF ppo, {mean} mean, dual {dual}", "logprobs", partial(ppo, mean=mean, dual=dual), theirs
    yield (
        "verl ppo, dual 3",
        "logprobs",
        partial(ppo, dual=3.0),
        lambda x: verl.compute_policy_loss(
            rows["old"], x, rows["advantages"], mask, cliprange_low=0.2, cliprange_high=0.27, clip_ratio_c=3.0
        )[0],
    )
    narrow = {"clip_eps_low": 0.05, "clip_eps_high": 0.08, "policy_loss_type": "gspo"}
    yield "OpenRLHF gspo", "logprobs", partial(gspo, before=old), partial(their_policy, **narrow)
    corrected = partial(their_policy, is_correction_level="token", **narrow)
    yield "OpenRLHF gspo with correction", "logprobs", partial(gspo, before=sampler), corrected
    for level, mode, gating, bounds in CORRECTIONS:
        ours = {"level": level, "mode": mode, "gating": gating, "low": bounds[0], "high": bounds[1]}
        section = LossConfig.model_validate({f"correction_{name}": value for name, value in ours.items()})
        extra = correction_weights(section, old, sampler, case.sequence, len(lengths))[0]
        flags = {
            "is_correction_level": level,
            "is_correction_mode": mode,
            "is_correction_gating": gating,
            "is_correction_threshold": bounds,
        }
        name = f"OpenRLHF correction {level}/{mode}/{gating}"
        yield name, "logprobs", partial(ppo, extra=extra), partial(their_policy, **flags)
    for clip in (None, 0.2):
        module = openrlhf.ValueLoss(clip)
        theirs = partial(module, old_values=rows["old_values"], returns=rows["returns"], action_mask=mask)
        yield f"OpenRLHF value loss, clip {clip}", "values", partial(critic, clip=clip), theirs
    yield (
        "verl value loss, clip 0.2",
        "values",
        partial(critic, clip=0.2),
        lambda x: verl.compute_value_loss(x, rows["returns"], rows["old_values"], mask, 0.2)[0],
    )
    for estimator in ("k1", "k2", "k3"):
        for unbiased in (False, True):
            name = f"OpenRLHF KL {estimator}{', unbiased' if unbiased else ''} (theirs in float32)"
            settings = {"estimator": estimator, "unbiased": unbiased}
            yield name, "logprobs", partial(kl, **settings), partial(their_kl, **settings)


def verl_advantages_differ(verl: Any, seeds: int) -> dict[str, float]:
    """GAE (environment tokens left out, whitened with n - 1), GRPO and RLOO."""
    worst = {"verl gae": 0.0, "verl grpo": 0.0, "verl rloo": 0.0}
    for seed in range(seeds):
        case = AgreementCase(seed, holes=bool(seed % 2))
        mask = case.padded("mask").double()
        rewards = np.where(case.mask, case.kl, 0.0)
        theirs = verl.compute_gae_advantage_return(torch.from_numpy(rewards), case.padded("values"), mask, 0.97, 0.9)[0]
        found = gae(case.kl[case.mask], case.values[case.mask], case.mask.sum(1), 0.97, 0.9)[0]
        found = (found - found.mean()) / np.sqrt(found.var(ddof=1) + 1e-8)
        worst["verl gae"] = max(worst["verl gae"], float(np.abs(found - theirs.numpy()[case.mask]).max()))
        token = np.zeros_like(case.kl)
        token[np.arange(len(token)), case.lengths - 1] = case.rewards.reshape(-1)
        groups = np.repeat(np.arange(PROMPTS), SAMPLES)
        for name, theirs_of, ours in (
            ("verl grpo", verl.compute_grpo_vectorized_outcome_advantage, group_advantages(case.rewards)),
            ("verl rloo", verl.compute_rloo_vectorized_outcome_advantage, leave_one_out(case.rewards)),
        ):
            theirs = theirs_of(torch.from_numpy(token), mask, groups)[0].numpy()
            worst[name] = max(worst[name], float(np.abs(theirs - ours.reshape(-1, 1))[case.mask].max()))
    return worst
