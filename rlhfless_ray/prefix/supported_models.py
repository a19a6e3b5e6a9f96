"""Determine which policies' KV can be stored as pages. Pure: reads a model's config, imports nothing."""

from __future__ import annotations

from rlhfless_ray.common.json_types import JsonObject

ATTENTION = ("full_attention", "attention", "global")
# Keys that only configs of models with recurrent layers have. Published ones, as that of Qwen3-Next, often list no kinds of layers.
STATES = (
    *("ssm_cfg", "mamba_d_state", "ssm_state_size", "state_size", "rwkv_hidden_size"),
    *("linear_conv_kernel_dim", "linear_attn_config", "conv_L_cache", "lru_width"),
)


def unsupported(config: JsonObject, width: int = 1) -> str | None:
    """Return why engines of `width` slots cannot store the KV of a policy with this config.json as pages, or None if they can.

    A page holds one block of every layer and is valid for all requests with the same tokens before it. This fails for layers
    that forget tokens (sliding windows, chunks), keep a running state (Mamba and other recurrences), or depend on more than
    tokens (images, an encoder's output).
    """
    text = config.get("text_config") or config
    if config.get("is_encoder_decoder"):
        return "it has an encoder, whose output is no prefix of the tokens"
    for name in ("vision_config", "audio_config"):
        if config.get(name):
            return f"it reads more than text ({name}), which tokens do not identify"
    kinds = {str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()}
    others = sorted(kinds.difference(ATTENTION))
    if others:
        return f"some of its layers are of kind {', '.join(others)}, not full attention"
    windowed = text.get("use_sliding_window", True) and not kinds
    if windowed and text.get("sliding_window"):
        return f"its layers have a sliding window of {text['sliding_window']} tokens"
    if text.get("attention_chunk_size"):
        return f"its layers attend within chunks of {text['attention_chunk_size']} tokens"
    if states := [name for name in STATES if text.get(name)]:
        return f"it keeps a recurrent state ({states[0]}), not KV alone"
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    if heads and heads % width:
        return f"its KV heads ({heads}) are not divided evenly among the {width} slots of an engine"
    return None


def page_bytes(config: JsonObject, dtype_bytes: int, block_size: int) -> int:
    """Return the bytes of one page of a plain attention model: keys and values of a block over all layers.

    An estimate until an engine reports the true size; 0 if the config uses other names.
    """
    text = config.get("text_config") or config
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    if not heads or not layers:
        return 0
    width = text.get("head_dim") or text.get("hidden_size", 0) // heads
    return 2 * layers * (text.get("num_key_value_heads") or heads) * width * dtype_bytes * block_size
