"""Check the learner's settings against the policy's architecture, from its config.json. Without torch, because the driver checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prefix.supported_models import unsupported

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

# Tested. Others have fused matrices, norms over all heads or experts, which would be cut in other places.
DIVIDED = ("gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
# Tested with ranks that share sequences: their attention goes through transformers' interface, and nothing else looks at other tokens.
SLICED = (*DIVIDED, "olmo2", "phi3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
OF_LENGTH = ("dynamic", "longrope", "su")  # types of rotary embeddings that depend on a sequence's length; a rank sees only its slice
WITH_ROUTERS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
MOST_EXPERTS = 255  # whose numbers `Completion.experts` can hold beside `batch.UNKNOWN_EXPERT`


def family_refusal(config: Mapping[str, Any]) -> str:
    """Return why no number of ranks can share a model with this configuration. Empty if some may."""
    family = str((config.get("text_config") or config).get("model_type"))
    return "" if family in DIVIDED else f"models of type {family} are not tested with it; those of {', '.join(DIVIDED)} are"


def refusal(config: Mapping[str, Any], width: int) -> str | None:
    """Return why a model with this configuration cannot be divided among `width` ranks, or None."""
    if why := family_refusal(config):
        return why
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads")
    sizes = {
        "attention heads": heads,
        "KV heads": text.get("num_key_value_heads") or heads,
        "feed-forward size": text.get("intermediate_size"),
    }
    uneven = [f"{size} {what}" for what, size in sizes.items() if not isinstance(size, int) or size % width]
    return f"{width} does not divide the model's {' and '.join(uneven)}" if uneven else None


def slicing_refusal(config: Mapping[str, Any], size: int) -> str | None:
    """Return why `size` ranks cannot share the sequences of a model with this configuration, or None."""
    text = config.get("text_config") or config
    family = str(text.get("model_type"))
    if family not in SLICED:
        return f"models of type {family} are not tested with it; those of {', '.join(SLICED)} are"
    heads, rotary = text.get("num_attention_heads"), text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = {str(x.get("rope_type", x.get("type"))) for x in (rotary, *rotary.values()) if isinstance(x, Mapping)}
    if found := kinds.intersection((*OF_LENGTH, "yarn") if family == "phi3" else OF_LENGTH):  # transformers makes it longrope there
        return f"the model's rotary embeddings are of type {found.pop()}, which depends on the length of the whole sequence"
    if text.get("attn_logit_softcapping"):
        return "the model caps its attention scores (attn_logit_softcapping), which is not supported where ranks share sequences"
    return None if isinstance(heads, int) and heads % size == 0 else f"{size} does not divide the model's {heads} attention heads"


def check_division(
    recipe: Recipe,
    config: Mapping[str, object],
    of_reference: Mapping[str, object] | None = None,
    of_critic: Mapping[str, object] | None = None,
) -> None:
    """Raise UserError if the policy, or a reference or critic of another config.json, cannot be divided among ranks as the recipe says."""
    check_width("learner", recipe.learner.tensor_parallel, config)
    check_width("reference", recipe.reference.tensor_parallel, of_reference or config)
    check_width("critic", recipe.critic.tensor_parallel, of_critic or config)
    check_slices("learner", recipe.learner.sequence_parallel, config)
    check_slices("critic", recipe.critic.sequence_parallel, of_critic or config)


def check_width(section: str, width: int, config: Mapping[str, object], whose: str = "") -> None:
    """Raise UserError if a model with this config.json cannot be divided among `width` ranks.

    `section`: of the recipe. `whose`: words that name the model, if it is not the section's.
    """
    if width > 1 and (why := refusal(config, width)):
        raise UserError(f"{section}.tensor_parallel: {whose}{why}")


def check_slices(section: str, size: int, config: Mapping[str, object], whose: str = "") -> None:
    """Raise UserError if `size` ranks cannot share the sequences of a model with this config.json. Arguments as in `check_width`."""
    if size > 1 and (why := slicing_refusal(config, size)):
        raise UserError(f"{section}.sequence_parallel: {whose}{why}")


def check_routers(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Raise UserError if the loss has a setting of routers that the policy with this config.json cannot follow."""
    text, loss = config.get("text_config") or config, recipe.algorithm.loss
    kind = str(text.get("model_type"))
    for key in ("router_aux", "router_replay"):
        if getattr(loss, key) and kind not in WITH_ROUTERS:
            raise UserError(
                f"algorithm.loss.{key}: models of type {kind} have no routers that are known here; leave it out, or take one of "
                + ", ".join(WITH_ROUTERS)
            )
    if loss.router_replay and (why := unsupported(dict(config))):
        raise UserError(f"algorithm.loss.router_replay: engines keep choices beside the KV of a token, but {why}; set it to false")
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    if loss.router_replay and experts > MOST_EXPERTS:
        raise UserError(f"algorithm.loss.router_replay: {experts} experts are more than {MOST_EXPERTS}; set it to false")
