"""Dual clip, sequence ratios and the critic's loss by cases; and every loss in parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhfless_ray.learn.losses import clipped_loss, sequence_ratios, token_ratios, token_weights, value_loss

RATIO_ADVANTAGE = st.tuples(st.floats(0.01, 20), st.floats(-3, 3))


@given(st.lists(RATIO_ADVANTAGE, min_size=1, max_size=10), st.floats(1.01, 10))
def test_dual_clip_by_cases(pairs: list[tuple[float, float]], dual: float) -> None:
    assume(all(abs(r - edge) > 1e-9 for r, _ in pairs for edge in (0.8, 1.3, dual)))  # at a corner the slope is anything between
    ratios, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    ratios.requires_grad_()
    loss, clipped = clipped_loss(ratios, advantages, 0.2, 0.3, dual)
    (slope,) = torch.autograd.grad(loss.sum(), ratios)
    for (r, a), one, d, cut in zip(pairs, loss.tolist(), slope.tolist(), clipped.tolist(), strict=True):
        if a > 0:
            expected, by_ratio = (-1.3 * a, 0.0) if r > 1.3 else (-r * a, -a)
        elif r < 0.8:
            expected, by_ratio = -0.8 * a, 0.0
        elif r > dual:
            expected, by_ratio = -dual * a, 0.0
        else:
            expected, by_ratio = -r * a, -a
        assert one == pytest.approx(expected, abs=1e-12) and d == pytest.approx(by_ratio, abs=1e-12)
        assert cut == ((a > 0 and r > 1.3) or (a < 0 and r < 0.8))


def test_a_far_policy_has_a_finite_loss_and_no_gradient() -> None:
    logprobs = torch.tensor([0.0, -500.0, -1.0], requires_grad=True)
    ratios = token_ratios(logprobs, torch.tensor([-500.0, 0.0, -1.5]))
    torch.testing.assert_close(ratios.detach(), torch.tensor([math.exp(20), math.exp(-20), math.exp(0.5)]))
    loss, _ = clipped_loss(ratios, torch.tensor([0.0, -1.0, 1.0]), 0.2, 0.8)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -math.exp(0.5)]))
    near = torch.randn(20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(token_ratios(near, torch.zeros(20)), near.exp())


def ragged(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, sum(lengths), generator=generator, dtype=torch.float64)
    old = logprobs + 0.3 * old
    return logprobs, old, advantages, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 20))
def test_gspo_is_the_papers_objective(lengths: list[int], seed: int) -> None:
    """Equation 5: the mean over sequences of min(s·A, clip(s)·A), s the length-normalised likelihood ratio; and its gradient
    in closed form, s·A/|y|·∇log π per token of what is not clipped."""
    logprobs, old, _, sequence = ragged(lengths, seed)
    logprobs.requires_grad_()
    advantage = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    weights = token_weights(torch.tensor(lengths), "sequence")
    ratios = sequence_ratios(logprobs, old, sequence, len(lengths))
    loss, _ = clipped_loss(ratios, advantage[sequence], 0.1, 0.15)
    total = (weights[sequence] * loss).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    with_tokens = sum(n > 0 for n in lengths)
    expected, slopes, at = 0.0, [], 0
    for n, a in zip(lengths, advantage.tolist(), strict=True):
        if not n:
            continue
        s = math.prod(math.exp(float(x)) for x in (logprobs - old)[at : at + n]) ** (1 / n)
        within = min(max(s, 0.9), 1.15)
        expected -= min(s * a, within * a) / with_tokens
        slopes += [-s * a / n / with_tokens if s * a <= within * a else 0.0] * n
        at += n
    assert float(total.detach()) == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), atol=1e-10, rtol=1e-8)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=10), st.floats(0.05, 2))
def test_value_loss_by_cases(rows: list[tuple[float, float, float]], clip: float) -> None:
    values, old, returns = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))
    loss, clipped = value_loss(values, old, returns, clip)
    plain, none = value_loss(values, old, returns, None)
    for i, (v, o, r) in enumerate(rows):
        near = o + min(max(v - o, -clip), clip)
        assert float(loss[i]) == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, abs=1e-12)
        assert float(plain[i]) == pytest.approx((v - r) ** 2 / 2, abs=1e-12)
        assert bool(clipped[i]) == (near != v and float((near - r) ** 2) > float((v - r) ** 2)) or abs(near - v) < 1e-12
    assert not none.any()


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("form", ["ppo", "gspo", "value"])
@pytest.mark.parametrize("cut", [(1, 5), (2, 5), (1, 2, 3, 4, 5)])
def test_the_parts_add_up_to_the_whole(mean: str, form: str, cut: tuple[int, ...]) -> None:
    """Loss and gradient of any cut of the sequences into micro-batches or ranks, one of them without a token."""
    lengths = [4, 0, 1, 7, 3]
    logprobs, old, advantages, sequence = ragged(lengths)
    weights = token_weights(torch.tensor(lengths), mean)

    def part(first: int, last: int, x: torch.Tensor) -> torch.Tensor:
        mine = (sequence >= first) & (sequence < last)
        own = sequence[mine] - first
        if form == "value":
            loss = value_loss(x[mine], old[mine], advantages[mine], 0.1)[0]
        else:
            pair = x[mine], old[mine]
            ratios = token_ratios(*pair) if form == "ppo" else sequence_ratios(*pair, own, last - first)
            loss = clipped_loss(ratios, advantages[mine], 0.2, 0.2)[0]
        return (weights[sequence[mine]] * loss).sum()

    def total(bounds: tuple[int, ...]) -> tuple[float, torch.Tensor]:
        x = logprobs.clone().requires_grad_()
        loss = torch.stack([part(a, b, x) for a, b in zip((0, *bounds[:-1]), bounds, strict=True)]).sum()
        loss.backward()
        return float(loss.detach()), x.grad

    whole, whole_gradient = total((5,))
    parts, parts_gradient = total(cut)
    assert parts == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(parts_gradient, whole_gradient)


def test_a_sequence_without_tokens_takes_no_share() -> None:
    torch.testing.assert_close(token_weights(torch.tensor([2, 0, 4]), "sequence")[[0, 2]], torch.tensor([0.25, 0.125]).double())
    assert not torch.isnan(token_weights(torch.tensor([0, 0]), "sequence")).any()


def test_empty_tensors_and_types() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert sequence_ratios(nothing, nothing, none, 0).shape == (0,)
    assert clipped_loss(nothing, nothing, 0.2, 0.2, 3.0)[0].shape == (0,)
    assert value_loss(nothing, nothing, nothing, 0.2)[0].shape == (0,)
    for kind in (torch.float32, torch.float64):
        x = torch.zeros(2, dtype=kind)
        assert sequence_ratios(x, x, torch.zeros(2, dtype=torch.int64), 1).dtype == kind


def test_a_value_within_the_clip_is_not_counted_as_clipped() -> None:
    """Both errors are those of the same value, and rounding makes the clipped one the larger for a fifth of the tokens."""
    values, old, returns = 0.3 * torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    within = (values - old).abs() < 0.49
    _, clipped = value_loss(values, old, returns, 0.5)
    assert not bool(clipped[within].any()) and bool(clipped.any())
