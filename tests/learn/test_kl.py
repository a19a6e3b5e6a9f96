"""Bounds, and gradients against exact expectations over a whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhfless_ray.learn.kl_estimators import bounded_kl, mean_kl, token_kl, unbiased_kl

ESTIMATORS = ["k1", "k2", "k3"]


def policies(seed: int, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, log-probabilities of the reference and of the older policy that sampled."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference, older = torch.randn(3, size, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(reference, -1), torch.log_softmax(logits.detach() + 0.3 * older, -1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_gradient_is_that_of_the_kl(estimator: str, seed: int, off_policy: bool) -> None:
    """The mean of the per-token gradients over what the sampler draws, token by token of the vocabulary."""
    logits, reference, older = policies(seed)
    policy = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    sampler = older if off_policy else policy.detach()
    loss = unbiased_kl(policy, reference, older if off_policy else None, estimator, limit=1e9, weight_limit=1e9)
    (found,) = torch.autograd.grad((sampler.exp() * loss).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_plain_k1_and_k3_do_not_have_that_gradient(estimator: str) -> None:
    logits, reference, _ = policies(0)
    policy = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad(
        (policy.detach().exp() * bounded_kl(policy, reference, estimator, None)).sum(), logits, retain_graph=True
    )
    assert float((found - exact).abs().max()) > 0.05
    if estimator == "k1":
        torch.testing.assert_close(found, torch.zeros_like(found))
    else:  # that of the KL the other way round
        (reverse,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
        torch.testing.assert_close(found, reverse)


def test_k3_of_nearly_equal_policies_is_not_rounded_away() -> None:
    difference = torch.tensor([1e-3, -1e-4, 1e-5])
    torch.testing.assert_close(bounded_kl(difference, torch.zeros(3), "k3"), difference**2 / 2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_unbiased_form_has_the_bounded_value(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference, older = -4 * torch.rand(3, 50, generator=generator)
    policy = policy.requires_grad_()
    torch.testing.assert_close(unbiased_kl(policy, reference, older, estimator), bounded_kl(policy, reference, estimator))


def test_the_weight_of_the_unbiased_gradient_is_cut() -> None:
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = unbiased_kl(policy, torch.tensor([-3.0, -3.0]), torch.tensor([-9.0, -1.5]), "k3")
    (slope,) = torch.autograd.grad(loss.sum(), policy)
    torch.testing.assert_close(slope, torch.tensor([10 * 2.0, 2.0 * float(torch.tensor(0.5).exp())]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_are_cut_and_stay_finite(estimator: str) -> None:
    difference = torch.tensor([-1000.0, -50.0, -3.0, 0.0, 2.0, 1000.0], dtype=torch.float64)
    policy = (difference - 1).requires_grad_()
    found = bounded_kl(policy, torch.full_like(difference, -1.0), estimator)
    exact = {"k1": difference, "k2": difference**2 / 2, "k3": torch.special.expm1(-difference) + difference}[estimator]
    torch.testing.assert_close(found.detach(), exact.clamp(-10, 10), atol=1e-12, rtol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert bool(torch.isfinite(gradient).all())
    assert not gradient[[0, 1, 5]].any(), "cut values have no gradient"
    expected = {"k1": torch.ones(6), "k2": difference, "k3": 1 - torch.exp(-difference)}[estimator]
    torch.testing.assert_close(gradient[2:5], expected[2:5].double() * (exact[2:5].abs() < 10))


@pytest.mark.parametrize("limit", [0.3, 0.72, 1.0, 1.2, 1.3, 3.0])
def test_every_limit_cuts_at_the_limit(limit: float) -> None:
    """k3 is below its limit at d = -limit for limits between 0.72 and 1.26, so a difference that is cut there has too small a value."""
    difference = torch.linspace(-4, 4, 81, dtype=torch.float64)
    exact = (torch.special.expm1(-difference) + difference).clamp(max=limit)
    torch.testing.assert_close(bounded_kl(difference, torch.zeros_like(difference), "k3", limit), exact)
    np.testing.assert_allclose(token_kl(difference.numpy(), np.zeros(81), "k3", limit), exact.numpy(), rtol=1e-12, atol=1e-15)


def test_half_precision_is_widened() -> None:
    policy, reference = torch.tensor([-1.0078125], dtype=torch.bfloat16), torch.tensor([-1.0], dtype=torch.bfloat16)
    for found in (bounded_kl(policy, reference, "k3"), unbiased_kl(policy, reference, None, "k3")):
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(0.0078125**2 / 2, rel=0.01)
    assert bounded_kl(torch.zeros(0), torch.zeros(0), "k2").shape == (0,)


def test_a_sample_without_tokens_has_no_part_in_the_mean_kl() -> None:
    """The mean of nothing is NaN, and a controller ignores a KL of NaN: its coefficient would never change."""
    kl = np.array([0.1, 0.3, 0.6], np.float32)
    assert mean_kl(kl, np.array([0, 2, 0, 1])) == pytest.approx(0.4)
    assert np.isnan(mean_kl(kl[:0], np.array([0, 0])))
