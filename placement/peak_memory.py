"""Predict the peak memory of each function: proportional set size on CPU slots, device memory on GPUs.

`placement.memory` has lower bounds, by which a run may be refused. The figures here are estimates. The overheads of libraries,
allocators and DeepSpeed were measured at 494 M parameters on CPU (docs/models.md). On GPUs `CUDA_BYTES` replaces the bytes of imports.
The GPU figures were not compared with a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from placement.memory import FAMILIES, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES, Training, kv_bytes, rank_memory, text_part, ties_ends

CHUNK_BYTES = 1 << 28  # float32 logits that a learner computes at once
CHUNK_COPIES = 3.5  # logits in the model's dtype and in float32, probabilities, and their gradient
LEARNER_BYTES = 600_000_000  # imports of a rank on CPU, and DeepSpeed's buffers
ENGINE_BYTES = 560_000_000  # imports of an engine on CPU
PASS_BYTES = 450_000_000  # imports of a process that computes passes only
DRIVER_BYTES = 500_000_000  # driver, Ray and reward processes
CUDA_BYTES = 600_000_000  # a process's context on a GPU
USED_SHARE = 0.85  # share of the memory that chosen settings may take: predictions are up to 15 % off

ADDED_BYTES = 3  # bytes per parameter while the gradients of a micro-batch are added to those of the ones before it
ADAPTER_SLACK = 1.5  # heap of adapters' activations over the size of the kept tensors: short-lived tensors lie between them
STAGE_1_COPIES = 2.5  # copies of the gradients of float32 weights in an optimizer step of DeepSpeed's stage 1

WIDE_TENSORS = 8  # queries, keys, values, their attention, and the gradient of each

DEFAULT_TOKENS = 8192
LEAST_WHOLE_TOKENS = 1024  # tokens: smaller micro-batches cost more time than recomputing activations
LEAST_TOKENS = 512  # tokens: with smaller micro-batches nearly all memory is weights and state


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of a micro-batch in tokens.

    longest: tokens of the longest row. targets: response tokens, whose logits are computed. is_only: whether it is the only micro-batch
    of its step. is_masked: whether rows may hold several responses, each of which sees only itself and the prompt.
    """

    tokens: int
    longest: int
    targets: int
    is_only: bool = False
    is_masked: bool = True


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update that trade time for memory."""

    micro_batch_tokens: int = DEFAULT_TOKENS
    checkpointing: bool = False
    offload: bool = False


def choices(*, may_offload: bool) -> Iterator[UpdateSettings]:
    """Yield settings in order of the time they cost, least first."""
    sizes = [DEFAULT_TOKENS >> k for k in range(DEFAULT_TOKENS.bit_length()) if DEFAULT_TOKENS >> k >= LEAST_TOKENS]
    for offload, checkpointing in itertools.product((False, True), (False, True)):
        if may_offload or not offload:
            yield from (UpdateSettings(n, checkpointing, offload) for n in sizes if checkpointing or n >= LEAST_WHOLE_TOKENS)


# ---- an update --------------------------------------------------------------------------------------------------


def trainer_parts(
    config: Mapping[str, object],
    parameters: int,
    training: Training,
    batch: MicroBatch,
    *,
    checkpointing: bool,
    lora_rank: int = 0,
    on_gpu: bool,
) -> tuple[tuple[str, int], ...]:
    """Return the parts of the memory that one rank holds at the peak of an update: (name, bytes) of each.

    The memory is that of its GPU, or of its process on CPU slots.
    """
    trained = adapter_parameters(config, lora_rank) if training.adapters else parameters
    slack, slices = ADAPTER_SLACK if training.adapters else 1.0, training.sequence_parallel
    working = update_bytes(config, batch, training.value_bytes, checkpointing, slack, slices)
    working += 0 if on_gpu else wide_bytes(config, -(-batch.tokens // slices), training.value_bytes)
    if batch.targets and not training.adapters:
        # gradient of the output head, and the sum of those of earlier chunks; a few tokens of tied embeddings need one (learn/tied_ends.py)
        is_one = ties_ends(config) and training.zero_stage < 3 and training.tensor_parallel == 1 and not on_gpu
        ends = _number(text_part(config), "vocab_size") * _width(config) * training.value_bytes
        working += ends if is_one and batch.targets <= slices * _width(config) else 2 * ends
    # DeepSpeed (0.19) adds narrow gradients to one float32 tensor as each comes, and its optimizer steps on that tensor
    # (GradPartitionBufferGroup in stage_1_and_2.py); others it holds until the end of a pass, and copies for the optimizer
    has_one_sum = training.zero_stage in (1, 2) and training.value_bytes < GRADIENT_BYTES and not training.offload
    if training.zero_stage and not batch.is_only and not has_one_sum:
        working += ADDED_BYTES * trained // training.ranks
    stepping = 0.0
    if training.zero_stage and not training.offload and not has_one_sum:
        copies = STAGE_1_COPIES if training.zero_stage == 1 else 1
        stepping = copies * trained * GRADIENT_BYTES / training.ranks
    rank = rank_memory(parameters, training, max(working, int(stepping)))
    adapters = trained * (training.value_bytes + MASTER_BYTES + MOMENT_BYTES + GRADIENT_BYTES) if training.adapters else 0
    base = ("context", CUDA_BYTES) if on_gpu else ("imports", LEARNER_BYTES)
    return (*(rank.on_device if on_gpu else rank.training), ("adapters", adapters), base)


def update_bytes(
    config: Mapping[str, object], batch: MicroBatch, value_bytes: int, checkpointing: bool, slack: float = 1.0, slices: int = 1
) -> int:
    """Return the bytes that an update holds for a micro-batch at its peak: activations, attention mask and a chunk of logits.

    `slack`: heap that activations take, as a multiple of their size. `slices`: ranks that share each row. Each has the mask of whole rows.
    """
    layers = _number(text_part(config), "num_hidden_layers", "n_layer")
    each = layer_bytes(config, batch.longest, value_bytes)
    kept = each + layers * _width(config) * value_bytes if checkpointing else layers * each
    ends = 5 * _width(config) * value_bytes  # embeddings, last norm, and the states that the head reads
    mask = batch.longest * (value_bytes + 2) if batch.is_masked else 0  # it is made from booleans
    own, targets = -(-batch.tokens // slices), -(-batch.targets // slices)
    return int(own * (slack * kept + ends) + batch.tokens * mask) + logits_bytes(config, targets)


def wide_bytes(config: Mapping[str, object], tokens: int, value_bytes: int) -> int:
    """Return the bytes of float32 copies with which a CPU without bfloat16 instructions multiplies, and 0 for float32 weights.

    Attention has the most: copies of its input, its output and their gradients. Other layers copy a block at a time. It is counted for
    every CPU, because the nodes that will compute are not known.
    """
    return WIDE_TENSORS * MASTER_BYTES * _width(config) * tokens if value_bytes < MASTER_BYTES else 0


def layer_bytes(config: Mapping[str, object], longest: int, value_bytes: int) -> int:
    """Return the bytes per token that one decoder layer keeps for the backward pass, or 0 if the configuration lacks its sizes.

    The tensors were counted with hooks on saved tensors in transformers: the inputs of products, and those of norms, which are computed
    in float32. Families that are not in `FAMILIES` are counted with many norms, an upper estimate.
    """
    config = text_part(config)
    hidden, heads = _width(config), _number(config, "num_attention_heads", "n_head")
    if not hidden or not heads:
        return 0
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind, {"norms": 4, "qk_norm": "all"})
    width = _number(config, "head_dim") or family.get("head_dim") or hidden // heads
    queries, keys = heads * width, (_number(config, "num_key_value_heads") or heads) * width
    of_norm = 2 + 4 // value_bytes + (kind.startswith("gemma") and value_bytes < 4)  # tensors that a norm keeps
    values = family.get("norms", 2) * of_norm * hidden + 2 * (queries + keys) + 4 * _inner_width(config, family)
    if "qk_norm" in family:
        values += (of_norm - 1) * (queries + keys)
    if kind == "phi3":  # queries, keys and values are slices of one tensor
        values += 3 * (queries + 2 * keys) // 2
    scores = 8 * heads * longest if config.get("attn_logit_softcapping") else 0  # this attention keeps every pair of tokens
    return values * value_bytes + scores


def _inner_width(config: Mapping[str, Any], family: Mapping[str, Any]) -> int:
    """Return the feed-forward width that a token passes through, summed over all of its experts."""
    if "experts" not in family:
        return _number(config, "intermediate_size", "n_inner") or 4 * _width(config)
    experts = _number(config, "num_experts_per_tok") or 2
    return experts * _number(config, family["experts"]) + _number(config, family.get("shared", ""))


def logits_bytes(config: Mapping[str, object], targets: int) -> int:
    """Return the bytes that one chunk of logits takes at its peak."""
    return int(CHUNK_COPIES * min(CHUNK_BYTES, 4 * _number(text_part(config), "vocab_size") * targets))


def adapter_parameters(config: Mapping[str, object], rank: int) -> int:
    """Return the number of parameters of LoRA adapters on every linear layer of a dense model."""
    config = text_part(config)
    hidden, heads = _width(config), max(1, _number(config, "num_attention_heads", "n_head"))
    inner, width = _inner_width(config, {}), _number(config, "head_dim") or hidden // heads
    queries, keys = heads * width, (_number(config, "num_key_value_heads") or heads) * width
    ends = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return rank * ends * _number(config, "num_hidden_layers", "n_layer")


# ---- other functions on CPU -------------------------------------------------------------------------------------


def engine_parts(
    parameters: int, value_bytes: int, kv_cache_bytes: int, members: int = 1, drafter_bytes: int = 0
) -> tuple[tuple[str, int], ...]:
    """Return the parts of one engine's memory on CPU, all its members together: (name, bytes) of each.

    vLLM keeps the weights and a copy that is packed for its kernels. With 8-bit weights it holds both while it loads a version, so the
    peak is about the same: at 494 M parameters 5.1 GB were measured for two engines with int8 and 4.4 to 5.0 GB without.

    Parameters
    ----------
    parameters, value_bytes, kv_cache_bytes : int
        Number of the policy's parameters, bytes of each, and bytes of the KV cache of all members.
    members : int
        Processes of the engine, which divide weights and KV cache.
    drafter_bytes : int
        Bytes of the weights of a model that drafts.
    """
    weights = parameters * value_bytes
    return (
        ("weights", weights),
        ("packed weights", weights),
        ("drafter weights", drafter_bytes),
        ("KV cache", kv_cache_bytes),
        ("imports", members * ENGINE_BYTES),
    )


def kv_cache_bytes(config: Mapping[str, object], sequences: int, longest: int, block_size: int, value_bytes: int, members: int = 1) -> int:
    """Return the bytes of KV cache, of all members together, in which an engine holds `sequences` sequences of `longest` tokens at once.

    These are whole blocks, and the one block that vLLM always reserves. A sliding window saves nothing here. The result is 0 for a family
    that is not in `FAMILIES`.
    """
    blocks = sequences * -(-longest // block_size) + 1
    return members * kv_bytes({**text_part(config), "sliding_window": None}, blocks * block_size, value_bytes, members)


def pass_parts(config: Mapping[str, object], parameters: int, value_bytes: int, batch: MicroBatch) -> tuple[tuple[str, int], ...]:
    """Return the parts of the memory of a process that computes forward passes only: (name, bytes) of each."""
    working = batch.tokens * layer_bytes(config, batch.longest, value_bytes) + logits_bytes(config, batch.targets)
    working += wide_bytes(config, batch.tokens, value_bytes)
    return (("weights", parameters * value_bytes), ("activations", working), ("imports", PASS_BYTES))


def _width(config: Mapping[str, object]) -> int:
    return _number(text_part(config), "hidden_size", "n_embd")


def _number(config: Mapping[str, object], *keys: str) -> int:
    """Return the value of the first of these keys that is a positive integer, or 0."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), 0)
