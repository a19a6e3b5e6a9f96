"""Models that vLLM (0.32) and transformers compute differently, by their config.json. Pure: imports no library of models.

Each case was measured with a small random policy in float32. `runtime.agreement` would end such a run after its first rollout or
update, but not where rounding in bfloat16 hides the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

COHERE2_WINDOW = 4096  # the family's default
UNUSED_BIASES = {"ernie4_5": "use_bias", "qwen3": "attention_bias", "qwen3_moe": "attention_bias"}  # by the key that adds them


def find_difference(config: Mapping[str, Any], longest_tokens: int) -> str | None:
    """Return why engines would sample from another policy than the learner trains, or None.

    `longest_tokens`: of the longest possible sequence.
    """
    text = config.get("text_config") or config
    kind = text.get("model_type")
    if (key := UNUSED_BIASES.get(str(kind))) and text.get(key):
        return f"with {key} transformers has biases that vLLM does not use"
    if kind == "cohere2":
        window = text.get("sliding_window") or COHERE2_WINDOW
        if longest_tokens > window:
            return f"vLLM's attention window is {window + 1} tokens, and transformers' is {window}; keep sequences within {window} tokens"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        if isinstance(original, int) and longest_tokens > original:
            return (
                f"of its longrope vLLM takes the long factors for every sequence, and transformers only beyond {original} tokens; keep "
                f"sequences within {original} tokens"
            )
    return None


def check_differences(recipe: Recipe, config: Mapping[str, Any], longest_prompt_tokens: int) -> None:
    """Raise UserError for such a policy, unless nothing is learned or `rollout.agreement` is `warn`."""
    longest = recipe.longest_tokens(longest_prompt_tokens)
    if recipe.learns and recipe.rollout.agreement == "end" and (why := find_difference(config, longest)):
        raise UserError(
            f"policy.path: engines would sample from another policy ({longest} tokens at most): {why}; take another model, or set "
            "rollout.agreement=warn to train anyway"
        )
