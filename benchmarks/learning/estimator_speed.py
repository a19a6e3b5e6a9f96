"""Processor time of advantages and losses on full-length samples: ours, verl's, OpenRLHF's, and a loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.estimate import estimate
from benchmarks.common.results import Spread, processor_ms
from rlhfless_ray.learn.advantage import discounted_returns, gae, group_advantages
from rlhfless_ray.learn.importance import correction_weights
from rlhfless_ray.learn.kl_estimators import bounded_kl
from rlhfless_ray.learn.losses import clipped_loss, sequence_ratios, token_ratios, token_weights, value_loss
from rlhfless_ray.learn.whiten import whiten
from rlhfless_ray.recipe.algorithm_sections import LossConfig

GROUP = 8
GAMMA, LAMBDA = 0.99, 0.95
LOOP_SAMPLES = 16  # the loops over single tokens run on so many, and are scaled


@dataclass(frozen=True)
class Timing:
    """Milliseconds of processor time; None where a library has no such function."""

    what: str
    ours_ms: Spread
    verl_ms: Spread | None
    openrlhf_ms: Spread | None
    loop_ms: float | None

    def row(self) -> tuple[str, ...]:
        peers = (self.verl_ms, self.openrlhf_ms)
        shown = [f"{p.show()} · {p.median / self.ours_ms.median:.1f}×" if p else "" for p in peers]
        loop = f"{self.loop_ms:,.0f} · {self.loop_ms / self.ours_ms.median:.0f}×" if self.loop_ms else ""
        return self.what, self.ours_ms.show(), *shown, loop

    def fastest_peer_ms(self) -> float:
        return min(p.median for p in (self.verl_ms, self.openrlhf_ms) if p)


class Inputs:
    """The same numbers flat (ours) and padded (theirs; the mask is all ones, so neither layout has less to do)."""

    def __init__(self, samples: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples, self.tokens = samples, tokens
        shape = (samples, tokens)
        self.rewards, self.values, self.advantages, self.returns = (torch.randn(shape, generator=generator) for _ in range(4))
        self.logprobs = -torch.rand(shape, generator=generator) * 3
        self.old, self.sampler, self.reference = (self.logprobs + 0.1 * torch.randn(shape, generator=generator) for _ in range(3))
        self.mask = torch.ones(shape)
        self.lengths = np.full(samples, tokens)
        self.scores = np.random.default_rng(0).normal(size=(samples // GROUP, GROUP))
        self.sequence = torch.arange(samples).repeat_interleave(tokens)
        self.outcome = torch.zeros(shape)
        self.outcome[:, -1] = torch.from_numpy(self.scores.reshape(-1))
        self.groups = np.repeat(np.arange(samples // GROUP), GROUP)

    def flat(self, name: str) -> Tensor:
        return getattr(self, name).view(-1)

    def array(self, name: str) -> np.ndarray:
        return self.flat(name).numpy()


def timings(x: Inputs, verl: Any, openrlhf: SimpleNamespace | None, repeats: int) -> list[Timing]:
    lengths = torch.from_numpy(x.lengths)
    weights = {mean: token_weights(lengths, mean).float()[x.sequence] for mean in ("token", "sequence")}
    old, advantages, mask = x.flat("old"), x.flat("advantages"), x.mask
    maker = openrlhf.maker if openrlhf else None

    def measured(what: str, ours: Work, verls: Work | None, openrlhfs: Work | None, loop: Work | None = None) -> Timing:
        loop_ms = processor_ms(loop) * x.samples / LOOP_SAMPLES if loop else None
        peers = (spread(verls, repeats) if verls and verl else None, spread(openrlhfs, repeats) if openrlhfs and openrlhf else None)
        return Timing(what, spread(ours, repeats), *peers, loop_ms)

    def whitened() -> np.ndarray:
        return whiten(gae(x.array("rewards"), x.array("values"), x.lengths, GAMMA, LAMBDA)[0])

    def learn(name: str, loss: Callable[[Tensor], Tensor], flat: bool) -> Tensor:
        tensor = (x.flat(name) if flat else getattr(x, name)).detach().requires_grad_()
        return torch.autograd.grad(loss(tensor), tensor)[0]

    def ppo(t: Tensor) -> Tensor:
        return (weights["token"] * clipped_loss(token_ratios(t, old), advantages, 0.2, 0.2, 3.0)[0]).sum()

    def gspo(t: Tensor) -> Tensor:
        ratios = sequence_ratios(t, old, x.sequence, x.samples)
        return (weights["sequence"] * clipped_loss(ratios, advantages, 0.05, 0.08)[0]).sum()

    def corrected(t: Tensor) -> Tensor:
        extra = correction_weights(LossConfig(correction_level="seq", correction_low=0.5), old, x.flat("sampler"), x.sequence, x.samples)[0]
        return (weights["token"] * extra * clipped_loss(token_ratios(t, old), advantages, 0.2, 0.2)[0]).sum()

    def critic(t: Tensor) -> Tensor:
        return (weights["token"] * value_loss(t, x.flat("old"), x.flat("returns"), 0.2)[0]).sum()

    def their_policy(t: Tensor, **settings: Any) -> Tensor:
        assert openrlhf is not None
        return openrlhf.PolicyLoss(**settings)(t, x.old, x.advantages, mask, x.sampler)[0]

    found = [
        measured(
            "GAE, λ 0.95, γ 0.99",
            lambda: gae(x.array("rewards"), x.array("values"), x.lengths, GAMMA, LAMBDA),
            None,
            lambda: maker.get_advantages_and_returns(None, x.values, x.rewards, mask, GAMMA, LAMBDA),
            lambda: loop_gae(x),
        ),
        measured("GAE and whitening", whitened, lambda: verl.compute_gae_advantage_return(x.rewards, x.values, mask, GAMMA, LAMBDA), None),
        measured(
            "returns-to-go, γ 1",
            lambda: discounted_returns(x.array("rewards"), x.lengths),
            None,
            lambda: maker.get_cumulative_returns(None, x.rewards, mask, 1.0),
        ),
        measured(
            "group advantages (GRPO), per token",
            lambda: np.repeat(group_advantages(x.scores).astype(np.float32), x.lengths),
            lambda: verl.compute_grpo_vectorized_outcome_advantage(x.outcome, mask, x.groups),
            None,
        ),
        measured(
            "rewards with KL → GAE → whitened",
            lambda: whiten(
                estimate(
                    "gae",
                    x.scores,
                    x.lengths,
                    kl=x.array("rewards"),
                    kl_coefficient=0.01,
                    clip_range=(-10, 10),
                    values=x.array("values"),
                    gamma=GAMMA,
                    lambd=LAMBDA,
                )[0]
            ),
            None,
            None,
        ),
        measured(
            "PPO loss and gradient, dual clip",
            lambda: learn("logprobs", ppo, True),
            lambda: learn("logprobs", lambda t: verl.compute_policy_loss(x.old, t, x.advantages, mask, 0.2)[0], False),
            lambda: learn("logprobs", lambda t: their_policy(t, dual_clip=3.0), False),
            lambda: loop_ppo(x),
        ),
        measured(
            "GSPO loss and gradient",
            lambda: learn("logprobs", gspo, True),
            None,
            lambda: learn("logprobs", lambda t: their_policy(t, policy_loss_type="gspo", clip_eps_low=0.05, clip_eps_high=0.08), False),
        ),
        measured(
            "PPO with sequence-mask correction",
            lambda: learn("logprobs", corrected, True),
            None,
            lambda: learn("logprobs", lambda t: their_policy(t, is_correction_level="seq"), False),
        ),
        measured(
            "value loss and gradient, clip",
            lambda: learn("values", critic, True),
            lambda: learn("values", lambda t: verl.compute_value_loss(t, x.returns, x.old, mask, 0.2)[0], False),
            lambda: learn("values", lambda t: openrlhf.ValueLoss(0.2)(t, x.old, x.returns, mask), False),  # type: ignore[union-attr]
        ),
        measured(
            "KL k3, bounded",
            lambda: bounded_kl(x.flat("logprobs"), x.flat("reference"), "k3"),
            lambda: verl.kl_penalty_forward(x.logprobs, x.reference, "k3"),
            lambda: openrlhf.kl(x.logprobs, x.reference, kl_estimator="k3"),  # type: ignore[union-attr]
        ),
    ]
    return found


Work = Callable[[], Any]


def spread(work: Work, repeats: int) -> Spread:
    work()  # page faults and caches
    return Spread.of([processor_ms(work) for _ in range(repeats)])


def loop_gae(x: Inputs) -> None:
    for rewards, values in zip(x.rewards[:LOOP_SAMPLES].tolist(), x.values[:LOOP_SAMPLES].tolist(), strict=True):
        out, running, following = [0.0] * len(rewards), 0.0, 0.0
        for t in reversed(range(len(rewards))):
            running = rewards[t] + GAMMA * following - values[t] + GAMMA * LAMBDA * running
            following = values[t]
            out[t] = running


def loop_ppo(x: Inputs) -> None:
    tensors = (t[:LOOP_SAMPLES].tolist() for t in (x.logprobs, x.old, x.advantages))
    total = 0.0
    for row in zip(*tensors, strict=True):
        slopes = []
        for new, old, a in zip(*row, strict=True):
            r = math.exp(new - old)
            cut = min(max(r, 0.8), 1.2)
            surrogate = min(r * a, cut * a)
            if a < 0:
                surrogate = max(surrogate, 3.0 * a)
            total -= surrogate
            slopes.append(-r * a if surrogate == r * a else 0.0)
