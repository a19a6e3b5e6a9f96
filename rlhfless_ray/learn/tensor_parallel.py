"""Ranks that share one copy of a model: each holds a slice of every large matrix and computes its part of each layer.

DeepSpeed's AutoTP replaces the linear layers. Embeddings, output head and norms are whole on every rank. For an adapter B·A, the
matrix on the layer's divided side is divided in the same way. The other one is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.weights.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

BY_OUTPUT = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)(\.base_layer|\.lora_B\.\w+)?\.weight$"
BY_INPUT = r".*\.(o_proj|down_proj)(\.base_layer|\.lora_A\.\w+)?\.weight$"
OF_HEADS = r".*\.(q_norm|k_norm)\.weight$"  # whole, but each rank has the gradient of its own heads only


def deepspeed_section(width: int) -> JsonObject:
    """Return the section `tensor_parallel` of DeepSpeed's configuration."""
    specs = [
        {"patterns": [BY_OUTPUT], "partition_type": "column"},
        {"patterns": [BY_INPUT], "partition_type": "row"},
        {"patterns": [OF_HEADS], "partition_type": "skip", "grad_allreduce": True},
    ]
    config = {"use_default_specs": False, "layer_specs": specs}
    return {"autotp_size": width, "vocab_parallel_lm_head": False, "partition_config": config}


@contextmanager
def visible_adapters() -> Iterator[None]:
    """Let DeepSpeed divide the parts of layers with adapters, inside the block.

    It looks for parts only in modules without a matrix `weight`, and peft gives a layer with adapters the weight of its base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    with patch.object(BaseTunerLayer, "weight", None):
        yield


def divided(wrapped: Any, width: int) -> Any:
    """Return a module around `wrapped.model`, for forward passes only, in which each rank of a copy has a slice."""
    import deepspeed

    wrapped.config = wrapped.model.config  # where DeepSpeed looks for the number of heads
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": deepspeed_section(width), "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=wrapped, config=config)
    return engine.module


class ModelSlices:
    """One rank's slice of each tensor after DeepSpeed has divided the model. Ranks of one copy have consecutive numbers."""

    def __init__(self, whole: Mapping[str, tuple[int, ...]], parameters: Iterable[tuple[str, Tensor]], device: Any) -> None:
        """`whole`: shapes before the division, by name. `device`: the device of collectives."""
        from deepspeed.utils import groups

        self.group = groups.get_tensor_model_parallel_group()
        self.data_group = groups.get_data_parallel_group()
        self.rank, self.width = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
        self.whole, self.device = dict(whole), device
        self.cuts: dict[str, TensorSlice] = {}
        for name, parameter in parameters:
            shape, local = self.whole[name], tuple(parameter.shape)
            if shape != local:
                (axis,) = (i for i, (size, local_size) in enumerate(zip(shape, local, strict=True)) if size != local_size)
                if local[axis] * self.width != shape[axis]:
                    raise ValueError(f"{name} of shape {shape} was divided into {local}")
                self.cuts[name] = TensorSlice.along(name, shape, axis, self.rank * local[axis], local[axis])

    def elements(self, name: str, local: int) -> int:
        """Return the number of elements of the whole tensor. `local`: that of this rank's slice."""
        return math.prod(self.whole[name]) if name in self.cuts else local

    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole tensor. Every rank of the copy must call it."""
        import torch
        import torch.distributed as dist

        if name not in self.cuts:
            return tensor
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.width)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.cuts[name].axis)

    def norm(self, named: Iterable[tuple[str, Tensor]]) -> float:
        """Return the L2 norm of all gradients of the copy: the slices of every rank, and once the tensors that all of them hold."""
        import torch
        import torch.distributed as dist

        whole, sliced = torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, parameter in named:
            if parameter.grad is not None:
                (sliced if name in self.cuts else whole).add_(parameter.grad.double().square().sum())
        dist.all_reduce(sliced, group=self.group)
        return float((whole + sliced).sqrt())
