"""The gradient of embeddings that are also the output head, beside autograd's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhfless_ray.learn.tied_ends import TiedEnds

WIDTH, VOCABULARY = 24, 300


class TinyModel(nn.Module):
    """Embeddings, one layer, and a head that is called on a few states at a time and again in the backward pass."""

    def __init__(self, dtype: torch.dtype, padding: int | None, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embeddings.weight
        self.to(dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor, states: int, chunk: int) -> Tensor:
        hidden = torch.tanh(self.layer(self.embeddings(ids))).flatten(0, 1)[:states]

        def part(states: Tensor) -> Tensor:
            return torch.log_softmax(self.head(states), -1).square().sum(-1)

        return torch.cat([checkpoint(part, piece, use_reentrant=False) for piece in hidden.split(chunk)])


def gradients(dtype: torch.dtype, padding: int | None, states: int, chunk: int, install: bool) -> tuple[list[Tensor | None], int]:
    """Return the gradients that two passes add up to, and how often `before_gradient` was called."""
    model, calls = TinyModel(dtype, padding), []
    assert not install or TiedEnds.install(model, lambda: calls.append(1))
    with torch.no_grad():
        model(torch.arange(5)[None], 5, 5)
    for seed in range(2):
        ids = torch.randint(0, 9, (2, 30), generator=torch.Generator().manual_seed(seed))  # few tokens, so each occurs often
        model(ids, states, chunk).sum().backward()
    return [parameter.grad for parameter in model.parameters()], len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(("states", "chunk"), [(20, 20), (20, 7), (60, 60), (60, 10)])
def test_gradients_are_autograd_s_bit_for_bit(dtype: torch.dtype, padding: int | None, states: int, chunk: int) -> None:
    expected, _ = gradients(dtype, padding, states, chunk, install=False)
    found, calls = gradients(dtype, padding, states, chunk, install=True)
    assert calls == 2
    for mine, other in zip(found, expected, strict=True):
        assert mine is not None and other is not None and mine.layout == other.layout == torch.strided
        assert torch.equal(mine, other)


def test_a_pass_that_does_not_reach_the_head_trains_the_embeddings() -> None:
    found = []
    for install in (False, True):
        model = TinyModel(torch.float32, 3)
        assert not install or TiedEnds.install(model, lambda: None)
        model.layer(model.embeddings(torch.tensor([[1, 3, 1]]))).square().sum().backward()
        found.append(model.embeddings.weight.grad)
    assert torch.equal(*found)


def test_other_ends_stay_as_they_are() -> None:
    class Scaled(nn.Embedding):
        pass

    others: list[Any] = [TinyModel(torch.float32, None, tied=False), TinyModel(torch.float32, None), TinyModel(torch.float32, None)]
    others[1].embeddings.weight.requires_grad_(False)
    others[2].embeddings = Scaled(VOCABULARY, WIDTH, _weight=others[2].head.weight)
    for model in others:
        assert not TiedEnds.install(model, lambda: None)
        assert "forward" not in vars(model.embeddings) and "forward" not in vars(model.head)
