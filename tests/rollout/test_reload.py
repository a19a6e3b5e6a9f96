"""Which weights a reload counts as missing: on a stand-in for vLLM's worker, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlhfless_ray.engine.worker_weights import reload_weights, unused_biases


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


def test_parameters_that_vllm_derives_do_not_count_as_missing() -> None:
    worker, weights = Worker(), {name: np.full((2, 2), k, np.float32) for k, name in enumerate(("kv_b_proj", "o_proj"), 1)}
    assert reload_weights(worker, weights, False) == (set(), set())
    assert worker.model.W_UK_T.min() == 1
    assert reload_weights(worker, {"kv_b_proj": weights["kv_b_proj"]}, False) == ({"o_proj"}, set())


def test_biases_that_the_engine_does_not_use_are_found() -> None:
    """As vLLM's Qwen3, which has no bias at the attention's output."""
    names = [f"layers.0.{layer}_proj.{kind}" for layer in "qkvo" for kind in ("weight", "bias")]
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    held = ["layers.0.qkv_proj.weight", "layers.0.qkv_proj.bias", "layers.0.o_proj.weight"]
    assert unused_biases([*names, "elsewhere.bias", "norm.weight"], held, fused) == {"layers.0.o_proj.bias"}
    with_adapters = [name.replace("_proj.", "_proj.base_layer.") for name in held]
    assert unused_biases(names, with_adapters, fused) == {"layers.0.o_proj.bias"}
    assert unused_biases(names, ["layers.0.qkv_proj.weight", "layers.0.o_proj.weight"], fused) == set(names[1::2])
    assert unused_biases(names, [*held, "layers.0.o_proj.bias"], fused) == set()
