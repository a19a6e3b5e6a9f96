"""Sums and means per sequence of per-token tensors whose sequences are end to end."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sums(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Sum x (tokens,) within each sequence, to (count,). `sequence` (tokens,) int64: each token's sequence, 0 … count - 1."""
    return torch.zeros(count, dtype=x.dtype, device=x.device).index_add(0, sequence, x)


def sequence_means(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Average x within each sequence, see `sequence_sums`. A sequence without tokens has mean 0."""
    tokens = torch.bincount(sequence, minlength=count).clamp(min=1)
    return sequence_sums(x, sequence, count) / tokens
