"""Policies whose KV cannot be kept as pages are named; configurations as transformers writes them."""

from __future__ import annotations

import pytest
from transformers import (
    BartConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from rlhfless_ray.prefix.supported_models import page_bytes, unsupported


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None), GPT2Config()])
def test_plain_attention_is_supported(config: object) -> None:
    assert unsupported(config.to_dict()) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "config, word",
    [
        (MistralConfig(sliding_window=4096), "sliding window of 4096"),
        (Qwen2Config(use_sliding_window=True, sliding_window=1024, max_window_layers=1), "sliding"),
        (Gemma3TextConfig(), "sliding_attention"),
        (MambaConfig(), "recurrent state"),
        (Qwen3NextConfig(), "linear_attention"),
        (BartConfig(), "encoder"),
        (LlavaConfig(), "vision_config"),
    ],
)
def test_the_reason_against_other_models_is_named(config: object, word: str) -> None:
    assert word in (unsupported(config.to_dict()) or "")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["linear_conv_kernel_dim", "conv_L_cache", "lru_width", "mamba_d_state"])
def test_recurrent_layers_are_found_where_a_published_config_lists_no_kinds(name: str) -> None:
    """Qwen3-Next, LFM2, RecurrentGemma, Jamba."""
    config = Qwen2Config().to_dict()
    del config["layer_types"]
    assert unsupported(config) is None
    assert f"a recurrent state ({name})" in (unsupported(config | {name: 4}) or "")


def test_page_bytes_of_grouped_heads() -> None:
    config = Qwen2Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2).to_dict()
    assert page_bytes(config | {"head_dim": 32}, 4, 32) == 2 * 2 * 1 * 32 * 4 * 32
