"""Corrections for the sampler's probabilities, against a loop over sequences written from the definitions."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.importance import binary_kl, correction_weights, importance_weights, probability_gap
from rlhfless_ray.learn.losses import clipped_loss, token_ratios
from rlhfless_ray.recipe.algorithm_sections import LossConfig

LEVELS: list[Any] = ["token", "seq"]
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def tokens(lengths: list[int], seed: int = 0, spread: float = 0.7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    learner, sampler = -spread * torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64) * 3
    return learner, sampler, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


def by_hand(c: LossConfig, learner: list[float], sampler: list[float]) -> tuple[list[float], list[bool]]:
    """Of the tokens of one sequence."""
    log_ratio = [a - b for a, b in zip(learner, sampler, strict=True)]
    ratios = [math.exp(x) for x in log_ratio]
    if c.correction_mode == "clip":
        clipped = [min(max(ratio, c.correction_low), c.correction_high) for ratio in ratios]
        return clipped, [a != b for a, b in zip(clipped, ratios, strict=True)]
    pairs = [(math.exp(b), math.exp(a)) for a, b in zip(learner, sampler, strict=True)]
    if c.correction_gating == "ratio":
        each = log_ratio
    elif c.correction_gating == "tv":
        each = [abs(p - q) for p, q in pairs]
    else:
        pairs = [(min(max(p, 1e-6), 1 - 1e-6), min(max(q, 1e-6), 1 - 1e-6)) for p, q in pairs]
        each = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in pairs]
    if c.correction_level == "seq" and each:
        each = [math.fsum(each) / len(each)] * len(each)
    if c.correction_gating == "ratio":
        each = [math.exp(x) for x in each]
    kept = [c.correction_low <= x <= c.correction_high for x in each]
    return [ratio if keep else 0.0 for ratio, keep in zip(ratios, kept, strict=True)], [not keep for keep in kept]


SECTIONS = [
    LossConfig(correction_level="token", correction_mode="clip", correction_low=0.8, correction_high=1.3),
    *(LossConfig(correction_level=level, correction_low=0.7, correction_high=1.4) for level in LEVELS),
    *(LossConfig(correction_level=level, correction_gating=kind, correction_high=0.1) for level in LEVELS for kind in ("tv", "binary_kl")),
]


@given(LENGTHS, st.integers(0, 50), st.sampled_from(SECTIONS))
@settings(max_examples=150, deadline=None)
def test_equals_the_loop(lengths: list[int], seed: int, section: LossConfig) -> None:
    learner, sampler, sequence = tokens(lengths, seed)
    weights, changed = correction_weights(section, learner, sampler, sequence, len(lengths))
    expected, expected_changed, at = [], [], 0
    for length in lengths:
        w, ch = by_hand(section, learner[at : at + length].tolist(), sampler[at : at + length].tolist())
        expected += w
        expected_changed += ch
        at += length
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert changed.tolist() == expected_changed


def test_a_sequence_is_judged_as_one_and_keeps_its_tokens_weights() -> None:
    """Ratios e and 1/e have geometric mean 1 and stay; e² twice is left out as a whole."""
    learner, sampler = torch.zeros(4), torch.tensor([-1.0, 1.0, -2.0, -2.0])
    c = LossConfig(correction_level="seq", correction_low=0.5)
    weights, changed = correction_weights(c, learner, sampler, torch.tensor([0, 0, 1, 1]), 2)
    torch.testing.assert_close(weights, torch.tensor([math.e, 1 / math.e, 0.0, 0.0]))
    assert changed.tolist() == [False, False, True, True]


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflowing_ratio_is_left_out_without_nan(level: Any) -> None:
    learner = torch.zeros(2, requires_grad=True)
    c = LossConfig(correction_level=level, correction_low=0.5)
    weights, _ = correction_weights(c, learner, torch.tensor([-1000.0, 0.0]), torch.tensor([0, 1]), 2)
    assert weights.tolist() == [0.0, 1.0] and not weights.requires_grad
    (weights * learner.exp()).sum().backward()
    assert learner.grad.tolist() == [0.0, 1.0]


def test_micro_batches_of_whole_sequences_change_nothing() -> None:
    lengths = [3, 0, 5, 1, 4]
    learner, sampler, sequence = tokens(lengths, 3)
    for level in LEVELS:
        c = LossConfig(correction_level=level, correction_gating="binary_kl", correction_high=0.2)
        whole, _ = correction_weights(c, learner, sampler, sequence, 5)
        parts = []
        for first, last in ((0, 2), (2, 5)):
            mine = (sequence >= first) & (sequence < last)
            parts.append(correction_weights(c, learner[mine], sampler[mine], sequence[mine] - first, last - first)[0])
        torch.testing.assert_close(torch.cat(parts), whole)


def test_binary_kl_is_that_of_two_coins() -> None:
    p, q = torch.tensor([0.3, 0.9, 0.5]), torch.tensor([0.6, 0.1, 0.5])
    exact = torch.distributions.kl_divergence(torch.distributions.Bernoulli(p), torch.distributions.Bernoulli(q))
    torch.testing.assert_close(binary_kl(p.log(), q.log()), exact)
    assert bool(torch.isfinite(binary_kl(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]))).all())


def test_half_precision_is_widened_and_empty_is_fine() -> None:
    x = torch.tensor([-1.0], dtype=torch.bfloat16)
    weights, _ = correction_weights(LossConfig(correction_level="token"), x, x, torch.zeros(1, dtype=torch.int64), 1)
    assert weights.dtype == torch.float32
    nothing = torch.zeros(0)
    for level in LEVELS:
        c = LossConfig(correction_level=level)
        assert correction_weights(c, nothing, nothing, torch.zeros(0, dtype=torch.int64), 0)[0].shape == (0,)


@pytest.mark.parametrize("moved", [0.0, 0.05, 2.0], ids=["first optimizer step", "within the clip", "beyond the clip"])
def test_the_objective_is_decoupled_ppo(moved: float) -> None:
    """AReaL's objective (arXiv 2505.24298), over all three actions of a policy, for responses of an older version.

    The clip is measured from the proximal policy, the weights from the version that drew the action. So the expected gradient is that
    of the newest policy's reward in closed form, π(a)·(A(a) - mean of A), where the clip cuts nothing.
    """
    behavior, proximal = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.0, 1.0, -1.0], [0.5, 0.2, -0.3]))
    advantages = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    logits = (proximal + moved * torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)).requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = importance_weights(proximal, behavior, math.inf)
    loss, clipped = clipped_loss(token_ratios(logprobs, proximal), advantages, 0.2, 0.2)
    objective = -(behavior.exp() * weights * loss).sum()
    ratio, clip = logprobs.exp() / proximal.exp(), (logprobs.exp() / proximal.exp()).clamp(0.8, 1.2)
    assert objective.item() == pytest.approx((proximal.exp() * torch.minimum(ratio * advantages, clip * advantages)).sum().item())
    objective.backward()
    policy = logprobs.exp().detach()
    wanted = policy * (advantages - (policy * advantages).sum())
    assert clipped.any() == (moved == 2.0)
    assert torch.allclose(logits.grad, wanted) == (moved < 2.0)
    coupled, _ = clipped_loss(token_ratios(logprobs.detach(), behavior), advantages, 0.2, 0.2)
    assert (behavior.exp() * coupled).sum().item() != pytest.approx(-objective.item()), (
        "clipped from the old version it is another objective"
    )


@pytest.mark.parametrize("logprob", [0.0, -1e-9, -1e-4, -0.01, -0.3, -3.0, -10.4, -13.0, -80.0])
@pytest.mark.parametrize("gap", [0.0, 1e-7, -1e-7, 1e-5, -3e-4, 0.02, -2.0])
def test_binary_kl_equals_its_formula_in_fifty_digits(logprob: float, gap: float) -> None:
    """In float32 the plain formula loses every digit where both probabilities agree up to rounding."""
    sampler, learner = (torch.tensor([min(x, 0.0)], dtype=torch.float32) for x in (logprob, logprob + gap))
    with mpmath.workdps(50):
        p, q = (min(max(mpmath.exp(mpmath.mpf(x.item())), mpmath.mpf("1e-6")), 1 - mpmath.mpf("1e-6")) for x in (sampler, learner))
        exact = float(p * mpmath.log(p / q) + (1 - p) * mpmath.log((1 - p) / (1 - q)))
    found = binary_kl(sampler, learner)
    assert found.dtype == torch.float32 and float(found) >= 0
    assert float(found) == pytest.approx(exact, rel=1e-5, abs=1e-17)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gating", ["binary_kl", "tv"])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 3e-6])
def test_no_token_is_left_out_where_engine_and_learner_agree(level: Any, gating: Any, noise: float) -> None:
    generator = torch.Generator().manual_seed(3)
    learner = -torch.rand(8000, generator=generator).pow(3) * 9
    sampler = (learner + noise * torch.randn(8000, generator=generator)).clamp(max=0)
    section = LossConfig(correction_level=level, correction_gating=gating, correction_high=0.002)
    sequence = torch.arange(2000).repeat_interleave(4)
    weights, left_out = correction_weights(section, learner, sampler, sequence, 2000)
    assert not left_out.any() and torch.allclose(weights, torch.ones(8000), atol=1e-4)


@pytest.mark.parametrize("logprob", [-1e-7, -1e-4, -0.3])
def test_the_gap_of_two_probabilities_keeps_its_digits(logprob: float) -> None:
    """At probabilities near 1 the difference of two float32 numbers is a multiple of 6e-8, and a bound of 1e-7 compares with that."""
    sampler = torch.full((4,), logprob)
    learner = (sampler - torch.tensor([1e-7, 3e-7, 1e-5, 0.2])).clamp(max=0)
    exact = (sampler.double().exp() - learner.double().exp()).abs()
    torch.testing.assert_close(probability_gap(sampler, learner).double(), exact, rtol=1e-5, atol=0)
