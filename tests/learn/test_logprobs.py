"""Chunked log-probabilities against torch's own log-softmax and autograd over the whole matrix."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from rlhfless_ray.learn.logprobs import TargetLogprobs, chunked_distillation, chunked_logprobs, nucleus_logprobs

WIDTH, VOCABULARY = 16, 53


def whole(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    distribution = torch.distributions.Categorical(logits=logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def case(kind: torch.dtype, tokens: int = 11) -> tuple[nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=kind)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(kind).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return head, hidden, targets, torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_and_gradients_are_those_of_the_whole_matrix(chunk: int, temperature: float) -> None:
    head, hidden, targets, a, b = case(torch.float64)
    inputs = (hidden, *head.parameters())
    found = chunked_logprobs(head, hidden, targets, chunk, temperature)
    expected = whole(head, hidden, targets, temperature)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    for left, right in ((a, b), (a, 0 * b), (0 * a, b)):
        slopes, exact = (torch.autograd.grad((left * x).sum() + (right * y).sum(), inputs, retain_graph=True) for x, y in (found, expected))
        for x, y in zip(slopes, exact, strict=True):
            torch.testing.assert_close(x, y)


def test_only_one_of_the_two_may_be_used() -> None:
    head, hidden, targets, a, _ = case(torch.float64)
    for k in (0, 1):
        (found,) = torch.autograd.grad((a * chunked_logprobs(head, hidden, targets, 4)[k]).sum(), hidden)
        (exact,) = torch.autograd.grad((a * whole(head, hidden, targets, 1.0)[k]).sum(), hidden)
        torch.testing.assert_close(found, exact)


def test_calls_of_the_head_without_tokens_change_nothing() -> None:
    """Another rank has more chunks, and each call gathers the head's weights: forward, and again backward."""
    head, hidden, targets, a, b = case(torch.float64)
    calls = []
    head.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    exact = torch.autograd.grad(sum((w * x).sum() for w, x in zip((a, b), chunked_logprobs(head, hidden, targets, 5), strict=True)), hidden)
    assert len(calls) == 2 * -(-len(targets) // 5)
    calls.clear()
    found = torch.autograd.grad(
        sum((w * x).sum() for w, x in zip((a, b), chunked_logprobs(head, hidden, targets, 5, 1.0, 7), strict=True)), hidden
    )
    torch.testing.assert_close(found, exact)
    assert len(calls) == 14 and calls.count(0) == 2 * (7 + -len(targets) // 5)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("teacher_vocabulary", [VOCABULARY, VOCABULARY - 6, VOCABULARY + 6])
def test_distillation_is_that_of_the_whole_matrix(chunk: int, teacher_vocabulary: int) -> None:
    head, hidden, targets, a, b = case(torch.float32)
    teacher = nn.Linear(5, teacher_vocabulary)
    taught = torch.randn(len(targets), 5, generator=torch.Generator().manual_seed(1))
    inputs = (hidden, *head.parameters())
    found = chunked_distillation(head, hidden, targets, teacher, taught, chunk)
    logprobs = head(hidden).log_softmax(-1)
    shared = min(VOCABULARY, teacher_vocabulary)
    q = teacher(taught)[:, :shared].softmax(-1).detach()
    expected = logprobs[torch.arange(len(targets)), targets], -(q * logprobs[:, :shared]).sum(-1)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    slopes, exact = (torch.autograd.grad((a * x).sum() + (b * y).sum(), inputs) for x, y in (found, expected))
    for x, y in zip(slopes, exact, strict=True):
        torch.testing.assert_close(x, y)


def test_the_closed_form_passes_gradcheck() -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: TargetLogprobs.apply(x, torch.tensor([0, 6, 2]), 0.8), logits)


@pytest.mark.parametrize(("kind", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_types(kind: torch.dtype, near: float) -> None:
    head, hidden, targets, a, b = case(kind)
    found, expected = chunked_logprobs(head, hidden, targets, 4, 0.9), whole(head, hidden, targets, 0.9)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)  # the same logits: only the softmax is computed otherwise
    inputs = (hidden, *head.parameters())
    slopes, exact = (torch.autograd.grad((a * x).sum() + (b * y).sum(), inputs) for x, y in (found, expected))
    for x, y in zip(slopes, exact, strict=True):
        assert x.dtype == kind
        assert float((x - y).abs().max()) <= near * float(y.abs().max())


def test_a_head_with_a_soft_cap_and_extreme_logits() -> None:
    class Capped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 30 * torch.tanh(self.inner(1000 * x) / 30)

    inner, hidden, targets, a, b = case(torch.float64)
    head = Capped(inner)
    found, expected = chunked_logprobs(head, hidden, targets, 3), whole(head, hidden, targets, 1.0)
    slopes, exact = (torch.autograd.grad((a * x).sum() + (b * y).sum(), inner.weight) for x, y in (found, expected))
    torch.testing.assert_close(slopes[0], exact[0])
    assert bool(torch.isfinite(chunked_logprobs(inner, 1e6 * hidden, targets, 100)[1]).all())


def test_a_token_that_cannot_be_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprob, entropy = TargetLogprobs.apply(logits, torch.tensor([1]), 1.0)
    assert float(logprob) == pytest.approx(-math.log(2)) and float(entropy) == pytest.approx(math.log(2))
    (slope,) = torch.autograd.grad(logprob + entropy, logits)
    torch.testing.assert_close(slope, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_a_broken_logit_is_not_hidden() -> None:
    logprob, entropy = TargetLogprobs.apply(torch.tensor([[0.0, math.nan]]), torch.tensor([0]), 1.0)
    assert math.isnan(float(logprob)) and math.isnan(float(entropy))


def test_no_graph_without_gradients_and_the_inputs_stay_as_they_are() -> None:
    head, hidden, targets, *_ = case(torch.float32)
    before = hidden.detach().clone()
    with torch.no_grad():
        found = chunked_logprobs(nn.Identity(), torch.randn(5, VOCABULARY), torch.zeros(5, dtype=torch.int64), 2, 0.5)
    assert not found[0].requires_grad
    logits = head(hidden).detach()
    kept = logits.clone()
    TargetLogprobs.apply(logits.requires_grad_(), targets, 1.0)[1].sum().backward()
    torch.testing.assert_close(logits.detach(), kept, rtol=0, atol=0)
    torch.testing.assert_close(hidden.detach(), before, rtol=0, atol=0)


def test_a_rank_without_tokens_still_calls_the_head() -> None:
    head, hidden, targets, *_ = case(torch.float32)
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    logprobs, entropies = chunked_logprobs(head, hidden[:0], targets[:0], 4)
    (logprobs.sum() + entropies.sum()).backward()
    assert len(calls) == 2 and not head.weight.grad.any()


def test_no_matrix_of_all_tokens_is_ever_made() -> None:
    """The largest tensor that any operation makes, forward or backward, is one chunk's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, Tensor):
                    self.most = max(self.most, x.numel())
            return out

    tokens = 256
    head, hidden, targets, a, b = case(torch.float32, tokens)
    with Largest() as seen:
        x, y = chunked_logprobs(head, hidden, targets, 8)
        ((a * x).sum() + (b * y).sum()).backward()
    assert seen.most == max(8 * VOCABULARY, tokens * WIDTH)
    with Largest() as naive:
        whole(head, hidden, targets, 1.0)
    assert naive.most == tokens * VOCABULARY


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.6, 0), (0.6, 5), (1.0, VOCABULARY + 9)])
def test_a_truncated_distribution_is_that_of_what_is_left(top_p: float, top_k: int) -> None:
    """Against transformers' own processors, which `generate` applies in this order."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    head, hidden, targets, _, _ = case(torch.float32, tokens=70)
    with torch.no_grad():
        left = TemperatureLogitsWarper(0.7)(targets, head(hidden))
        if top_k:
            left = TopKLogitsWarper(top_k)(targets, left)
        left = TopPLogitsWarper(top_p)(targets, left)
        targets[::2] = left[::2].argmax(-1)
        expected = torch.log_softmax(left, -1).gather(-1, targets[:, None]).squeeze(-1)
        found = nucleus_logprobs(head, hidden, targets, 0.7, top_p, top_k)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.isneginf().any() == (top_p < 1 or top_k < VOCABULARY) and not found[::2].isneginf().any()
