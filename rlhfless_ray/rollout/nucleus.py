"""The nucleus of top-p sampling, for the sampler and for whoever checks it."""

from __future__ import annotations

import torch


def nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """(rows, vocabulary) bool: the fewest most likely tokens of each row whose probabilities come to `top_p` (rows,), one at least
    (Holtzman et al. 2020, section 3.1, arXiv 1904.09751). Of equally likely tokens the first come first."""
    order = logprobs.sort(dim=-1, descending=True, stable=True)
    p = order.values.double().exp()
    kept = (p.cumsum(-1) - p) < top_p.double().unsqueeze(1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order.indices, kept)
