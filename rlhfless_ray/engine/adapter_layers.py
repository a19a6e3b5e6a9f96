"""Serve an adapter on its base in a vLLM engine. A version is kilobytes then, while merged weights are the whole model.

An engine serves one version at a time, so its only adapter is replaced in place, from arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import torch
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from rlhfless_ray.engine.engine_settings import ServedAdapter
from rlhfless_ray.weights.tensor_file import as_tensor

NUMBER = 1
REQUEST = LoRARequest("policy", NUMBER, "loaded from memory")


class OneAdapter(PunicaWrapperCPU):
    """Add the product of the engine's only adapter.

    vLLM's own implementation on CPU first copies the adapter for every token: decoding with 11 M parameters took 2.2 to 2.6 times as
    long.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: object,
    ) -> None:
        """Compute y (tokens, Σ output_slices) += x @ Aᵀ @ Bᵀ in place, for each slice with its own A and B."""
        if self.no_lora:  # a trial run while vLLM starts
            return
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + width].addmm_(x @ a[0, 0].T, b[0, 0].T)
            start += width


def adapter_arguments(adapter: ServedAdapter, device: str) -> dict[str, Any]:
    """Return vLLM's arguments for serving an adapter. On CPU this replaces vLLM's products in this process."""
    if device == "cpu":
        replace_products()
    room = min(size for size in get_args(MaxLoRARanks) if size >= adapter.rank)
    # Without target modules vLLM also adapts the output head, which costs a copy of vocabulary × rank for each token.
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": list(adapter.modules)}


def replace_products() -> None:
    """Make vLLM's workers in this process, on CPU, add an adapter's products as `OneAdapter` does."""
    name = f"{OneAdapter.__module__}.{OneAdapter.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: name)  # type: ignore[method-assign, assignment]


def put_adapter(worker: Any, weights: Mapping[str, np.ndarray], served: ServedAdapter) -> list[str]:
    """Replace the adapter of vLLM's worker, in which this runs. Returns modules in `weights` that the model does not adapt.

    If there are any, the worker has no adapter.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    tensors = {name: as_tensor(np.asarray(array)).clone() for name, array in weights.items()}  # vLLM scales them in place
    adapter = LoRAModel.from_lora_tensors(
        NUMBER,
        tensors,
        PEFTHelper(r=served.rank, lora_alpha=served.alpha, target_modules=list(served.modules)),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    # Parking on a GPU loses what vLLM derived from the last step's mapping. It would keep that for a first step with the same mapping.
    manager._last_mapping = None
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    manager.remove_adapter(NUMBER)
    if unknown := sorted(adapter.loras.keys() - known):
        return unknown
    manager.add_adapter(adapter)
    manager.activate_adapter(NUMBER)
    return []
