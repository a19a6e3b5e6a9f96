"""Llama's decoder layer in few operations, because calls of small modules are half of the time of a drafter's pass.

Computes what Hugging Face transformers' modules compute, with their weights: queries, keys and values in one product, gate and up
projections in another, and sines and cosines from a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

MODEL_TYPES = ("llama", "mistral", "qwen2")  # whose layers differ in biases only
MOVING_ROPE = ("dynamic", "longrope")  # kinds whose frequencies depend on the length, so there is no table of them


def can_be_fused(config: Any) -> bool:
    """Return whether the layers of a model can be computed by `FusedLayer`. `config`: of transformers, with full attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return config.model_type in MODEL_TYPES and config.hidden_act == "silu" and rope.get("rope_type", "default") not in MOVING_ROPE


class RotaryTable:
    """Sines and cosines of rotary position embeddings by position."""

    def __init__(self, rotary: Any, positions: int, like: torch.Tensor) -> None:
        """`rotary`: the module that computes them for a tensor such as `like`."""
        self.cos, sin = (table[0] for table in rotary(like, torch.arange(positions, device=like.device)[None]))
        half = sin.shape[-1] // 2
        self.sin = torch.cat([-sin[:, :half], sin[:, half:]], -1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines (sequences, 1, width, head dimension) of positions (sequences, width)."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


class FusedLayer:
    """Attention and MLP of a decoder layer. Weights that are copied into the layer later are used here, too.

    The layer must be on its device in its dtype already: moving it would separate the weights.
    """

    def __init__(self, attention: Any, mlp: Any) -> None:
        self.head_dim = attention.head_dim
        self.sizes = [part.out_features // self.head_dim for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.queries_keys_values = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.output, self.down = attention.o_proj, mlp.down_proj

    def attend(
        self, normed: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, cache: Any, layer: int
    ) -> torch.Tensor:
        """Return the attention's output (sequences, width, hidden). normed: its input. Adds the new keys and values to the cache."""
        count, width, _ = normed.shape
        states = functional.linear(normed, *self.queries_keys_values).view(count, width, -1, self.head_dim).transpose(1, 2)
        queries, keys, values = states.split(self.sizes, 1)
        keys, values = cache.update(self._rotated(keys, *rotation), values, layer)
        attended = functional.scaled_dot_product_attention(
            self._rotated(queries, *rotation), keys, values, attn_mask=mask, enable_gqa=self.sizes[0] != self.sizes[1]
        )
        return functional.linear(attended.transpose(1, 2).reshape(count, width, -1), self.output.weight, self.output.bias)

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output. Shapes are (sequences, width, hidden)."""
        gate, up = functional.linear(normed, *self.gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down.weight, self.down.bias)

    def _rotated(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return states * cos + states.roll(self.head_dim // 2, -1) * sin


def rms_norm(states: torch.Tensor, norm: Any) -> torch.Tensor:
    """Return what a module of Llama's normalisation returns."""
    return functional.rms_norm(states, (states.shape[-1],), norm.weight, norm.variance_epsilon)


def _joined(*parts: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of linear layers with the same input as one, of which the layers keep views."""

    def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat([tensor.data for tensor in tensors])
        for tensor, view in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = view
        return whole

    biases = [part.bias for part in parts if part.bias is not None]
    return join([part.weight for part in parts]), join(biases) if biases else None
