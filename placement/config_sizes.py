"""Find sizes and names in a Hugging Face configuration that no model can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.memory import FAMILIES, MOST_LAYERS, text_part

HIDDEN, HEADS = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
LAYERS = ("num_hidden_layers", "n_layer")
POSITIVE = (*HIDDEN, *HEADS, *LAYERS, "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "n_positions")
COUNTS = ("intermediate_size", "n_inner", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok")
MOST = 2**31  # sizes are smaller: vLLM and torch keep them in 32 bits
OBJECTS = ("text_config", "quantization_config")
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
HEADS_SHARE_WIDTH = {*(name for name, family in FAMILIES.items() if "head_dim" not in family), "gpt2", "gpt_neox", "olmo2", "opt"}


def wrong_size(config: Mapping[str, Any]) -> str:
    """Return what is wrong with the sizes in a configuration, or an empty string.

    Values that some families list per layer are not judged, and neither are names that only other families use.
    """
    for key in OBJECTS:
        if not isinstance(config.get(key) or {}, Mapping):
            return f"`{key}` must be an object, not {_shown(config[key])}"
    for part in (config, text_part(config)):
        names, kind = part.get("architectures") or [], part.get("model_type")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return f"`architectures` must be a list of names, not {_shown(names)}"
        if not isinstance(kind, str | None):
            return f"`model_type` must be a name, not {_shown(kind)}"
        wrong = (_wrong(part, key) for key in (*POSITIVE, *COUNTS))
        if found := next(filter(None, wrong), "") or _uneven(part):
            return found
    family = FAMILIES.get(config.get("model_type") or "")
    if family is None or config.get("text_config"):
        return ""
    needed = (*NEEDED, family.get("experts", "intermediate_size"))
    return next(filter(None, (_wrong(config, key, needed=True) for key in needed)), "")


def _wrong(config: Mapping[str, object], key: str, *, needed: bool = False) -> str:
    """Return what is wrong with the value of a key, or an empty string. `needed`: it must be there, and one number."""
    value, most = config.get(key), MOST_LAYERS if key in LAYERS else MOST - 1
    if value is None:
        return f"`{key}` is missing" if needed else ""
    if isinstance(value, list) and value and not needed:
        return ""
    if not isinstance(value, int) or isinstance(value, bool) or value < (needed or key in POSITIVE):
        return f"`{key}` must be a {'whole number' if key in COUNTS and not needed else 'positive integer'}, not {_shown(value)}"
    return f"`{key}` must be a positive integer up to {most}, not {_shown(value)}" if value > most else ""


def _uneven(config: Mapping[str, Any]) -> str:
    """Return which sizes do not divide each other, or an empty string."""
    hidden, heads = (next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), None) for keys in (HIDDEN, HEADS))
    if heads is None:
        return ""
    kv_heads = config.get("num_key_value_heads")
    if isinstance(kv_heads, int) and heads[1] % kv_heads:
        return f"`num_key_value_heads` {kv_heads} does not divide `{heads[0]}` {heads[1]}"
    divides = hidden is None or hidden[1] % heads[1] == 0
    if not divides and config.get("head_dim") is None and config.get("model_type") in HEADS_SHARE_WIDTH:
        assert hidden is not None
        return f"`{heads[0]}` {heads[1]} does not divide `{hidden[0]}` {hidden[1]}"
    return ""


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}…"
