"""Estimate an engine before it has run: its speed by the roofline, and its KV capacity in tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.memory import VALUE_BYTES, engine_widths
from placement.speed.decode_speed import Speed
from placement.speed.model_sizes import Model
from placement.speed.roofline import decode_speed, kv_capacity
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.load_policy import kv_cache_bytes, text_config
from rlhfless_ray.weights.tensor_file import Files

ANY_SPEED = Speed(base_s=0.01, per_seq_s=0.0001)  # for configurations without the sizes that the roofline needs
CORE, ANY_GPU = "CPU-core", "L40S"


@dataclass(frozen=True)
class ExpectedEngine:
    """Estimates for an engine. `capacity`: KV tokens it holds, None if unknown. `note`: message about a guess, for the user."""

    speed: Speed
    capacity: int | None = None
    note: str = ""


def expected_engine(recipe: Recipe, files: Files, device_name: str | None, width: int = 1) -> ExpectedEngine:
    """Estimate the engine of the policy in `files` on `width` CPU cores (None) or devices of Ray's `accelerator_type` ("": unknown)."""
    from placement.catalog import catalog

    try:
        stored = Model.from_config("policy", text_config(files))
    except ValueError as error:
        return ExpectedEngine(ANY_SPEED, None, f"the first plan guesses how fast engines are: {error}")
    model = replace(stored, value_bytes=VALUE_BYTES[recipe.policy.dtype], quantization=recipe.rollout.quantization)
    if device_name is None:
        speed = decode_speed(model, catalog.device(CORE), width)
        block = kv_cache_bytes(files, recipe.rollout.block_size, recipe.rollout.block_size, recipe.policy.dtype, width)
        if block is None:
            return ExpectedEngine(speed)
        blocks = recipe.rollout.engine_kv_mb * 2**20 // (block // 2) - 1  # `block` counts two blocks, because vLLM reserves one
        return ExpectedEngine(speed, blocks * recipe.rollout.block_size)
    note = ""
    try:
        device = catalog.device(device_name)
    except ValueError:
        device = catalog.device(ANY_GPU)
        note = f"the first plan assumes {ANY_GPU} for {device_name or 'the GPU'}, which is not in its catalogue"
    try:
        capacity = kv_capacity(model, device, width, recipe.rollout.gpu_memory_share)
    except ValueError:  # the engine reports that the model does not fit
        capacity = None
    return ExpectedEngine(decode_speed(model, device, width), capacity, note)


def expected_widths(
    recipe: Recipe, files: Files, device_name: str | None, node_slots: int, longest_tokens: int
) -> tuple[dict[int, ExpectedEngine], str]:
    """Return estimates of engines by width, the narrowest first, and why there is only one width (or an empty string).

    `node_slots`: slots of the largest node. `longest_tokens`: tokens of the longest sequence, which an engine must hold.
    """
    rollout = recipe.rollout
    if rollout.tensor_parallel != "auto":
        return {rollout.tensor_parallel: expected_engine(recipe, files, device_name, rollout.tensor_parallel)}, ""
    narrow = expected_engine(recipe, files, device_name)
    stays = "rollout.tensor_parallel: auto stays at 1, because"
    if narrow.speed == ANY_SPEED:
        return {1: narrow}, f"{stays} the speed of wider engines cannot be estimated for this policy"
    config, widest = text_config(files), min(node_slots, rollout.max_actors // rollout.min_actors)
    widths = [width for width in engine_widths(config, widest) or [1] if width & (width - 1) == 0]
    engines = {width: expected_engine(recipe, files, device_name, width) for width in widths}
    holding = {width: engine for width, engine in engines.items() if (engine.capacity or 0) >= longest_tokens}
    if not holding:
        return {1: narrow}, f"{stays} no width is known to hold a sequence of {longest_tokens} tokens"
    width, engine = next(iter(holding.items()))
    if not recipe.functions.elastic:
        return {width: engine}, f"rollout.tensor_parallel: auto takes {width}, because functions.elastic is off"
    if len(holding) == 1:
        return holding, f"rollout.tensor_parallel: auto takes {width}, the only width that fits nodes, heads, memory and rollout.max_actors"
    return holding, ""
