"""Check a recipe's settings against the policy's config.json, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.engine_settings import check_heads
from rlhfless_ray.learn.model_checks import check_routers
from rlhfless_ray.prefix.supported_models import unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.adapter import not_served
from rlhfless_ray.weights.quantized_base import check_quantized, has_4_bits


def check_policy(recipe: Recipe, config: Mapping[str, object]) -> None:
    """Raise UserError if engines or learner cannot have the policy of this config.json with the recipe's settings."""
    check_quantized(recipe, config)
    check_heads(recipe, config, "policy.path" if recipe.policy.path else "a policy made from scratch")
    check_routers(recipe, config)
    if reason := why_not_served(recipe, config):
        if recipe.lora.rank and has_4_bits(config):
            raise UserError(f"policy.path: its weights have 4 bits, and {reason}")
        if recipe.lora.publish == "adapter":
            raise UserError(f"lora.publish: {reason}; set merged or auto")
    if recipe.rollout.partial_kv == "keep" and (reason := unsupported(dict(config), recipe.rollout.least_width)):
        raise UserError(f"rollout.partial_kv: the KV of this policy cannot be kept, because {reason}; set recompute")


def why_not_served(recipe: Recipe, config: Mapping[str, object]) -> str | None:
    """Return why engines cannot hold an adapter of the policy of this config.json, or None."""
    if recipe.rollout.engine == "stock":
        return "stock engines hold merged weights only"
    return not_served(str(config.get("model_type", "")), recipe.lora.rank, recipe.lora.target_modules)
