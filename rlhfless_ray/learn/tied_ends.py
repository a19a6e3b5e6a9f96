"""Compute the gradient of embeddings that are also the output head in one tensor, at the end of the backward pass.

Autograd computes the head's part first and holds it while the layers' activations are still there. At the end it adds a second tensor of
the same size, in which only the rows of the micro-batch's tokens are not zero. For Qwen2.5-0.5B each of the two is 0.27 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class TiedEnds:
    """Embeddings and output head of one model, in a training pass. The gradient is bitwise equal to autograd's on CPU.

    The backward pass must follow the forward pass before the next one, as DeepSpeed demands too.
    """

    def __init__(self, embeddings: nn.Embedding, before_gradient: Callable[[], None]) -> None:
        """`before_gradient`: called in the backward pass once the layers' activations are free, before the gradient is computed."""
        self.weight, self.padding = embeddings.weight, embeddings.padding_idx
        self.before_gradient = before_gradient
        self.waiting: list[tuple[Tensor, Tensor]] = []  # gradient of the logits, and states, of calls of the head
        self.of_head: Tensor | None = None  # the weights' gradient from the calls before those

    @classmethod
    def install(cls, model: Any, before_gradient: Callable[[], None]) -> bool:
        """Change the model's two modules in place. Returns False, and changes nothing, if they are not torch's own or not tied."""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        if type(embeddings) is not nn.Embedding or type(head) is not nn.Linear or head.bias is not None:
            return False
        if head.weight is not embeddings.weight or not head.weight.requires_grad:
            return False
        if embeddings.max_norm is not None or embeddings.sparse or embeddings.scale_grad_by_freq:
            return False
        ends = cls(embeddings, before_gradient)
        embeddings.forward, head.forward = ends.embed, ends.logits  # type: ignore[method-assign]
        return True

    def embed(self, ids: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.waiting, self.of_head = [], None
        return _Embedding.apply(ids, self.weight, self)

    def logits(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(hidden, self.weight)
        return _Head.apply(hidden, self.weight.detach(), self)

    def wait(self, of_logits: Tensor, hidden: Tensor) -> None:
        """Add a call of the head to the gradient, later if its logits take less memory than the weights."""
        self.waiting.append((of_logits, hidden))
        if sum(len(states) for _, states in self.waiting) > self.weight.shape[1]:
            self._add_head()

    def _add_head(self) -> None:
        while self.waiting:
            of_logits, hidden = self.waiting.pop(0)
            part = of_logits.t().mm(hidden)
            self.of_head = part if self.of_head is None else self.of_head.add_(part)

    def gradient(self, of_embedded: Tensor, ids: Tensor) -> Tensor:
        """Return the weights' gradient. `of_embedded` (…, width): of the embeddings of `ids` (…)."""
        self.before_gradient()
        self._add_head()
        total, self.of_head = self.of_head, None
        padding = -1 if self.padding is None else self.padding
        if total is None:  # the pass did not reach the head
            return torch.ops.aten.embedding_dense_backward(of_embedded, ids, len(self.weight), padding, False)
        tokens, numbers = torch.unique(ids, return_inverse=True)
        padding = next(iter(torch.nonzero(tokens == padding).flatten().tolist()), -1)
        rows = torch.ops.aten.embedding_dense_backward(of_embedded, numbers, len(tokens), padding, False)
        return total.index_add_(0, tokens, rows)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, ends: TiedEnds) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.ends = ends
        return functional.embedding(ids, weight, ends.padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        return None, ctx.ends.gradient(gradient, *ctx.saved_tensors), None


class _Head(torch.autograd.Function):
    """The output head. `_Embedding`, whose backward pass comes last, returns the gradient of its weights too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ends: TiedEnds) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.ends = ends
        return functional.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        ctx.ends.wait(gradient, hidden)
        return gradient.mm(weight), None, None
