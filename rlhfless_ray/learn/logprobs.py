"""Compute log-probabilities and entropies of given tokens, without the logits of all of them at once.

With a vocabulary of 150,000 the float32 logits of 8,192 tokens are 5 GB, and a plain log-softmax with its gradient holds several
such matrices. Here the head runs on a few tokens at a time, forward and again backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from rlhfless_ray.common.nucleus import nucleus

CHUNK_BYTES = 1 << 28  # size of one chunk's float32 logits; on GPU a chunk needs about three times as much
CHUNK_START = ContextVar("position of the first token that the output head computes now", default=0)
BLOCK_BYTES = 1 << 23  # size of the rows of a chunk that are in float32 at once on CPU


def chunked_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk_tokens: int, temperature: float = 1.0, least_calls: int = 1
) -> tuple[Tensor, Tensor]:
    """Return log softmax(head(hidden) / temperature) at the targets, and the entropy of that distribution.

    Both are differentiable and (tokens,) float32 (float64 for a float64 head). The gradient is exact. A bfloat16 head's weights get
    it summed over the chunks in bfloat16.

    Args:
        head: the model's output head, hidden (tokens, width) → logits (tokens, vocabulary). It is called as a module, once per chunk
            forward and, if gradients are needed, once more backward. So adapters, biases, soft caps and ZeRO 3's gathering of
            weights work as in the model.
        hidden: (tokens, width).
        targets: (tokens,) int64.
        chunk_tokens: tokens per chunk, see `tokens_per_chunk`.
        least_calls: number of calls of the head, without tokens if there are fewer chunks.
    """

    def part(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return TargetLogprobs.apply(head(h), t, temperature)

    return _in_chunks(part, chunk_tokens, least_calls, hidden, targets)


def tokens_per_chunk(vocabulary: int) -> int:
    """Return how many tokens' logits fit into CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def _in_chunks(part: Callable[..., tuple[Tensor, Tensor]], size: int, least_calls: int, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """Call `part` on `size` rows of these tensors at a time, and join its results. The backward pass calls it again."""

    def placed(number: int, *piece: Tensor) -> tuple[Tensor, Tensor]:
        before = CHUNK_START.set(number * size)
        try:
            return part(*piece)
        finally:
            CHUNK_START.reset(before)

    pieces = list(zip(*(tensor.split(size) for tensor in rows), strict=True))
    pieces += [tuple(tensor[:0] for tensor in rows)] * (least_calls - len(pieces))
    if torch.is_grad_enabled():
        done = [checkpoint(placed, number, *piece, use_reentrant=False, preserve_rng_state=False) for number, piece in enumerate(pieces)]
    else:
        done = [placed(number, *piece) for number, piece in enumerate(pieces)]
    first, second = zip(*done, strict=True)
    return torch.cat(first), torch.cat(second)


def chunked_distillation(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    teacher_head: Callable[[Tensor], Tensor],
    teacher_hidden: Tensor,
    chunk_tokens: int,
    least_calls: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the cross-entropy -Σ q·log p of the head's distribution p with the teacher's q, both (tokens,) float32.

    Arguments as in `chunked_logprobs`. The gradient flows to the head and to `hidden` only. If the heads have different sizes, the extra
    logits belong to no token: those of the teacher are dropped, and those that it lacks count as -inf.
    """

    def part(h: Tensor, t: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(head(h).float(), dim=-1)
        with torch.no_grad():
            logits = teacher_head(taught).float()[:, : logprobs.shape[1]]
            q = pad(torch.softmax(logits, dim=-1), (0, logprobs.shape[1] - logits.shape[1]))
        return logprobs.gather(-1, t[:, None]).squeeze(-1), -torch.linalg.vecdot(q, logprobs)

    return _in_chunks(part, chunk_tokens, least_calls, hidden, targets, teacher_hidden)


NUCLEUS_TOKENS = 32


def nucleus_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: float, top_p: float, top_k: int = 0
) -> Tensor:
    """Return the targets' log-probabilities (tokens,) in the distribution of top-k and top-p sampling, -inf outside of it.

    Arguments as in `chunked_logprobs`; no gradient. The head is called once; the rest works on NUCLEUS_TOKENS tokens at a time.
    """
    parts = []
    for logits, target in zip(head(hidden).split(NUCLEUS_TOKENS), targets.split(NUCLEUS_TOKENS), strict=True):
        logprobs = torch.log_softmax(_scaled(logits, temperature), dim=-1)
        rows = torch.ones(len(logprobs), dtype=torch.float64, device=logprobs.device)
        kept = nucleus(logprobs, top_p * rows, (top_k * rows).long())
        cut = logprobs.masked_fill(~kept, -torch.inf)
        parts.append((cut - cut.logsumexp(-1, keepdim=True)).gather(-1, target[:, None]).squeeze(-1))
    return torch.cat(parts)


class TargetLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies (tokens,) of one chunk of logits (tokens, vocabulary), with the gradient in closed form.

    With z = logits / T and p = softmax(z): ∂log p_t/∂z = onehot(t) - p and ∂H/∂z = -p·(z - E_p[z]). Keeps only the logits, in their
    own dtype; autograd's graph would keep three float32 matrices.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        parts = [_target_logprobs(rows, ids, temperature) for rows, ids in _blocks(logits, targets)]
        logprobs, total, mean = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ctx.save_for_backward(logits, targets, total, mean)
        ctx.temperature = temperature
        return logprobs, total - mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, targets, total, mean = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for out, *rows in _blocks(gradient, logits, targets, total, mean, *gradients):
            out.copy_(_slope(rows, ctx.temperature))
        return gradient, None, None


def _blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows of all these tensors at a time. Rows do not depend on each other, and float32 copies of few are small."""
    rows = max(1, BLOCK_BYTES // (4 * logits.shape[-1])) if logits.device.type == "cpu" else max(1, len(logits))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def _target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the targets, log Σ exp z, and E_p[z]."""
    z = _scaled(logits, temperature)
    total = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(-1, targets[:, None]).squeeze(-1) - total
    p = z.sub(total[:, None]).exp_()
    return logprobs, total, torch.linalg.vecdot(p, _finite(z))


def _slope(rows: list[Tensor], temperature: float) -> Tensor:
    """Return the gradient of the logits. `rows`: of logits, targets, log Σ exp z, E_p[z], and the gradients of both results."""
    logits, targets, total, mean, by_logprob, by_entropy = rows
    z = _scaled(logits, temperature)
    p = z.sub(total[:, None]).exp_()
    # -p·(g + h·(z - mean)), and g more at the target
    slope = _finite(z).sub_(mean[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None]).mul_(p).neg_()
    slope.scatter_add_(-1, targets[:, None], by_logprob[:, None])
    return slope.div_(temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in at least float32, as a new tensor."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide, copy=True).div_(temperature)


def _finite(z: Tensor) -> Tensor:
    """Replace -inf in place: a token that cannot be drawn has p = 0 and must contribute 0, not 0·(-inf)."""
    return z.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=0.0)
