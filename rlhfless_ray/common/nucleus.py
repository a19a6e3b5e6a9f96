"""The nucleus of top-p sampling, shared by the sampler and the learner."""

from __future__ import annotations

import torch


def nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return (rows, vocabulary) bool: the smallest set of the most likely tokens whose probabilities reach `top_p` (rows,).

    It has at least one token; of equally likely tokens the first come first. Holtzman et al. 2020, section 3.1, arXiv 1904.09751.
    """
    order = logprobs.sort(dim=-1, descending=True, stable=True)
    p = order.values.double().exp()
    kept = (p.cumsum(-1) - p) < top_p.double().unsqueeze(1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order.indices, kept)
