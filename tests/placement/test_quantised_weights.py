"""8-bit weights in the speed model and the simulator, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.catalog import catalog
from placement.simulate import PhaseTimes, Setting, load, named, parse, simulate
from placement.speed.model_sizes import Model
from placement.speed.roofline import decode_step_s, kv_capacity

QWEN, L40S = catalog.model("qwen2.5-3b"), catalog.device("L40S")
LINEAR = 36 * (2048 * 128 * (2 * 16 + 2 * 2) + 3 * 2048 * 11008)  # parameters of attention and feed-forward of Qwen2.5-3B


def in_8_bits(model: Model, quantization: str = "int8") -> Model:
    return replace(model, quantization=quantization)


def small(**changes: object) -> Setting:
    return parse({"like": "qwen3b-gsm8k-grpo", "nodes": 1, "prompts": 8, "samples": 4, "epochs": 1, **changes})


def test_linear_layers_take_one_byte_a_parameter_and_the_rest_stays() -> None:
    assert in_8_bits(QWEN).quantised_parameters == LINEAR and QWEN.quantised_parameters == 0
    assert in_8_bits(QWEN).engine_bytes == 2 * QWEN.parameters - LINEAR and in_8_bits(QWEN).weight_bytes == QWEN.weight_bytes
    assert decode_step_s(QWEN, L40S, 1, 1, 0) - decode_step_s(in_8_bits(QWEN), L40S, 1, 1, 0) == pytest.approx(LINEAR / 864e9 / 0.82)
    whole = replace(QWEN, value_bytes=4)
    assert whole.engine_bytes == 4 * QWEN.parameters
    assert in_8_bits(whole).engine_bytes == 4 * QWEN.parameters - 3 * LINEAR, "in float32 three of four bytes are saved"
    assert whole.read_bytes - in_8_bits(whole).read_bytes == 3 * LINEAR


def test_experts_are_quantised_in_fp8_only() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    experts = {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixed = catalog.model({**sizes, **experts, "intermediate_size": 128, "shared_expert_intermediate_size": 48})
    others = 2 * (4 * 64 * 64 + 3 * 64 * 48)
    assert in_8_bits(mixed).quantised_parameters == others
    assert in_8_bits(mixed, "fp8").quantised_parameters == others + 2 * 8 * 3 * 64 * 32
    for running in (1, 3, 500):
        read = mixed.step_read_bytes(running)
        assert read - in_8_bits(mixed).step_read_bytes(running) == pytest.approx(others)
        chosen = 8 * (1 - 0.75**running)
        assert read - in_8_bits(mixed, "fp8").step_read_bytes(running) == pytest.approx(others + 2 * chosen * 3 * 64 * 32)


def test_memory_that_weights_leave_holds_kv_and_narrower_engines_hold_the_model() -> None:
    off, on = (kv_capacity(model, L40S, 1, 0.6) for model in (QWEN, in_8_bits(QWEN)))
    assert on - off == pytest.approx(LINEAR / QWEN.kv_bytes_per_token, abs=1)
    large = named("llama70b-8-nodes").but(tensor_parallel="auto")
    assert [PhaseTimes.from_setting(large.but(quantization=kind)).width for kind in ("off", "int8")] == [4, 2]


@pytest.mark.parametrize("width", [1, 4])
def test_an_update_moves_all_bytes_and_each_engine_quantises_its_part(width: int) -> None:
    off, on = (PhaseTimes.from_setting(small(tensor_parallel=width, quantization=kind)) for kind in ("off", "int8"))
    quantising = 41 * LINEAR / width / 864e9 / 0.82
    assert on.reshard_s - off.reshard_s == pytest.approx(quantising) == on.broadcast_s - off.broadcast_s
    assert on.trainer == off.trainer, "the learner keeps its weights"
    room = on.awake_capacity(8) - off.awake_capacity(8)
    assert room == pytest.approx(LINEAR / QWEN.kv_bytes(width), abs=1), "an engine that stays awake leaves as much beside the learner"


def test_every_policy_is_faster_with_8_bit_weights() -> None:
    names = ["fixed", "fixed+", "global-cut", "rlhfless-paper", "ours"]
    off, on = (simulate(small(prefer=0.9, quantization=kind), names, 3) for kind in ("off", "int8"))
    for name in names:
        assert on.policies[name].step_s < 0.9 * off.policies[name].step_s, name
        assert on.policies[name].step_s >= on.bound_s


def test_a_setting_names_its_quantisation(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    for written, read in (("off", "off"), ("INT8", "int8"), ("fp8", "fp8")):
        file.write_text(f"like: qwen3b-gsm8k-grpo\nquantization: {written}\nalgorithm: PPO\n")
        assert (load(file).quantization, load(file).algorithm) == (read, "ppo")
    with pytest.raises(ValueError, match="unknown quantization `int4`; did you mean `int8`"):
        small(quantization="int4")
    with pytest.raises(ValueError, match="unknown quantization `half`; known are off, int8, fp8"):
        small().but(quantization="half")
    changed = small().but(algorithm="PPO", quantization="FP8")
    assert (changed.algorithm, changed.quantization) == ("ppo", "fp8")
