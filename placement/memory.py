"""Compute the bytes of a model's weights, KV cache and training state from its Hugging Face configuration.

Every figure is a lower bound. A run that does not fit by these figures cannot fit, so it may be refused. A run that fits by them may
still run out of memory, because imports, allocator slack, buffers of collectives and activations of long sequences are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from placement.plain_data import JsonObject

VALUE_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # gradients are accumulated in float32 whatever the weights' dtype is
MOMENT_BYTES = 8  # Adam's two moments in float32
MASTER_BYTES = 4  # DeepSpeed's ZeRO optimizers keep a copy of the weights in float32, also of float32 weights
AVERAGE_BYTES = 4  # an exponential moving average of the weights, in float32 on the host
TIED = (  # families whose output head is the embeddings unless they say otherwise
    *("gpt2", "gpt_bigcode", "gpt_neo", "bloom", "falcon", "mpt", "opt", "starcoder2", "mamba", "lfm2", "lfm2_moe", "minicpm3"),
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "smollm3"),
)
MOST_LAYERS = 10_000  # no model has more; a configuration with more is not counted

# Decoder families whose parameters are counted exactly. For each family:
#   biases       configuration keys that give its attention or feed-forward layers a bias
#   qkv_bias     query, key and value have a bias unless the configuration key of this name is false
#   qk_norm      queries and keys have norms, over each head ("head") or over all heads together ("all")
#   norms        number of a layer's other norms, if it is not two
#   experts      configuration key of an expert's width
#   dense_too    configuration keys may exempt some layers from having experts
#   shared       configuration key of the width of an expert that sees every token
#   other names: the family's default for a configuration that lacks this key
FAMILIES: dict[str, JsonObject] = {
    "llama": {"biases": ("attention_bias", "mlp_bias")},
    "mistral": {},
    "granite": {"biases": ("attention_bias", "mlp_bias")},
    "smollm3": {"biases": ("attention_bias", "mlp_bias")},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"biases": ("attention_bias",), "qk_norm": "head", "head_dim": 128},
    "gemma": {"biases": ("attention_bias",), "head_dim": 256},
    "gemma2": {"biases": ("attention_bias",), "head_dim": 256, "norms": 4},
    "mixtral": {"experts": "intermediate_size"},
    "olmoe": {"biases": ("attention_bias",), "experts": "intermediate_size", "qk_norm": "all"},
    "qwen2_moe": {"qkv_bias": True, "experts": "moe_intermediate_size", "dense_too": True, "shared": "shared_expert_intermediate_size"},
    "qwen3_moe": {"biases": ("attention_bias",), "qk_norm": "head", "experts": "moe_intermediate_size", "dense_too": True},
}


def text_part(config: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the language model's part of a multimodal configuration, or the configuration itself."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def parameter_count(config: Mapping[str, object], head: bool = True) -> int | None:
    """Count the parameters of the causal LM that a Hugging Face configuration describes.

    Parameters
    ----------
    config : mapping
        The tree of config.json.
    head : bool
        Whether to count the output head. Critics and reward models have none.

    Returns
    -------
    int or None
        The exact count, or None for a family that is not in `FAMILIES` or a configuration that lacks a size.
    """
    config = text_part(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    try:
        layers, hidden, vocabulary = (_size(config, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        if layers > MOST_LAYERS:
            return None
        total = sum(_layer(config, family, number) for number in range(layers)) + hidden + vocabulary * hidden
        if head and not ties_ends(config):
            total += vocabulary * hidden
    except (TypeError, ValueError):  # an invalid value, which loading the model will report
        return None
    return total


def _layer(config: Mapping[str, object], family: JsonObject, number: int) -> int:
    hidden, heads, kv_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads"), _kv_heads(config)
    width = _head_width(config, family)
    queries, keys = heads * width, kv_heads * width
    total = hidden * (2 * queries + 2 * keys) + family.get("norms", 2) * hidden
    if _has(config, family, "attention_bias"):
        total += queries + 2 * keys + hidden
    if "qkv_bias" in family and config.get("qkv_bias", True):
        total += queries + 2 * keys
    if "qk_norm" in family:
        total += 2 * width if family["qk_norm"] == "head" else hidden + hidden // heads * kv_heads
    return total + _feed_forward(config, family, number)


def _feed_forward(config: Mapping[str, object], family: JsonObject, number: int) -> int:
    hidden = _size(config, "hidden_size")
    if _is_dense(config, family, number):
        inner = _size(config, "intermediate_size")
        return 3 * hidden * inner + (2 * inner + hidden if _has(config, family, "mlp_bias") else 0)
    experts = _experts(config)
    total = hidden * experts + experts * 3 * hidden * _size(config, family["experts"])
    if "shared" in family:  # and the gate that weighs it
        total += 3 * hidden * _size(config, family["shared"]) + hidden
    return total


def _is_dense(config: Mapping[str, Any], family: JsonObject, number: int) -> bool:
    """Return whether the layer of this number has no experts."""
    if not family.get("dense_too"):
        return "experts" not in family
    return number in (config.get("mlp_only_layers") or ()) or (number + 1) % int(config.get("decoder_sparse_step") or 1) != 0


def _experts(config: Mapping[str, object]) -> int:
    return _size(config, "num_experts" if "num_experts" in config else "num_local_experts")


def _has(config: Mapping[str, object], family: JsonObject, bias: str) -> bool:
    return bias in family.get("biases", ()) and bool(config.get(bias))


def _size(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(key)
    return value


def _kv_heads(config: Mapping[str, object]) -> int:
    return _size(config, "num_key_value_heads" if config.get("num_key_value_heads") is not None else "num_attention_heads")


def _head_width(config: Mapping[str, object], family: JsonObject) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    return family.get("head_dim") or _size(config, "hidden_size") // _size(config, "num_attention_heads")


def stored_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights in a causal LM's files that its Hugging Face configuration determines.

    Keys are the ends of names, without the number of a layer or expert. Empty for a family that is not in `FAMILIES`, the parts of a
    multimodal model, quantised weights, and a configuration that lacks a size.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or config.get("quantization_config") or config.get("num_key_value_heads") is None:
        return {}
    try:
        hidden, vocabulary = _size(config, "hidden_size"), _size(config, "vocab_size")
        width, inner = _head_width(config, family), _size(config, "intermediate_size")
        expert = _size(config, family.get("experts", "intermediate_size"))
        queries, keys = _size(config, "num_attention_heads") * width, _kv_heads(config) * width
    except ValueError:
        return {}
    rows = {
        "embed_tokens": vocabulary,
        "lm_head": vocabulary,
        "self_attn.q_proj": queries,
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
    }
    rows |= {"mlp.gate_proj": inner, "mlp.up_proj": inner, "experts.gate_proj": expert, "experts.up_proj": expert}
    columns = {"self_attn.o_proj": queries, "mlp.down_proj": inner, "experts.down_proj": expert}
    return {
        "input_layernorm": (hidden,),
        **{name: (size, hidden) for name, size in rows.items()},
        **{name: (hidden, size) for name, size in columns.items()},
    }


def header_parameters(tensors: Iterable[tuple[str, list[int], str]], head: bool = True) -> int:
    """Count the parameters that the headers of safetensors files list. `tensors`: (name, shape, dtype) of each.

    Packed 4-bit weights count eight to an integer. Tensors that a causal LM does not train are left out: other integers, masks that old
    files store as buffers, rotary tables, and the vision and multi-token-prediction parts of larger models. `head`: whether to count the
    output head.
    """
    total = 0
    for name, shape, dtype in tensors:
        if name.endswith(".weight_packed"):
            total += 8 * math.prod(shape)
        buffer = not dtype.startswith(("F", "BF")) or shape[:2] == [1, 1] or "rotary_emb" in name
        elsewhere = "vision" in name or "visual" in name or name.startswith("mtp.")
        if not (buffer or elsewhere or (not head and name.endswith("lm_head.weight"))):
            total += math.prod(shape)
    return total


def end_parameters(config: Mapping[str, object]) -> int:
    """Return the parameters of embeddings and output head, 0 if the configuration lacks their sizes.

    They count as shared if an unknown family's configuration does not say it.
    """
    config = text_part(config)
    vocabulary, hidden = config.get("vocab_size"), config.get("hidden_size")
    if not isinstance(vocabulary, int) or not isinstance(hidden, int):
        return 0
    is_known = "tie_word_embeddings" in config or config.get("model_type") in FAMILIES
    return vocabulary * hidden * (2 if is_known and not ties_ends(config) else 1)


def expert_parameters(config: Mapping[str, object]) -> int:
    """Return the parameters of a mixture's routed experts, 0 for other models and families that are not in `FAMILIES`."""
    config = text_part(config)
    family = FAMILIES.get(str(config.get("model_type")), {})
    try:
        layers, hidden = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
        counts = [0 if _is_dense(config, family, number) else _experts(config) for number in range(min(layers, MOST_LAYERS))]
        return 3 * hidden * _size(config, family["experts"]) * sum(counts) if any(counts) else 0
    except (TypeError, ValueError):  # an invalid value, which loading the model will report
        return 0


def ties_ends(config: Mapping[str, object]) -> bool:
    """Return whether embeddings and output head share their weights. Configurations of some families leave it out."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in TIED))


def kv_bytes(config: Mapping[str, object], tokens: int, value_bytes: int, width: int = 1) -> int:
    """Return the bytes that the KV cache of one sequence of `tokens` tokens takes on each of the engine's `width` slots.

    The result is 0 for a family that is not in `FAMILIES`. If the configuration has a sliding window, all layers count as windowed, even
    in families in which only some of them are.
    """
    config = text_part(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return 0
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    held = min(tokens, window) if isinstance(window, int) and window > 0 else tokens
    try:
        heads = -(-_kv_heads(config) // width)  # slots beyond the number of heads hold copies
        return 2 * _size(config, "num_hidden_layers") * heads * _head_width(config, family) * value_bytes * held
    except ValueError:
        return 0


def engine_widths(config: Mapping[str, Any], most: int) -> list[int] | None:
    """Return the numbers of slots, up to `most`, among which an engine's heads and feed-forward layers can be divided.

    Returns None if the configuration lacks the number of heads.
    """
    config = text_part(config)
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or min(heads, kv_heads) < 1:
        return None
    inner = [config[key] for key in ("intermediate_size", "moe_intermediate_size") if isinstance(config.get(key), int)]
    shared = [n for n in range(1, min(heads, most) + 1) if not any(size % n for size in (heads, *inner))]
    return [n for n in shared if max(kv_heads, n) % min(kv_heads, n) == 0]  # slots beyond the number of KV heads hold copies


def activation_bytes(config: Mapping[str, object], tokens: int, value_bytes: int) -> int:
    """Return the bytes of the layers' inputs of a micro-batch of `tokens` tokens, kept even with gradient checkpointing."""
    config = text_part(config)
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    return layers * hidden * tokens * value_bytes if isinstance(layers, int) and isinstance(hidden, int) else 0


@dataclass(frozen=True)
class Training:
    """How a worker group trains a model. `value_bytes`: bytes of a weight."""

    ranks: int = 1
    zero_stage: int = 0
    value_bytes: int = 4
    offload: bool = False
    """Gradients, moments and float32 weights stay in host memory."""
    adapters: bool = False
    """Only adapters are trained. Their few weights are not counted."""
    tensor_parallel: int = 1
    """Ranks that share one copy of the model."""
    undivided: int = 0
    """Parameters that each of these ranks holds in full: embeddings and output head."""
    sequence_parallel: int = 1
    """Ranks that share each sequence: each has the activations of its slice."""

    def own(self, parameters: int) -> int:
        """Return how many of the model's parameters a tensor-parallel rank holds, before ZeRO shards their state."""
        return self.undivided + (parameters - self.undivided) // self.tensor_parallel


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds.

    weights: also while it loads the model. loaded: from then until the first update, which creates the moments. offload: optimizer
    state and gradients are in host memory.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    loaded: int
    offload: bool = False

    @property
    def idle(self) -> int:
        """Bytes held between updates, on host and device together."""
        return self.weights + self.optimizer

    @property
    def training(self) -> tuple[tuple[str, int], ...]:
        """Parts held during an update, on host and device together: (name, bytes) of each."""
        return (
            ("weights", self.weights),
            ("optimizer state", self.optimizer),
            ("gradients", self.gradients),
            ("activations", self.activations),
        )

    @property
    def on_device(self) -> tuple[tuple[str, int], ...]:
        """Parts that the device holds at its peak: (name, bytes) of each."""
        kept = ("weights", "activations") if self.offload else ("weights", "optimizer state", "gradients", "activations")
        return tuple(part for part in self.training if part[0] in kept)


def snapshot_bytes(parameters: int, value_bytes: int) -> int:
    """Return the bytes of a training snapshot: weights, Adam's moments, and float32 copies of weights in a narrower dtype."""
    return parameters * (value_bytes + MOMENT_BYTES + (MASTER_BYTES if value_bytes < MASTER_BYTES else 0))


def rank_memory(parameters: int, training: Training, activations: int = 0) -> RankMemory:
    """Return the memory of a rank of a worker group (ZeRO, arXiv 1910.02054, section 5).

    Stage 1 shards the optimizer's state, stage 2 the gradients too, stage 3 the weights too. A rank of stage 3 reads one parameter
    after the other from the mapped files. Gradients at stage 1 count as sharded: DeepSpeed's stage 1 may reduce them early, and
    bfloat16 is trained by its stage 2.
    """
    parameters, n, width = training.own(parameters), training.ranks // training.tensor_parallel, training.value_bytes
    whole = parameters * width
    weights = whole // n if training.zero_stage == 3 else whole
    trained = 0 if training.adapters else parameters
    shards = n if training.zero_stage else 1
    master = trained * MASTER_BYTES // shards if training.zero_stage else 0
    optimizer, gradients = master + trained * MOMENT_BYTES // shards, trained * GRADIENT_BYTES // shards
    return RankMemory(weights, optimizer, gradients, activations, weights + master, training.offload)
