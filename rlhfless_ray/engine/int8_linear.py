"""Linear layers in 8 bits for vLLM, quantised whenever it loads weights. vLLM (0.32) does this itself only for fp8.

A weight has one scale per output channel. A layer's input gets one scale per token in each step, so a token's result does not
depend on its batch. The products are vLLM's kernels for the device. Embeddings, output head and experts keep their dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter
from vllm.utils.torch_utils import set_default_torch_dtype

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.local.laptop.processor import has_int8

METHOD = "rlhfless_int8"
LARGEST = 127
# Without instructions that multiply 8 bits (VNNI, AMX), oneDNN on x86 adds each two products of an input, shifted to 0 … 255, and a weight
# in 16 bits, which saturate: https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html. 2 · 255 · 63 stays below 2¹⁵.
LARGEST_IN_16_BITS = 63
SMALLEST_SCALE = 1e-8  # scale of rows of zeros


class Int8Linear(OnlineLinearBase):
    """Hold int8 weights instead of the loaded ones. `OnlineLinearBase` documents when vLLM calls the methods."""

    def create_weights(self, layer: torch.nn.Module, *arguments: object, **options: object) -> None:
        super().create_weights(layer, *arguments, **options)
        # The kernel of symmetric inputs takes no float32 on CPUs with AMX. In float32 inputs are therefore asymmetric.
        symmetric = self.input_dtype != torch.float32
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=symmetric, module_name="Int8Linear"
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):  # vLLM resets it before each load
            return
        weight = layer.weight.float()
        largest = LARGEST if weight.device.type != "cpu" or has_int8() else LARGEST_IN_16_BITS
        scale = (weight.abs().amax(1, keepdim=True) / largest).clamp_min(SMALLEST_SCALE)
        replace_parameter(layer, "weight", (weight / scale).round().to(torch.int8))
        replace_parameter(layer, "weight_scale", scale)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        with set_default_torch_dtype(self.input_dtype):  # the dtype of results; the default differs when weights are loaded again
            self.kernel.process_weights_after_loading(layer)
        if layer.weight is None:  # the kernel has its own copy, but adapters ask for the weight's device
            layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.int8, device=scale.device), requires_grad=False)
        # The oneDNN kernel keeps the address of these scales, while vLLM copies their values into the layer's first scales.
        self.scale = layer.weight_scale
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfig):
    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: JsonObject) -> Int8Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Int8Linear | None:
        return Int8Linear() if isinstance(layer, LinearBase) else None
