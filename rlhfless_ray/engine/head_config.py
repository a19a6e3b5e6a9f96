"""EAGLE-3 heads by their config.json. Pure: imports neither torch nor vLLM."""

from __future__ import annotations

from rlhfless_ray.common.json_types import JsonObject

# Policies of which vLLM 0.32 returns hidden states of inner layers (`SupportsEagle3`), among the families that are checked here.
POLICIES = (
    "ApertusForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Variants of published heads that compute something else.
VARIANTS = ("norm_before_fc", "fc_norm", "norm_output", "logit_scale", "parallel_drafting", "quantization_config", "speculators_config")

EMBEDDINGS = "embed_tokens.weight"
NEEDED = ("fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight")  # by the names of `plain_name`


def plain_name(name: str) -> str:
    """Return the name of a head's tensor in `Eagle3Head`. Checkpoints name the layer in two ways."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def is_head(config: JsonObject) -> bool:
    """Return whether a folder with this config.json has an EAGLE head, not a whole model."""
    return any("Eagle" in name for name in config.get("architectures") or ()) or "speculators_config" in config


def layers_read(config: JsonObject) -> tuple[int, ...]:
    """Return the policy's layers before which the head reads the hidden states. Empty: vLLM's default, three layers."""
    nested = config.get("eagle_config") or {}
    return tuple(config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids") or ())


def refusal(config: JsonObject, policy: JsonObject) -> str | None:
    """Return why a head cannot draft for a policy, or None. Both are the contents of a config.json."""
    text = policy.get("text_config") or policy
    if variants := [name for name in VARIANTS if config.get(name)]:
        return f"the head has {', '.join(variants)}, which is not supported; name a plain EAGLE-3 head"
    if not any("Eagle3" in name for name in config["architectures"]) or config.get("model_type", "llama") != "llama":
        return f"it is of type {config['architectures'][0]}; heads must be EAGLE-3 with a Llama layer"
    if config.get("num_hidden_layers", 1) != 1:
        return f"the head has {config['num_hidden_layers']} layers; EAGLE-3 heads have one"
    if not set(policy.get("architectures") or ()).intersection(POLICIES):
        return f"vLLM returns no hidden states of a {(policy.get('architectures') or ['policy'])[0]}; name a whole model"
    if config["vocab_size"] != text["vocab_size"]:
        return f"its vocab_size {config['vocab_size']} is not the policy's {text['vocab_size']}; name a head of this policy"
    size = config.get("target_hidden_size") or config["hidden_size"]
    if size != text["hidden_size"]:
        return f"it reads hidden states of size {size}, and the policy's have {text['hidden_size']}; name a head of this policy"
    if (layers := layers_read(config)) and max(layers) > text["num_hidden_layers"]:
        return f"it reads layer {max(layers)} of a policy with {text['num_hidden_layers']} layers; name a head of this policy"
    return None
