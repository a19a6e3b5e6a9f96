"""The settings of an engine as plain values, so that its process does not import the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.weights.adapter import ADAPTABLE

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

MOST_SLOTS = 1024  # more slots than any node has


@dataclass(frozen=True)
class ServedAdapter:
    """The properties of an adapter that are the same in all its versions. Engines hold the adapter on its base."""

    rank: int
    alpha: int
    modules: tuple[str, ...]  # ends of the adapted layers' names


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Fields without a comment are from the recipe's sections `rollout` and `policy`."""

    engine: Literal["exact", "stock"] = "exact"
    max_model_len: int  # longest prompt and response together, in tokens
    max_running: int
    block_size: int
    kv_cache_mb: int
    gpu_memory_share: float
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
    device: str = "cpu"  # or "gpu"
    prefix_kv: bool = False  # whether the engine exchanges KV pages with others
    quantization: Literal["off", "int8", "fp8"] = "off"
    speculation: Literal["off", "auto", "on"] = "off"
    tensor_parallel: int = 1  # members that share the weights, one process and one slot each
    adapter: ServedAdapter | None = None  # None: engines get whole weights
    records_experts: bool = False  # whether completions have the experts that routers chose
    end_token_id: int | None = None  # the tokenizer's. It ends a response as well as those of the model's configuration do.


def served_adapter(recipe: Recipe) -> ServedAdapter | None:
    """Return the adapter that engines hold, None if `lora.publish` is `merged`. See `choose_publish` for `auto`."""
    lora = recipe.lora
    modules = ADAPTABLE if lora.target_modules == ["all-linear"] else tuple(lora.target_modules)
    return ServedAdapter(lora.rank, lora.alpha, modules) if lora.publish == "adapter" else None


def engine_settings(
    recipe: Recipe, longest_prompt_tokens: int, device: str = "cpu", prefix_kv: bool = False, end_token_id: int | None = None
) -> EngineSettings:
    rollout, policy = recipe.rollout, recipe.policy
    return EngineSettings(
        engine=rollout.engine,
        max_model_len=recipe.longest_tokens(longest_prompt_tokens),
        max_running=rollout.max_running,
        block_size=rollout.block_size,
        kv_cache_mb=rollout.engine_kv_mb,
        gpu_memory_share=rollout.gpu_memory_share,
        dtype=policy.dtype,
        trust_remote_code=policy.trust_remote_code,
        device=device,
        prefix_kv=prefix_kv,
        quantization=rollout.quantization,
        speculation=rollout.speculation,
        tensor_parallel=rollout.least_width,
        adapter=served_adapter(recipe),
        records_experts=recipe.algorithm.loss.router_replay and recipe.learns,
        end_token_id=end_token_id,
    )


def check_heads(recipe: Recipe, config: Mapping[str, object], key: str) -> None:
    """Raise UserError if the model of this config.json cannot be shared by `rollout.tensor_parallel` slots. `key`: names the model."""
    from placement.memory import engine_widths  # here, because engines' processes import this module without the planner's libraries

    width, fit = recipe.rollout.least_width, engine_widths(config, MOST_SLOTS)
    if fit is not None and width not in fit:  # None: unknown heads, for which loading the model reports an error
        can = ", ".join(map(str, fit))
        raise UserError(f"rollout.tensor_parallel: {width} slots cannot share the heads and layers of {key} evenly; set it to {can}")


def check_kernels(recipe: Recipe, device: str) -> None:
    """Raise UserError if vLLM (0.32) has no kernel for the engines' weights on the device, "cpu" or "gpu"."""
    kind, dtype = recipe.rollout.quantization, recipe.policy.dtype
    if device == "cpu" and kind == "fp8":
        raise UserError("rollout.quantization: vLLM on CPU cannot quantise weights to fp8 when it loads them; set int8 or off")
    if device == "gpu" and kind != "off" and dtype == "float32":
        raise UserError(f"rollout.quantization: {kind} on GPU needs policy.dtype bfloat16 (it is {dtype}); set that, or set this to off")
    if device == "gpu" and recipe.lora.publish == "adapter" and dtype == "float32":
        raise UserError("lora.publish: engines on GPU hold adapters in bfloat16 only (policy.dtype is float32); set that, or merged")
