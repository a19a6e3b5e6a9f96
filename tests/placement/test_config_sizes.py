"""Configurations with sizes that no model can have are told from those of real models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from placement.catalog.catalog import DATA
from placement.config_sizes import wrong_size
from tests.placement.test_memory import LLAMA_70B, MIXTRAL, QWEN_05B, QWEN_7B


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a positive integer, not 0"),
        ({"num_attention_heads": 0}, "`num_attention_heads` must be a positive integer, not 0"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` must be a positive integer, not 0"),
        ({"hidden_size": -896}, "`hidden_size` must be a positive integer, not -896"),
        ({"hidden_size": 896.0}, "`hidden_size` must be a positive integer, not 896.0"),
        ({"hidden_size": True}, "`hidden_size` must be a positive integer, not True"),
        ({"num_hidden_layers": [24]}, "`num_hidden_layers` must be a positive integer, not [24]"),
        ({"intermediate_size": 0}, "`intermediate_size` must be a positive integer, not 0"),
        ({"intermediate_size": -1}, "`intermediate_size` must be a whole number, not -1"),
        ({"vocab_size": None}, "`vocab_size` is missing"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` must be a positive integer up to 10000, not 1000000000"),
        ({"vocab_size": "x" * 99}, "`vocab_size` must be a positive integer, not 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…"),
        ({"hidden_size": 900}, "`num_attention_heads` 14 does not divide `hidden_size` 900"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` 3 does not divide `num_attention_heads` 14"),
        ({"model_type": ["qwen2"]}, "`model_type` must be a name, not ['qwen2']"),
        ({"model_type": []}, "`model_type` must be a name, not []"),
        ({"text_config": {"model_type": ["x"], "hidden_size": 7, "num_attention_heads": 2}}, "`model_type` must be a name, not ['x']"),
        ({"architectures": "Qwen2ForCausalLM"}, "`architectures` must be a list of names, not 'Qwen2ForCausalLM'"),
        ({"architectures": [5]}, "`architectures` must be a list of names, not [5]"),
        ({"quantization_config": "int4"}, "`quantization_config` must be an object, not 'int4'"),
        ({"text_config": {"num_attention_heads": 0}}, "`num_attention_heads` must be a positive integer, not 0"),
    ],
)
def test_sizes_that_no_model_has_are_named(changes: dict[str, Any], said: str) -> None:
    assert wrong_size({**QWEN_05B, **changes}) == said


@pytest.mark.parametrize(
    "config",
    [
        QWEN_05B, QWEN_7B, LLAMA_70B, MIXTRAL,
        {**QWEN_05B, "num_key_value_heads": None},
        {**QWEN_05B, "model_type": None},
        {**QWEN_05B, "hidden_size": 900, "head_dim": 64},
        {**QWEN_05B, "model_type": "qwen3", "hidden_size": 1000},  # its heads are 128 wide whatever its width is
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None, "vocab_size": 50257},
        {"model_type": "openelm", "num_query_heads": [12, 16], "num_kv_heads": [3, 4], "intermediate_size": [2048, 2560]},
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}},
        {"model_type": "mamba2", "hidden_size": 768, "num_heads": 24, "num_hidden_layers": 24},
        {},
    ],
)  # fmt: skip
def test_configurations_of_models_are_accepted(config: dict[str, Any]) -> None:
    assert wrong_size(config) == ""


@pytest.mark.parametrize("file", sorted((DATA / "models").glob("*.json")), ids=lambda file: file.stem)
def test_shipped_models_have_sizes_of_models(file: Any) -> None:
    assert wrong_size(json.loads(file.read_text())) == ""
