"""Load, fingerprint and release the weights of an engine's vLLM worker. These functions run in the worker, through `collective_rpc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from rlhfless_ray.local.process_memory import release_pages
from rlhfless_ray.weights.channel import PublishedVersion, WeightChannel
from rlhfless_ray.weights.tensor_file import as_tensor

if TYPE_CHECKING:
    from torch import Tensor


def check_weights(worker: Any, channel: WeightChannel, version: int) -> None:
    """Check this member's share of a version, see `WeightChannel.check`."""
    channel.check(version, worker.rank, worker.parallel_config.world_size)


def _tensors(worker: Any, weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor). One of several members fetches the slices that it loads. One alone would only pay for finding them."""
    if isinstance(weights, PublishedVersion) and worker.parallel_config.world_size > 1:
        from rlhfless_ray.engine.sliced_tensor import sliced_tensors

        yield from sliced_tensors(weights)
    else:
        for name, array in weights.items():
            yield name, as_tensor(array)


def reload_weights(worker: Any, weights: Mapping[str, np.ndarray], on_cpu: bool, in_place: bool = True) -> tuple[set[str], set[str]]:
    """Load the weights. `in_place`: on CPU, into existing memory, for which functions of vLLM are replaced.

    Returns the names of parameters that got none, and of the biases among the weights that the model does not use, see `unused_biases`.
    """
    model = worker.get_model()
    once, every = ({name for name, _ in model.named_parameters(remove_duplicate=which)} for which in (True, False))
    missing: set[str] = set()
    held: set[str] = set()
    published: list[str] = []
    load = model.load_weights

    def load_and_record(named: object) -> Any:
        # Only during a load does the model have exactly the weights of a file. Later vLLM computes others from them, such as latent
        # attention's W_UK_T, and may drop those that it has packed. Tied weights are then apart.
        held.update(name for name, _ in model.named_parameters())
        names = held - (every - once) - _cache_scales(model)
        missing.update(name.replace(".base_layer.", ".") for name in names)
        ids = {name.replace(".base_layer.", "."): id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        loaded = load(named)
        # vLLM itself only warns. A module may be a part of two others, as shared experts are: its parameters have two names.
        there = {ids.get(name) for name in loaded or ()}
        missing.difference_update(missing if loaded is None else {*loaded, *(name for name, id in ids.items() if id in there)})
        return loaded

    model.load_weights = load_and_record
    if on_cpu:
        _forget_packed_experts(model)
    in_place = in_place and on_cpu
    embeddings = _only_embeddings(model) if in_place else []

    def named() -> Iterator[tuple[str, Any]]:
        for name, tensor in _tensors(worker, weights):
            published.append(name)
            yield name, tensor

    try:
        with _loaded_in_place(embeddings) if in_place else nullcontext():
            worker.reload_weights(weights_iterator=named())
    finally:
        del model.load_weights
    if on_cpu:  # a head tied to the embeddings has its own packed copy, which a reload does not update
        seen = set()
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and id(weight) in seen:
                module.quant_method.process_weights_after_loading(module)
            seen.add(id(weight))
    return missing, unused_biases(published, held, fused_modules(worker))


def _cache_scales(model: Any) -> set[str]:
    """Return the names of the scales of a quantised KV cache. Models with quantised weights have them, and their checkpoints need not."""
    layers = [
        (name, module) for name, module in model.named_modules() if "KVCacheMethod" in type(getattr(module, "quant_method", None)).__name__
    ]
    return {f"{layer}.{name}" for layer, module in layers for name, _ in module.named_parameters(recurse=False)}


def unused_biases(published: Iterable[str], parameters: Iterable[str], fused: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the published biases of layers that have none in the engine. vLLM's loaders skip them without a word.

    `parameters`: names in the engine. `fused`: its {fused module: parts}. Layers that have other names in the engine are left out.
    """
    held = {name.replace(".base_layer.", ".") for name in parameters}
    fused_of = {part: module for module, parts in fused.items() for part in parts}
    unused = set()
    for name in published:
        layer, _, kind = name.rpartition(".")
        above, _, part = layer.rpartition(".")
        places = (layer, f"{above}.{fused_of.get(part, part)}")
        if kind == "bias" and any(f"{place}.weight" in held for place in places) and not any(f"{place}.bias" in held for place in places):
            unused.add(name)
    return unused


def _only_embeddings(model: Any) -> list[Any]:
    """Return the embeddings of a model with a separate output head, and keep vLLM (0.32) from packing them.

    It packs them like linear layers, for a product that is never computed.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    if not any(isinstance(module, ParallelLMHead) for module in modules):
        return []
    found = [module for module in modules if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)]
    for module in found:
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading, module.cpu_linear = _leave_unpacked, _only_embeds
    return found


@contextmanager
def _loaded_in_place(embeddings: Sequence[object]) -> Iterator[None]:
    """Let vLLM load layers into existing memory. Page faults of new memory would take most of a load's time.

    `embeddings` are loaded where they are. Linear layers take turns in one buffer: of their weights only the packed copy is kept.
    """
    import torch
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.platforms import current_platform

    materialize, may_refer = layerwise.materialize_layer, current_platform.is_zen_cpu()  # its kernels may use the weights as they are
    buffer = torch.empty(0, dtype=torch.uint8)

    def materialize_in_place(layer: Any, info: Any) -> None:
        nonlocal buffer
        materialize(layer, info)
        kept = info.kernel_tensors[0].get("weight")
        if any(layer is one for one in embeddings):
            layer.weight.data = kept.data
        elif hasattr(layer, "cpu_linear") and kept is not None and not kept.numel() and not may_refer:
            weight = layer.weight.data
            if len(buffer) < weight.nbytes:
                buffer = torch.empty(weight.nbytes, dtype=torch.uint8)
            layer.weight.data = buffer[: weight.nbytes].view(weight.dtype).view(weight.shape)

    layerwise.materialize_layer = materialize_in_place
    try:
        yield
    finally:
        layerwise.materialize_layer = materialize


def _forget_packed_experts(model: Any) -> None:
    """Make vLLM (0.32) pack fused experts for its CPU kernels again on a reload.

    It packs them only when it builds the kernel. Otherwise a reload would leave plain weights where the kernel reads packed ones, which
    silently gives wrong results.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def fingerprint(worker: Any) -> dict[str, np.ndarray]:
    """Return a hash of each row (or expert) of the model's parameters, by name.

    For linear layers whose packed weights cannot be read, the outputs for fixed inputs take their place.
    """
    import torch

    hashes = {}
    with torch.no_grad():
        model = worker.get_model()
        for name, parameter in model.named_parameters():
            if parameter.numel():
                rows = parameter.detach().reshape(len(parameter) if parameter.dim() > 1 else 1, -1).cpu().contiguous()
                hashes[name] = np.array([xxhash.xxh3_64_intdigest(row) for row in rows.view(torch.uint8).numpy()], np.uint64)
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and not weight.numel():
                width = getattr(module, "input_size_per_partition", None) or module.input_size  # replicated layers have only the latter
                inputs = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
                hashes[f"{name}.weight"] = module.cpu_linear(inputs.to(weight.dtype), weight, None).float().T.numpy()
    return hashes


def fused_modules(worker: Any) -> dict[str, list[str]]:
    """Return the model's {fused module: its parts}."""
    return dict(getattr(worker.get_model(), "packed_modules_mapping", None) or {})


def drop_memory(worker: Any) -> None:
    """On CPU, release the memory of the KV cache and of the weights, which a reload allocates again.

    Addresses of tensors stay valid; their content becomes zero. Kernels of linear layers are deleted with their packed weights.
    """
    model = worker.get_model()
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _without_weights
    tensors = [*worker.model_runner.kv_caches, *model.parameters()]
    for start, size in {(s.data_ptr(), s.nbytes()) for s in (tensor.untyped_storage() for tensor in tensors)}:
        release_pages(start, size)


def save_unregistered(worker: Any) -> None:
    """Copy to the host what parking on a GPU would lose: tensors of the model that are neither parameters nor buffers, nor caches.

    vLLM (0.32) saves buffers, and a load brings parameters. Nothing brings the slopes of ALiBi attention, for example. A parked worker
    keeps what it has saved: the memory of its tensors is unmapped.
    """
    if not getattr(worker, "unregistered", None):
        tensors = unregistered(worker.get_model(), worker.model_runner.kv_caches)
        worker.unregistered = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]


def restore_unregistered(worker: Any) -> None:
    """Put back what `save_unregistered` saved, if the worker was parked."""
    for tensor, values in getattr(worker, "unregistered", ()):
        tensor.copy_(values)
    worker.unregistered = []


def unregistered(model: Any, caches: Iterable[object]) -> list[Any]:
    """Return the memory of tensors on the model's device that it has not registered, as tensors of bytes, each a whole storage.

    These are attributes of its modules, of their attention (`impl`) and of their `quant_method`, and what lists, tuples and dicts among
    these attributes hold. Other objects are not searched. `caches`: tensors, or lists of them, that are left out.
    """
    import torch

    registered = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in registered}
    known = {tensor.untyped_storage().data_ptr() for tensor in (*registered, *_tensors_in(list(caches), set()))}
    seen: set[int] = set()
    found: dict[int, Any] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "impl", None), getattr(module, "quant_method", None)):
            for tensor in _tensors_in(getattr(owner, "__dict__", {}), seen):
                if tensor.numel() and tensor.device in devices and (start := tensor.untyped_storage().data_ptr()) not in known:
                    found[start] = tensor
    return [torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.untyped_storage()) for one in found.values()]


def _tensors_in(value: object, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors in lists, tuples and dicts. `seen`: ids of those that were searched before, and are left out."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


def _without_weights(*_: object) -> Any:
    raise RuntimeError("this engine was parked without its weights and has not loaded any since")


def _leave_unpacked(layer: object) -> None:
    pass


def _only_embeds(*_: object) -> Any:
    raise RuntimeError("these embeddings are also the model's output head, but their packed copy was dropped")
