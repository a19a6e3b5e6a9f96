"""What `rollout.engine: stock` does not have."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfless_ray.recipe.algorithm_sections import AlgorithmConfig
from rlhfless_ray.recipe.learn_sections import LoraConfig
from rlhfless_ray.recipe.rollout_sections import RolloutConfig
from rlhfless_ray.recipe.run_sections import RunConfig


def mistakes_in_stock(rollout: RolloutConfig, lora: LoraConfig, algorithm: AlgorithmConfig, run: RunConfig) -> Iterator[str]:
    """Yield a sentence for each setting that only the exact engine can satisfy. `auto` means without it, where that changes no result."""
    if rollout.engine != "stock":
        return
    pages = "KV pages that engines exchange"
    asked = [  # key, value, whether it needs the exact engine, what it needs, what to set instead
        ("rollout.speculation", rollout.speculation, rollout.speculation == "on", "drafts that change no token", "auto or off"),
        ("rollout.prefix_kv", rollout.prefix_kv, rollout.prefix_kv == "on", pages, "auto"),
        ("rollout.partial_kv", rollout.partial_kv, rollout.partial_kv == "keep", pages, "recompute"),
        ("rollout.quantization", rollout.quantization, rollout.quantization != "off", "weights quantised at each load", "off"),
        ("lora.publish", lora.publish, lora.publish == "adapter", "an adapter that is replaced in place", "merged"),
        ("algorithm.loss.router_replay", "true", algorithm.loss.router_replay, "the experts that routers choose", "false"),
        ("run.exact", "true", run.exact, "tokens that depend on no other sequence", "false"),
    ]
    for key, value, needed, what, instead in asked:
        if needed:
            yield f"{key}: {value} needs {what}, which rollout.engine=stock does not have; set it to {instead}, or rollout.engine to exact"
