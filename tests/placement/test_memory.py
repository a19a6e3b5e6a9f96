"""Sizes of public models, by their published parameter counts and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from placement.memory import (
    Training,
    activation_bytes,
    end_parameters,
    engine_widths,
    header_parameters,
    kv_bytes,
    parameter_count,
    rank_memory,
)


def config(family: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        **more,
    }


QWEN_05B = config("qwen2", 896, 4864, 24, 14, 2, 151_936, tie_word_embeddings=True)
QWEN_7B = config("qwen2", 3584, 18_944, 28, 28, 4, 152_064, tie_word_embeddings=False)
LLAMA_70B = config("llama", 8192, 28_672, 80, 64, 8, 128_256)
MIXTRAL = config("mixtral", 4096, 14_336, 32, 32, 8, 32_000, num_local_experts=8, sliding_window=None)
QWEN_30B_A3B = config(
    "qwen3_moe",
    2048,
    6144,
    48,
    32,
    4,
    151_936,
    head_dim=128,
    num_experts=128,
    moe_intermediate_size=768,
    mlp_only_layers=[],
    decoder_sparse_step=1,
    tie_word_embeddings=False,
)
GEMMA_2B = config("gemma", 2048, 16_384, 18, 8, 1, 256_000, head_dim=256)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (QWEN_05B, 494_032_768),
        (QWEN_7B, 7_615_616_512),
        (LLAMA_70B, 70_553_706_496),
        (MIXTRAL, 46_702_792_704),
        (QWEN_30B_A3B, 30_532_122_624),
        (GEMMA_2B, 2_506_172_416),
    ],
)
def test_published_parameter_counts(model, parameters):
    assert parameter_count(model) == parameters
    assert parameter_count({"model_type": "some_vlm", "text_config": model}) == parameters


def test_critics_and_reward_models_have_no_output_head():
    assert parameter_count(LLAMA_70B, head=False) == 70_553_706_496 - 128_256 * 8192
    assert parameter_count(QWEN_05B, head=False) == 494_032_768  # its head is its embedding


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "rwkv"},
        {**QWEN_7B, "hidden_size": "wide"},
        {**QWEN_7B, "num_hidden_layers": 2**31},
        {"model_type": "llama"},
        {**QWEN_30B_A3B, "mlp_only_layers": 3},
        {**MIXTRAL, "num_local_experts": None},
    ],
)
def test_what_cannot_be_counted_is_not_guessed(wrong):
    assert parameter_count(wrong) is None


def test_headers_count_what_a_causal_lm_trains():
    tensors = [
        ("model.embed_tokens.weight", [10, 4], "BF16"),
        ("lm_head.weight", [10, 4], "BF16"),
        ("model.norm.weight", [4], "F32"),
        ("transformer.h.0.attn.bias", [1, 1, 64, 64], "F32"),
        ("transformer.h.0.attn.bias8", [64, 64], "U8"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", [8], "F32"),
        ("model.visual.patch.weight", [99, 99], "BF16"),
        ("mtp.layers.0.weight", [99], "BF16"),
    ]
    assert header_parameters(tensors) == 84 and header_parameters(tensors, head=False) == 44


def test_kv_cache_by_hand():
    # keys and values, layers, KV heads, width of a head, bytes, tokens
    assert kv_bytes(QWEN_05B, 1000, 2) == 2 * 24 * 2 * 64 * 2 * 1000
    assert kv_bytes(LLAMA_70B, 8192, 2) == 2 * 80 * 8 * 128 * 2 * 8192 == 2_684_354_560
    assert kv_bytes(QWEN_30B_A3B, 10, 4) == 2 * 48 * 4 * 128 * 4 * 10
    assert kv_bytes({**MIXTRAL, "sliding_window": 4096}, 10_000, 2) == kv_bytes(MIXTRAL, 4096, 2)
    assert kv_bytes({**QWEN_7B, "sliding_window": 4096, "use_sliding_window": False}, 10_000, 2) == kv_bytes(QWEN_7B, 10_000, 2)
    assert kv_bytes({"model_type": "rwkv"}, 10, 2) == 0


@pytest.mark.parametrize(
    ("training", "device", "idle"),  # bytes per parameter
    [
        (Training(1, 0, 4), 16, 12),  # weights 4, gradients 4, moments 8
        (Training(4, 0, 4), 16, 12),  # ranks alone shard nothing
        (Training(1, 1, 2), 18, 14),  # weights 2, float32 copy 4, moments 8, gradients 4
        (Training(4, 2, 2), 2 + 16 / 4, 2 + 12 / 4),
        (Training(4, 1, 4), 4 + 16 / 4, 4 + 12 / 4),
        (Training(4, 3, 2), 18 / 4, 14 / 4),
        (Training(16, 3, 2), 18 / 16, 14 / 16),  # whole on the host only while it loads
        (Training(4, 2, 2, offload=True), 2, 2 + 12 / 4),
        (Training(1, 2, 2, adapters=True), 2, 2),
    ],
)
def test_bytes_of_a_rank_by_zero_stage(training, device, idle):
    rank = rank_memory(1_000_000, training)
    assert sum(size for _, size in rank.on_device) == device * 1_000_000 and rank.idle == idle * 1_000_000


def test_activations_are_each_layer_s_input_at_least():
    assert activation_bytes(QWEN_05B, 100, 2) == 24 * 896 * 100 * 2
    assert activation_bytes({}, 100, 2) == 0
    assert dict(rank_memory(10**6, Training(), 77).training)["activations"] == 77


def test_widths_that_share_every_head_and_layer():
    assert engine_widths(QWEN_05B, 64) == [1, 2] and engine_widths(QWEN_7B, 64) == [1, 2, 4]
    assert engine_widths(LLAMA_70B, 32) == [1, 2, 4, 8, 16, 32], "beyond the 8 KV heads slots hold copies of them"
    assert engine_widths(LLAMA_70B, 4) == [1, 2, 4] and engine_widths({"model_type": "mamba"}, 8) is None
    assert kv_bytes(LLAMA_70B, 100, 2, 8) * 8 == kv_bytes(LLAMA_70B, 100, 2) and kv_bytes(LLAMA_70B, 100, 2, 16) * 8 == kv_bytes(
        LLAMA_70B, 100, 2
    )


def test_a_family_s_head_that_is_its_embeddings_counts_once():
    """Gemma's configurations leave `tie_word_embeddings` out. Counted twice, its ends were larger than a small model."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "head_dim": 16,
    }
    for family, ends in (("gemma", 64_000), ("llama", 128_000)):
        config = {"model_type": family, **sizes}
        assert end_parameters(config) == ends < parameter_count(config)


def test_ranks_that_share_a_copy_hold_a_part_of_all_but_its_ends():
    ends, layers = 100_000, 900_000
    alone, wide = Training(1, 1, 2), Training(2, 1, 2, tensor_parallel=2, undivided=ends)
    assert rank_memory(ends + layers, wide).weights == 2 * (ends + layers // 2)
    assert rank_memory(ends + layers, wide).optimizer == 12 * (ends + layers // 2)
    four = Training(4, 1, 2, tensor_parallel=2, undivided=ends)  # two copies divide the optimizer's state
    assert rank_memory(ends + layers, four).optimizer == 6 * (ends + layers // 2)
    assert rank_memory(ends + layers, alone).weights == 2 * (ends + layers)
    own = {"model_type": "other", "vocab_size": 50, "hidden_size": 8}
    assert end_parameters(own) == 400, "its head may be its embeddings"
    assert end_parameters({**own, "tie_word_embeddings": False}) == 800 and end_parameters({"model_type": "other"}) == 0
