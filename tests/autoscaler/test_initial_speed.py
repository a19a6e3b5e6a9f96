"""What the first plan knows of an engine: by the roofline of the policy's configuration and the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import placement
from placement.catalog import catalog
from rlhfless_ray import Recipe
from rlhfless_ray.autoscaler.initial_speed import ANY_SPEED, expected_engine, expected_widths

SHIPPED = Path(placement.__file__).parent / "catalog" / "data" / "models"
QWEN = {"config.json": (SHIPPED / "qwen2.5-3b.json").read_bytes()}


def recipe(dtype: str = "bfloat16", **rollout) -> Recipe:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"zero_stage": 1}}
    return Recipe.parse({**tree, "policy": {"dtype": dtype}, "rollout": rollout})


def test_on_a_gpu_a_step_reads_the_weights_at_the_devices_bandwidth_and_the_rest_of_its_memory_holds_kv() -> None:
    engine, device, model = expected_engine(recipe(), QWEN, "H100"), catalog.device("H100"), catalog.model("qwen2.5-3b")
    moved = model.read_bytes + model.activation_bytes_per_token
    assert engine.speed.step_s(1) == pytest.approx(moved / 3.35e12 / device.decode_efficiency + device.step_s + device.seq_s)
    assert engine.capacity == int((0.85 * 80e9 - model.weight_bytes) // (36 * 1024)) and not engine.note


def test_values_of_four_bytes_take_twice_the_time_and_the_room() -> None:
    half, whole = (expected_engine(recipe(dtype=dtype), QWEN, "H200") for dtype in ("bfloat16", "float32"))
    model, device = catalog.model("qwen2.5-3b"), catalog.device("H200")
    assert whole.speed.base_s - device.step_s == pytest.approx(2 * (half.speed.base_s - device.step_s))
    activations = model.activation_bytes_per_token - 12 * model.vocab_size  # logits are float32 for either type
    more = activations / device.memory_bytes_per_s / device.decode_efficiency
    assert whole.speed.per_seq_s - half.speed.per_seq_s == pytest.approx(more)
    weights, token = model.weight_bytes, 36 * 1024
    assert whole.capacity == int((0.85 * 141e9 - 2 * weights) // (2 * token))


def test_8_bit_weights_are_read_in_less_time_and_leave_more_room() -> None:
    model = catalog.model("qwen2.5-3b")
    linear = model.layer_parameters - 36 * 2 * 2048
    for dtype, saved in (("bfloat16", linear), ("float32", 3 * linear)):
        off, on = (expected_engine(recipe(dtype, quantization=kind), QWEN, "H100") for kind in ("off", "int8"))
        assert off.speed.base_s - on.speed.base_s == pytest.approx(saved / 3.35e12 / catalog.device("H100").decode_efficiency)
        assert on.capacity - off.capacity == pytest.approx(saved / (36 * 1024 * (1 + (dtype == "float32"))), abs=1)


def test_on_a_core_the_recipes_cache_holds_whole_blocks_one_of_which_vllm_keeps() -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
    }
    engine = expected_engine(recipe(dtype="float32", kv_cache_mb=16), {"config.json": json.dumps(config).encode()}, None)
    token = 2 * 3 * 128 * 4
    assert engine.capacity == 16 * 2**20 // (32 * token) * 32 - 32
    core = catalog.device("CPU-core")
    weights = 4 * (3 * (4 * 128 * 128 + 3 * 128 * 512 + 256) + 64 * 128)
    assert engine.speed.base_s > core.step_s + weights / core.memory_bytes_per_s and engine.speed.per_seq_s > core.seq_s


@pytest.mark.parametrize("name", ["A100", ""])
def test_a_gpu_without_figures_is_taken_for_a_known_one_and_that_is_said(name: str) -> None:
    engine = expected_engine(recipe(), QWEN, name)
    assert engine.speed == expected_engine(recipe(), QWEN, "L40S").speed and "L40S" in engine.note and name in engine.note


def test_a_configuration_of_another_kind_leaves_a_guess_and_that_is_said() -> None:
    engine = expected_engine(recipe(), {"config.json": b'{"model_type": "oddity", "width": 3}'}, None)
    assert engine.speed == ANY_SPEED and engine.capacity is None and "hidden_size" in engine.note


def test_an_automatic_width_takes_powers_of_two_that_share_the_heads_and_hold_the_longest_sequence() -> None:
    auto = recipe(tensor_parallel="auto", max_actors=16)
    found, note = expected_widths(auto, QWEN, "H100", 8, 4096)  # 16 heads, 2 KV heads
    assert list(found) == [1, 2, 4, 8] and not note
    assert list(expected_widths(recipe(tensor_parallel="auto", max_actors=9, min_actors=4), QWEN, "H100", 8, 4096)[0]) == [1, 2]
    room = found[1].capacity or 0
    assert list(expected_widths(auto, QWEN, "H100", 8, room + 1)[0]) == [2, 4, 8]
    fixed, note = expected_widths(recipe(tensor_parallel=2), QWEN, "H100", 8, 4096)
    assert list(fixed) == [2] and not note and fixed[2] == found[2]


def test_an_automatic_width_that_has_no_choice_says_why() -> None:
    found, note = expected_widths(recipe(tensor_parallel="auto", max_actors=8), QWEN, "H100", 1, 4096)
    assert list(found) == [1] and "takes 1, the only width that fits nodes, heads, memory and rollout.max_actors" in note
