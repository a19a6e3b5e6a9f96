"""Sums and means per sequence of per-token tensors laid end to end."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sums(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """x (tokens,) summed within each sequence: (count,). sequence (tokens,) int64, each token's sequence, 0 … count - 1."""
    return torch.zeros(count, dtype=x.dtype, device=x.device).index_add(0, sequence, x)


def sequence_means(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """As `sequence_sums`, divided by the number of tokens; 0 for a sequence without tokens."""
    tokens = torch.bincount(sequence, minlength=count).clamp(min=1)
    return sequence_sums(x, sequence, count) / tokens
