"""The tokens that top-k and top-p sampling draw from, shared by the sampler and the learner."""

from __future__ import annotations

import torch


def nucleus(logprobs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor | None = None) -> torch.Tensor:
    """Return (rows, vocabulary) bool: the most likely tokens that a row is drawn from.

    These are the `top_k` (rows,) int most likely ones; 0 or None: all. Of them it is the smallest set whose probabilities, renormalised to
    a sum of 1, reach `top_p` (rows,). This is the order of vLLM and transformers. The set has at least one token. Of equally likely tokens
    the first come first. Holtzman et al. 2020, section 3.1, arXiv 1904.09751.
    """
    order = logprobs.sort(dim=-1, descending=True, stable=True)
    p = order.values.double().exp()
    kept = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        ranks = torch.arange(p.shape[1], device=p.device)
        kept = (ranks < top_k.unsqueeze(1)) | (top_k == 0).unsqueeze(1)
        p = torch.where(kept, p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    whole = (top_p >= 1).unsqueeze(1)  # rounding must not leave out the last token
    kept = kept & (whole | ((p.cumsum(-1) - p) < top_p.double().unsqueeze(1)))
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order.indices, kept)
