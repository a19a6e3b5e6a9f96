"""AdamW and the clipping of gradients in float64 (Loshchilov & Hutter 2019, algorithm 2, arXiv 1711.05101)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Float64AdamW:
    def __init__(self, weights: dict[str, Tensor], learner: Any, rate: Any) -> None:
        """`learner`: the recipe's section. `rate`: number of steps done → learning rate."""
        self.weights, self.learner, self.rate, self.done = weights, learner, rate, 0
        self.first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self) -> float:
        """Make a step with the weights' gradients, and set these to None. Returns their norm before clipping."""
        gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in self.weights.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        limit = self.learner.grad_clip
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        (b1, b2), rate = self.learner.betas, self.rate(self.done)
        self.done += 1
        with torch.no_grad():
            for name, w in self.weights.items():
                g, m, v = scale * gradients[name], self.first[name], self.second[name]
                m.copy_(b1 * m + (1 - b1) * g)
                v.copy_(b2 * v + (1 - b2) * g * g)
                spared = not self.learner.decay_all and (name.endswith("bias") or "norm" in name)
                decayed = w * (1 - rate * (0.0 if spared else self.learner.weight_decay))
                moved = (m / (1 - b1**self.done)) / ((v / (1 - b2**self.done)).sqrt() + self.learner.adam_eps)
                w.copy_(decayed - rate * moved)
                w.grad = None
        return norm
