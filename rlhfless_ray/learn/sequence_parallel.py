"""Ranks that share each sequence: every rank computes a slice of its tokens (DeepSpeed-Ulysses, arXiv 2309.14509).

Embeddings, norms, feed-forward layers and the output head work on single tokens. Before attention an all-to-all exchanges slices of the
sequence for heads, so that a rank has all tokens of some heads. A second one exchanges them back. Each rank holds all weights, or its
ZeRO shard, and has the gradient of its own tokens, so that gradients add up over all ranks as in data parallelism.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhfless_ray.learn.batch import UNKNOWN_EXPERT

NAME = "sequence_parallel"  # of the attention in transformers' registry
FILLERS = {"ids": 0, "seen": 0, "experts": UNKNOWN_EXPERT}  # tensors (rows, length, …) that are sliced, and what pads them
OF_TOKENS = ("rows", "targets", "flat", "sequence")  # tensors (response tokens,), like `columns`


class SequenceParallel:
    """One rank's place among the ranks that share sequences, which have consecutive numbers."""

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        """Create the process groups; every rank must call it. `size`: ranks that share a sequence. `rank`, `ranks`: of all."""
        self.size, self.rank = size, rank % size
        together = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        alike = [dist.new_group(list(range(first, ranks, size))) for first in range(size)]
        self.group, self.data_group = together[rank // size], alike[self.rank]

    def install(self, wrapped: Any) -> None:
        """Make `wrapped.model` compute this rank's slice, and `wrapped` return the values of all tokens.

        `wrapped`: a module of `policy_model`, which returns values of response tokens (tokens, …) and keeps no other state. Its teachers
        are changed too.
        """
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, self._mask)
        for model in (wrapped.model, *getattr(wrapped, "teachers", ())):
            model.set_attn_implementation(NAME)
        wrapped.register_forward_pre_hook(self._before, with_kwargs=True)
        wrapped.register_forward_hook(self._after, with_kwargs=True)

    # ---- tensors of a micro-batch -----------------------------------------------------------------------------

    def _before(self, module: nn.Module, arguments: object, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        return arguments, self.sliced(tensors)

    def sliced(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's slice of the tensors of `micro_batch_tensors.padded`.

        Rows are padded to a multiple of the slices. `own`: indices of this slice's response tokens among the `count` response tokens
        of the micro-batch. `segments` are those of whole rows, because attention sees all tokens.
        """
        rows, longest = tensors["ids"].shape
        length = -(-longest // self.size)
        first, missing = self.rank * length, length * self.size - longest
        found = {}
        for name, filler in FILLERS.items():
            if name in tensors:
                x = tensors[name]
                found[name] = pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=filler)[:, first : first + length]
        # always given, because transformers would count from the slice's first token
        positions = torch.arange(length * self.size, device=tensors["ids"].device).expand(rows, -1)
        if "segments" in tensors:
            found["segments"] = pad(tensors["segments"], (0, missing), value=-1)
            positions = pad(tensors["positions"], (0, missing))
        found["positions"] = positions[:, first : first + length]
        columns = tensors["columns"]
        own = torch.nonzero((columns >= first) & (columns < first + length)).squeeze(1)
        found |= {name: tensors[name][own] for name in OF_TOKENS}
        return found | {"columns": columns[own] - first, "own": own, "count": torch.tensor(len(columns))}

    def _after(self, module: nn.Module, arguments: object, tensors: dict[str, Tensor], output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(self._joined(values, tensors) for values in output)
        return self._joined(output, tensors)

    def _joined(self, values: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return the values of all response tokens of the micro-batch from those of each rank's own."""
        whole = values.new_zeros(int(tensors["count"]), *values.shape[1:])
        return _Sum.apply(whole.index_copy(0, tensors["own"], values), self.group)

    # ---- attention --------------------------------------------------------------------------------------------

    def _mask(self, q_length: int, kv_length: int, **more: object) -> Tensor | None:
        """Return the mask of whole rows. `more`: see `transformers.masking_utils.sdpa_mask`."""
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(q_length=q_length * self.size, kv_length=kv_length * self.size, **more)

    def _attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: object
    ) -> tuple[Tensor, None]:
        """Compute attention for this rank's tokens, (rows, length, heads, width), with the arguments of transformers' attention.

        `query`, `key`, `value` (rows, heads, length, width): of its tokens. `attention_mask`: of whole rows.
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        n, per_kv = self.size, query.shape[1] // key.shape[1]
        if key.shape[1] % n:  # each rank gets the KV heads of its queries
            key, value = key.repeat_interleave(per_kv, dim=1), value.repeat_interleave(per_kv, dim=1)
            per_kv = 1
        parts = [x.unflatten(1, (n, -1)) for x in (query, key, value)]
        mine = _Exchange.apply(torch.cat(parts, dim=2).movedim(1, 0), self.group)
        whole = mine.movedim(0, 2).flatten(2, 3)
        query, key, value = whole.split([part.shape[2] for part in parts], dim=1)
        with patch.object(module, "num_key_value_groups", per_kv):
            found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        back = _Exchange.apply(found.unflatten(1, (n, -1)).movedim(1, 0), self.group)
        return back.movedim(0, 2).flatten(2, 3), None


class _Exchange(torch.autograd.Function):
    """All-to-all: part i of `x` (ranks, …) goes to rank i, and part j of the result is rank j's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _exchanged(gradient, ctx.group), None


def _exchanged(x: Tensor, group: object) -> Tensor:
    x = x.contiguous()
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=group)
    return found


class _Sum(torch.autograd.Function):
    """Sum over the ranks that share a sequence. Each computes the whole loss from it, so a part's gradient needs no sum."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: object) -> Tensor:
        found = x.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
