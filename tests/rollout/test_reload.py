"""Which weights a reload counts as missing: on a stand-in for vLLM's worker, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlhfless_ray.rollout.worker_weights import reload_weights


class LatentAttention(torch.nn.Module):
    """As vLLM's: the product for decoding is a parameter that it makes of the loaded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Parameter(torch.zeros(2, 2))
        self.o_proj = torch.nn.Parameter(torch.zeros(2, 2))
        self.process()

    def process(self) -> None:
        self.W_UK_T = torch.nn.Parameter(self.kv_b_proj.detach().T.clone())

    def load_weights(self, named: Any) -> set[str]:
        loaded = set()
        for name, tensor in named:
            getattr(self, name).data.copy_(tensor)
            loaded.add(name)
        return loaded


class Worker:
    """Reloads as vLLM does: what was made of the weights is away meanwhile."""

    def __init__(self) -> None:
        self.model = LatentAttention()

    def get_model(self) -> LatentAttention:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        del self.model.W_UK_T
        self.model.load_weights(weights_iterator)
        self.model.process()


def test_what_vllm_makes_of_the_weights_is_not_missing() -> None:
    worker, weights = Worker(), {name: np.full((2, 2), k, np.float32) for k, name in enumerate(("kv_b_proj", "o_proj"), 1)}
    assert reload_weights(worker, weights, False) == set()
    assert worker.model.W_UK_T.min() == 1
    assert reload_weights(worker, {"kv_b_proj": weights["kv_b_proj"]}, False) == {"o_proj"}
