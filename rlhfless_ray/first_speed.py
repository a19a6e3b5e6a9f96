"""What the first plan knows of an engine that has not told of a step yet: its speed by the roofline, and the KV tokens it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.roofline import BYTES, Device, Model, decode_speed, kv_capacity
from placement.speed import Speed
from rlhfless_ray.policy_files import kv_cache_bytes, text_config
from rlhfless_ray.recipe import Recipe

ANY_SPEED = Speed(base_s=0.01, per_seq_s=0.0001)  # where a configuration does not say what a step moves
CORE, ANY_GPU = "CPU-core", "L40S"


@dataclass(frozen=True)
class ExpectedEngine:
    """speed of its decode steps; capacity: KV tokens it holds (None: not known); note: what could not be told, for the user."""

    speed: Speed
    capacity: int | None = None
    note: str = ""


def expected_engine(recipe: Recipe, files: dict[str, bytes], device_name: str | None) -> ExpectedEngine:
    """Of the policy in `files` on a core (None) or on a GPU as Ray calls it (`accelerator_type`; "": not told)."""
    from placement.simulate import catalog

    try:
        model = Model.of("policy", text_config(files))
    except ValueError as error:
        return ExpectedEngine(ANY_SPEED, None, f"the first plan guesses how fast engines are: {error}")
    wide = 4 if recipe.policy.dtype == "float32" else BYTES
    if device_name is None:
        speed = decode_speed(model, _of_width(catalog.device(CORE), wide))
        block = kv_cache_bytes(files, recipe.rollout.block_size, recipe.rollout.block_size, recipe.policy.dtype)
        if block is None:
            return ExpectedEngine(speed)
        blocks = recipe.rollout.kv_cache_mb * 2**20 // (block // 2) - 1  # block: two of them, of which vLLM holds one back
        return ExpectedEngine(speed, blocks * recipe.rollout.block_size)
    note = ""
    try:
        device = catalog.device(device_name)
    except ValueError:
        device = catalog.device(ANY_GPU)
        note = f"the first plan takes {device_name or 'the GPU'} for one of {ANY_GPU}, for which it has figures"
    device = _of_width(device, wide)
    try:
        capacity = kv_capacity(model, device, 1, recipe.rollout.gpu_memory_share)
    except ValueError:  # the engine will say so
        capacity = None
    return ExpectedEngine(decode_speed(model, device), capacity, note)


def _of_width(device: Device, value_bytes: int) -> Device:
    """The roofline counts values of two bytes: of wider ones less fits, and they come more slowly."""
    share = BYTES / value_bytes
    return replace(device, memory_bytes=device.memory_bytes * share, memory_bytes_per_s=device.memory_bytes_per_s * share)
