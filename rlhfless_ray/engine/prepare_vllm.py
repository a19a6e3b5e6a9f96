"""Import vLLM into this process, with the environment and the sampler that its engines need here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.local.fast_imports import fast_imports
from rlhfless_ray.local.laptop.cpu_bfloat16 import use_float32_products
from rlhfless_ray.vision.image_processor import FAMILIES, image_files, reads_images

if TYPE_CHECKING:
    from rlhfless_ray.engine.keyed_sampler import KeyedSampler

# vLLM reads these when it is imported: engine and worker in this process, no telemetry, errors only.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
# Overrides the environment, because `KeyedSampler` takes the place of the samplers in vLLM's first model runner. With Triton and a
# device, the second one is the default, and it has others.
REQUIRED = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# The engine is eager on CPU. This keeps functions that vLLM decorates from loading the compiler.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
# On GPU, attention in float32 uses Triton (FlashAttention has no float32). Its products default to TF32, with 10 bits of fraction,
# while the learner's have 23. FlashInfer's sampler, which vLLM would import and may compile, is never called: see REQUIRED.
ON_GPU = {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Not imported on CPU, because only audio and object detection need it. Packages that come with vLLM for GPUs may need it too.
OPTIONAL = ("scipy",)
COMPILER = ("torch._inductor.lowering",)  # vLLM patches it if it can be imported, which takes half a second
# vLLM imports these only while it builds an engine, 0.1 CPU seconds under a lease
BUILDING = ("vllm.model_executor.layers.quantization.online.base", "vllm.renderers.hf")
_registered: set[str] = set()  # architectures that `prepare` has seen in this process
_packers: list[Callable[..., Any]] = []  # vLLM's function that packs weights, once `_pack_others` stands in its place


def prepare(on_cpu: bool = True, architectures: Sequence[str] = ()) -> None:
    """Import everything that an engine for these models needs. This is the slow part of a start, and needs no lease or device.

    The models' classes are registered with vLLM as loaded. Otherwise vLLM would inspect each class in another Python process, so
    that its import cannot touch a device before a fork. This process does not fork.
    """
    set_environment(on_cpu)
    if "vllm.v1.engine.llm_engine" in sys.modules and _registered.issuperset(architectures):
        return
    with fast_imports((*OPTIONAL, *COMPILER) if on_cpu else ()):
        from vllm import EngineArgs, LLMEngine, ModelRegistry  # noqa: F401

        import rlhfless_ray.engine.keyed_sampler  # noqa: F401

        import_module("vllm.v1.worker.cpu_worker" if on_cpu else "vllm.v1.worker.gpu_worker")
        for name in BUILDING:
            import_module(name)
        for name in architectures:
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, _load_model_class(name))
        _registered.update(architectures)
        if on_cpu:
            _replace_kernels()
        _configure_logging()


def _load_model_class(name: str) -> Any:
    from vllm import ModelRegistry

    if name not in FAMILIES.values():
        return ModelRegistry.models[name].load_model_cls()
    from rlhfless_ray.engine.ready_images import load_model_class

    return load_model_class(name)


def _replace_kernels() -> None:
    """Let vLLM put kernels for CPU in the place of Triton's now, and not once more for each engine.

    It looks for references to them in all modules that are loaded, which takes 0.3 CPU seconds.
    """
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def use_fast_products(dtype: str, on_cpu: bool) -> None:
    """Replace slow bfloat16 products on CPU, see `cpu_bfloat16`. vLLM then leaves linear layers to PyTorch, without packed weights.

    Call it before a model with weights of this dtype is built. Attention and experts have vLLM's own kernels, which multiply in float32.
    Layers of other dtypes keep packed weights, in engines that this process builds later too.
    """
    if use_float32_products(dtype, "cpu" if on_cpu else "gpu"):
        from vllm import _custom_ops

        if _custom_ops.create_onednn_mm is not _pack_others:
            _packers.append(_custom_ops.create_onednn_mm)
            _custom_ops.create_onednn_mm = _pack_others


def _pack_others(weight: Any, sizes: int) -> Any:
    """Pack the weights of a linear layer, unless they are bfloat16. vLLM (0.32) leaves a layer to PyTorch when packing raises this."""
    if str(weight.dtype) == "torch.bfloat16":
        raise RuntimeError("bfloat16 products are computed in float32")
    return _packers[0](weight, sizes)


def _configure_logging() -> None:
    """Let vLLM configure its 345 loggers now. It does so once for the same settings, in 0.1 CPU seconds."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


def set_environment(on_cpu: bool) -> None:
    """Set the variables that vLLM reads when it is imported."""
    for name, value in {**ENVIRONMENT, **(EAGER if on_cpu else ON_GPU)}.items():
        os.environ.setdefault(name, value)
    os.environ.update(REQUIRED)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the recipe's kv_cache_mb


def image_prompts(config: Mapping[str, Any], folder: Path) -> Callable[..., Any]:
    """Return what makes a prompt with images for vLLM, see `ImageItems.prompt`. `config`, `folder`: of the policy."""
    if not reads_images(config):
        return refuse_images
    from rlhfless_ray.engine.ready_images import ImageItems

    return ImageItems(config, image_files(folder)).prompt


def refuse_images(*request: object) -> None:
    raise ValueError("this policy sees no images, and a request has some")


def install_sampler(worker: Any) -> KeyedSampler:
    """Replace vLLM's samplers in this worker."""
    from rlhfless_ray.engine.keyed_sampler import KeyedSampler

    runner = worker.model_runner
    sampler = KeyedSampler(runner)
    runner.sampler, runner.rejection_sampler = sampler, sampler.verify
    return sampler
