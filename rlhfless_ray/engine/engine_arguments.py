"""Build the model folder and the arguments of a vLLM engine."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.head_config import is_head, layers_read
from rlhfless_ray.prefix.pages import PageStore
from rlhfless_ray.vision.image_processor import reads_images
from rlhfless_ray.weights.model_folder import content_addressed_folder, stop_tokens, write_folder
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from vllm import EngineArgs


def common_arguments(folder: Path, settings: EngineSettings, load_format: str) -> dict[str, Any]:
    """Return the arguments that each backend gives vLLM."""
    on_cpu, width = settings.device == "cpu", settings.tensor_parallel
    memory: dict[str, Any] = (
        {"kv_cache_memory_bytes": settings.kv_cache_mb * 2**20 // width}  # of a member
        if on_cpu
        else {"gpu_memory_utilization": settings.gpu_memory_share, "enable_sleep_mode": True}
    )
    return {
        "model": str(folder),
        "load_format": load_format,
        "dtype": settings.dtype,
        "skip_tokenizer_init": True,
        "trust_remote_code": settings.trust_remote_code,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_running,
        "block_size": settings.block_size,
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu,
        "tensor_parallel_size": width,
        "disable_log_stats": True,
        **memory,
        **_image_arguments(folder),
    }


def _image_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments of an engine whose prompts may have images."""
    if not reads_images(json.loads((folder / "config.json").read_bytes())):
        return {}
    from rlhfless_ray.engine.ready_images import ARGUMENTS

    return ARGUMENTS


def engine_arguments(folder: Path, settings: EngineSettings, pages: PageStore | None, load_format: str, drafter: Path | None) -> EngineArgs:
    """Return vLLM's arguments for the exact engine with these settings.

    `pages`: None if the engine exchanges no KV pages with others. `drafter`: folder of a model that drafts.
    """
    from vllm import EngineArgs

    return EngineArgs(
        **common_arguments(folder, settings, load_format),
        distributed_executor_backend=_executor(settings.tensor_parallel),
        async_scheduling=False,  # the sampler reads each request's output so far, which must be complete
        speculative_config=_speculative_config(settings.speculation),
        kv_transfer_config=_transfer_config(pages),
        quantization=_quantization_method(settings.quantization),
        **_worker_arguments(drafter, settings),
        **_adapter_arguments(settings),
    )


def _quantization_method(kind: str) -> str | None:
    """Return vLLM's name of a quantisation that is applied to the weights when they are loaded."""
    if kind == "int8":
        from rlhfless_ray.engine.int8_linear import METHOD

        return METHOD
    return "fp8_per_channel" if kind == "fp8" else None


def _adapter_arguments(settings: EngineSettings) -> dict[str, Any]:
    if settings.adapter is None:
        return {}
    from rlhfless_ray.engine.adapter_layers import adapter_arguments

    return adapter_arguments(settings.adapter, settings.device)


def _executor(width: int) -> Any:
    """Return vLLM's `distributed_executor_backend` for an engine with `width` members."""
    if width == 1:
        return "uni"
    from rlhfless_ray.engine.member_executor import MemberExecutor

    return MemberExecutor


def _transfer_config(pages: PageStore | None) -> Any:
    if pages is None:
        return None
    from rlhfless_ray.prefix.connector import transfer_config

    return transfer_config(pages)


def _speculative_config(kind: str) -> JsonObject | None:
    if kind == "off":
        return None
    from rlhfless_ray.engine.drafts import MOST_TOKENS, Drafter

    return {"method": "custom_class", "model": f"{Drafter.__module__}.{Drafter.__qualname__}", "num_speculative_tokens": MOST_TOKENS}


def _worker_arguments(drafter: Path | None, settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments for what vLLM's own worker does not do, see `StatesWorker`."""
    if settings.speculation == "off" and not settings.records_experts:
        return {}
    from rlhfless_ray.engine.states_worker import EXPERTS, LAYERS, StatesWorker

    config = json.loads((drafter / "config.json").read_bytes()) if drafter is not None else {}
    name, additional = f"{StatesWorker.__module__}.{StatesWorker.__qualname__}", {EXPERTS: True} if settings.records_experts else {}
    return {"worker_cls": name, "additional_config": additional | ({LAYERS: layers_read(config)} if is_head(config) else {})}


def engine_folder(scratch: Path, files: Files, settings: EngineSettings) -> Path:
    """Write config and tokenizer to a folder for an engine: in `scratch` on CPU, in vLLM's cache on GPU.

    On GPU vLLM caches the compiled model under a name that contains the folder's path. With another path each engine would compile
    again, which is most of its start.
    """
    if settings.device != "cpu":
        from vllm.envs import VLLM_CACHE_ROOT

        with suppress(OSError):  # the cache cannot be written: compile
            return content_addressed_folder(Path(VLLM_CACHE_ROOT) / "rlhfless", files)
    return write_folder(scratch, files)


def read_stop_tokens(folder: Path, end_token_id: int | None) -> list[int]:
    """Return the tokens that end a response of the model in a folder, see `stop_tokens`."""
    files = (folder / name for name in ("generation_config.json", "config.json"))
    return stop_tokens({file.name: file.read_bytes() for file in files if file.is_file()}, end_token_id)
