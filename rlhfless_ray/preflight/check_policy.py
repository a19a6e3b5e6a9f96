"""Check a recipe's settings against the policy's config.json, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfless_ray.learn.model_checks import check_routers
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.engine_settings import check_heads
from rlhfless_ray.weights.quantized_base import check_quantized


def check_policy(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Raise UserError if engines or learner cannot have the policy of this config.json with the recipe's settings."""
    check_quantized(recipe, config)
    check_heads(recipe, config, "policy.path" if recipe.policy.path else "a policy made from scratch")
    check_routers(recipe, config)
