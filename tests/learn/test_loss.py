"""The loss against a reference written per token with if and else, and against exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.importance import importance_weights
from rlhfless_ray.learn.kl_estimators import bounded_kl
from rlhfless_ray.learn.losses import clipped_loss, token_ratios, token_weights

TOKEN = st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3, allow_subnormal=False))


def one_token(logprob: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-probability, and whether the ratio was clipped, of one token."""
    ratio = math.exp(logprob - old)
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


@given(st.lists(TOKEN, min_size=1, max_size=12), st.floats(0.05, 0.5), st.floats(0.05, 0.9))
def test_clipped_loss_and_gradient_equal_the_cases_by_hand(tokens: list, low: float, high: float) -> None:
    logprobs, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss, clipped = clipped_loss(token_ratios(logprobs, old), advantages, low, high)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    expected = [one_token(*token, low, high) for token in tokens]
    torch.testing.assert_close(loss.detach(), torch.tensor([e[0] for e in expected], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([e[1] for e in expected], dtype=torch.float64))
    assert clipped.tolist() == [e[2] for e in expected]


def test_first_step_of_a_batch_has_the_policy_gradient() -> None:
    """Old policy = current policy: loss -A, gradient -A, nothing clipped, whichever side A is on."""
    logprobs = torch.tensor([-0.5, -2.0, -1.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    loss, clipped = clipped_loss(token_ratios(logprobs, logprobs.detach()), advantages, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(loss.detach(), -advantages)
    torch.testing.assert_close(gradient, -advantages)
    assert not clipped.any()


def two_policies(seed: int, size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.log_softmax(torch.randn(size, generator=generator, dtype=torch.float64), -1) for _ in range(2))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(5))
def test_k1_and_k3_are_unbiased(estimator: str, seed: int) -> None:
    """The expectation over the whole vocabulary, token by token, is KL(policy ‖ reference) itself."""
    p, q = two_policies(seed)
    exact = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    expectation = (p.exp() * bounded_kl(p, q, estimator, None)).sum()
    torch.testing.assert_close(expectation, exact)


def test_k2_is_the_second_order_term() -> None:
    """For policies that differ by h, E[k2] differs from the KL by the order of h³ only."""
    p, _ = two_policies(0)
    direction = torch.randn(7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    errors = []
    for h in (0.1, 0.05):
        q = torch.log_softmax(p + h * direction, -1)
        exact = (p.exp() * (p - q)).sum()
        errors.append(abs(float((p.exp() * bounded_kl(p, q, "k2", None)).sum() - exact)))
    assert errors[0] < 0.1**2 * 0.1
    assert errors[1] / errors[0] == pytest.approx(1 / 8, rel=0.2)


@given(st.floats(-20, 0), st.floats(-20, 0))
@settings(deadline=None)
def test_k2_and_k3_are_never_negative(a: float, b: float) -> None:
    p, q = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    assert bounded_kl(p, q, "k2", None) >= 0
    assert bounded_kl(p, q, "k3", None) >= -1e-12 * math.exp(abs(a - b))
    assert bounded_kl(p, p, "k1", None) == bounded_kl(p, p, "k2", None) == bounded_kl(p, p, "k3", None) == 0


def test_gradients_of_the_estimators() -> None:
    """By the log-probability: 1, d and 1 - exp(-d)."""
    d = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64)
    for estimator, expected in (("k1", torch.ones_like(d)), ("k2", d), ("k3", 1 - torch.exp(-d))):
        logprobs = (d - 1.0).requires_grad_()
        (gradient,) = torch.autograd.grad(bounded_kl(logprobs, torch.full_like(d, -1.0), estimator, None).sum(), logprobs)
        torch.testing.assert_close(gradient, expected)


def test_importance_weights_are_capped_and_let_no_gradient_through() -> None:
    learner = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = importance_weights(learner, torch.tensor([-1.5, -3.0, -0.5]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.5), 2.0, math.exp(-0.5)]))
    assert not weights.requires_grad
    off = importance_weights(learner, torch.tensor([-1.5, -3.0, -0.5]), 0)
    torch.testing.assert_close(off, torch.ones(3))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
@settings(deadline=None)
def test_token_weights_make_the_wanted_mean(lengths: list[int]) -> None:
    values = [torch.randn(n, dtype=torch.float64) for n in lengths]
    whole = torch.tensor(lengths)
    weighted = {
        mean: float(sum(w * v.sum() for w, v in zip(token_weights(whole, mean), values, strict=True))) for mean in ("token", "sequence")
    }
    assert weighted["token"] == pytest.approx(float(torch.cat(values).mean()), abs=1e-12)
    assert weighted["sequence"] == pytest.approx(float(torch.stack([v.mean() for v in values]).mean()), abs=1e-12)
