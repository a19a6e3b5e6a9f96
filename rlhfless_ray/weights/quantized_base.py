"""Policies whose files have 4-bit weights, as the base of an adapter (QLoRA).

The learner computes with the values that these weights stand for, in policy.dtype. Engines keep the 4 bits, and hold the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe


def has_4_bits(config: Mapping[str, Any]) -> bool:
    """Return whether config.json is that of a checkpoint of compressed-tensors with 4-bit integers (W4A16)."""
    section = config.get("quantization_config") or {}
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or (section.get("quant_method"), section.get("format")) != ("compressed-tensors", "pack-quantized"):
        return False
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    return bool(weights) and all(isinstance(w, Mapping) and (w.get("num_bits"), w.get("type")) == (4, "int") for w in weights)


def check_quantized(recipe: Recipe, config: Mapping[str, object]) -> None:
    """Raise UserError if a policy with quantised weights cannot be trained with these settings."""
    if not config.get("quantization_config") or not recipe.learns:
        return
    if not has_4_bits(config):
        refuse_quantized(config)
    wanted = {
        "lora.rank=16": recipe.lora.rank > 0,
        "lora.publish=adapter": recipe.lora.publish != "merged",
        "policy.dtype=bfloat16": recipe.policy.dtype == "bfloat16",
        "rollout.quantization=off": recipe.rollout.quantization == "off",
        "rollout.tensor_parallel=1": recipe.rollout.tensor_parallel == 1,
        "rollout.partial_kv=recompute": recipe.rollout.partial_kv != "keep",  # of an adapter that is replaced
    }
    if missing := [setting for setting, fits in wanted.items() if not fits]:
        raise UserError(
            f"policy.path: its weights have 4 bits, which an adapter's base may have only with {' and '.join(missing)}; set that"
        )
    if recipe.algorithm.has_critic and not recipe.critic.path:  # transformers would read the head from packed weights, too
        raise UserError("critic.path: a critic cannot be made from a policy whose weights have 4 bits; set it to the unquantised model")


def refuse_quantized(config: Mapping[str, Any], setting: str = "policy.path") -> None:
    """Raise UserError, which names `setting`, if the weights are quantised."""
    if section := config.get("quantization_config"):
        kind = section.get("quant_method", "by an unknown method")
        raise UserError(
            f"{setting}: its weights are quantised ({kind}). Only a policy may be quantised: in the 4 bits of compressed-tensors "
            "(pack-quantized), as the base of an adapter in `rlhfless train`, not in a supervised stage; set "
            f"{setting} to the unquantised model"
        )
