"""Attention over rows that lie end to end in one, without padding. Each sees itself only.

All other layers work on single tokens, and positions begin anew with each row. So a packed row computes what rows of their own do.
Attention is called once for each of them: a mask over all would cost time for pairs that no token looks at. One that holds a prompt and
several responses has a mask of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

PREFIX = "packed_"  # of the attention's name in transformers' registry; the rest is the attention that computes each sequence


def install(model: Any) -> None:
    """Make a model take the tensors of `micro_batch_tensors.packed` beside those of `padded`. Its attention must be sdpa or eager."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attentions: dict[str, Callable[..., Any]] = {"sdpa": partial(_attend, sdpa_attention_forward, _band), "eager": _attend_eagerly}
    for name, attend in attentions.items():
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + name, _window)
    model.set_attn_implementation(PREFIX + model.config.get_text_config()._attn_implementation)


def _window(local_size: int | None = None, **more: object) -> Tensor | None:
    """Return the tokens that a layer looks back, (), where transformers expects its mask; None: all. Tensors outlive checkpointing."""
    return None if local_size is None else torch.tensor(local_size)


def _attend_eagerly(module: Any, *arguments: Any, **more: Any) -> tuple[Tensor, None]:
    """Compute attention as the model's own file does, which soft caps need."""
    return _attend(sys.modules[type(module).__module__].eager_attention_forward, _additive_band, module, *arguments, **more)


def _attend(
    attend: Callable[..., tuple[Tensor, Any]],
    mask_of: Callable[[Tensor, int | None], Tensor | None],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: Sequence[int] | None = None,
    row_masks: Sequence[Tensor] | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Compute attention of each packed row, (rows, length, heads, width), with the arguments of transformers' attention.

    `attend`: transformers' attention. `mask_of`: makes its mask from queries and window. `attention_mask`: a whole mask, or see `_window`.
    `row_lengths`: tokens of each row that lies in this one; None: nothing is packed. `row_masks`: see `attention_mask`; no sequence of
    theirs is longer than a window. None: every row is one sequence.
    """
    if attention_mask is not None and attention_mask.dim():
        return attend(module, query, key, value, attention_mask, **more)[0], None
    window = None if attention_mask is None else int(attention_mask)
    lengths = list(row_lengths or (query.shape[2],))
    masks: Sequence[Tensor | None] = row_masks or [None] * len(lengths)
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), masks, strict=True)
    found = [attend(module, q, k, v, mask_of(q, window) if mask is None else mask, **more)[0] for q, k, v, mask in parts]
    return torch.cat(found, dim=1), None


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """Return which tokens see which (length, length) bool, or None if each sees all before it."""
    length = query.shape[2]
    return None if window is None or length <= window else _causal(query).triu_(1 - window)


def _additive_band(query: Tensor, window: int | None) -> Tensor:
    """Return the mask of `_band` as numbers that are added to the scores. Eager attention always needs one."""
    seen = _band(query, window)
    seen = _causal(query) if seen is None else seen
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, torch.finfo(query.dtype).min)


def _causal(query: Tensor) -> Tensor:
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
