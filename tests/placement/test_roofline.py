from __future__ import annotations

from dataclasses import replace

import pytest

from placement.catalog import catalog
from placement.speed.model_sizes import BYTES, Model
from placement.speed.roofline import Device, TrainerModel, all_reduce_s, decode_speed, decode_step_s, kv_capacity

A100 = replace(  # gpt-fast's machine: 2,039 GB/s, of which it reaches 1,397 with Llama-2-7B on one device, without vLLM's host work
    catalog.device("H100"),
    name="A100",
    memory_bytes_per_s=2.039e12,
    bf16_flops_per_s=312e12,
    decode_efficiency=1397.31 / 2039,
    step_s=0.0,
    seq_s=0.0,
)
LLAMA_7B = Model("llama-2-7b", 4096, 11008, 32, 32, 32, 32000, False, 128)
QWEN_72B = Model("qwen2.5-72b", 8192, 29568, 80, 64, 8, 152064, False, 128)


@pytest.mark.parametrize(("name", "published"), [("qwen2.5-3b", 3.09e9), ("qwen2.5-7b", 7.61e9), ("llama-2-70b", 68.98e9)])
def test_parameters_are_the_published_counts(name: str, published: float) -> None:
    assert catalog.model(name).parameters == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize(("name", "kib"), [("qwen2.5-3b", 36), ("qwen2.5-7b", 56), ("llama-2-70b", 320)])
def test_kv_bytes_of_a_token(name: str, kib: int) -> None:
    assert catalog.model(name).kv_bytes_per_token == kib * 1024


def test_the_two_measurements_that_efficiencies_were_taken_from() -> None:
    ada = replace(catalog.device("L40S"), memory_bytes_per_s=1008e9)
    assert decode_step_s(catalog.model("qwen2.5-7b"), ada, 1, 1, 128) == pytest.approx(17.1e-3, rel=0.02)
    assert decode_step_s(QWEN_72B, catalog.device("H100"), 2, 1, 128) == pytest.approx(30.9e-3, rel=0.02)


@pytest.mark.parametrize(
    ("model", "width", "tokens_per_s"),
    [
        (LLAMA_7B, 2, 168.84),
        (LLAMA_7B, 4, 254.02),
        (LLAMA_7B, 8, 328.43),
        (catalog.model("llama-2-70b"), 2, 21.32),
        (catalog.model("llama-2-70b"), 4, 38.01),
        (catalog.model("llama-2-70b"), 8, 62.50),
    ],
)
def test_tensor_parallel_decoding_is_within_a_quarter_of_measurements_it_was_not_fitted_to(
    model: Model, width: int, tokens_per_s: float
) -> None:
    """gpt-fast's README, tokens per second at batch 1 on 8 x A100; only its one-device figure went into A100 above."""
    assert 1 / decode_step_s(model, A100, width, 1, 5) == pytest.approx(tokens_per_s, rel=0.25)


def test_a_step_reads_weights_and_cache_at_the_bandwidth() -> None:
    model, device = catalog.model("qwen2.5-3b"), catalog.device("L40S")
    bytes_read = model.read_bytes + 4 * model.activation_bytes_per_token + 4 * 1000 * 36 * 1024
    assert decode_step_s(model, device, 1, 4, 4000) == pytest.approx(bytes_read / 864e9 / 0.82 + 4 * device.seq_s)


def test_a_very_large_batch_is_bound_by_computing() -> None:
    model, device = catalog.model("qwen2.5-3b"), catalog.device("L40S")
    flops = 20_000 * model.flops_per_token
    assert decode_step_s(model, device, 1, 20_000, 0) == pytest.approx(flops / 362.05e12 / 0.82 + 20_000 * device.seq_s)


@pytest.mark.parametrize("width", [1, 2, 8])
def test_the_affine_speed_is_the_roofline_where_it_was_taken(width: int) -> None:
    model, device = catalog.model("llama-2-70b"), catalog.device("H200")
    speed = decode_speed(model, device, width, batch=48, context=700)
    for running, context in ((1, 0), (48, 0), (48, 48 * 700)):
        assert speed.step_s(running, context) == pytest.approx(decode_step_s(model, device, width, running, context))


def test_an_all_reduce_is_latency_and_a_ring() -> None:
    device = catalog.device("H100")
    assert all_reduce_s(device, 1, 1e6) == 0
    assert all_reduce_s(device, 4, 67.1e6) == pytest.approx(0.317e-3 + 20e-6, rel=0.02)  # Vidur's measurement, and our latency


def test_capacity_is_what_memory_leaves_beside_the_weights() -> None:
    model, device = catalog.model("qwen2.5-7b"), catalog.device("L40S")
    assert kv_capacity(model, device, 1, 0.6) == int((0.6 * 48e9 - BYTES * model.parameters) // (56 * 1024))
    with pytest.raises(ValueError, match=r"llama-2-70b .* does not fit 2 x L40S .* `tensor_parallel`"):
        kv_capacity(catalog.model("llama-2-70b"), device, 2, 0.9)


def trainer(model: str = "qwen2.5-3b", models: int = 1, **changes: object) -> TrainerModel:
    return TrainerModel(catalog.model(model), catalog.device("L40S"), 8, models, 0.8, 0.33, 0.46, 16384, 2048, 28, **changes)  # type: ignore[arg-type]


def test_learning_is_flops_at_the_stated_efficiency_where_no_transfer_is_longer() -> None:
    t = trainer()
    assert t.sharding(8).name == "optimizer"
    assert t.forward_s(1e5, 8) == pytest.approx(2 * 3.09e9 * 1e5 / (8 * 362.05e12 * 0.46), rel=0.003)
    assert t.train_s(1e5, 8) == pytest.approx(3 * t.forward_s(1e5, 8) * 0.46 / 0.33)


def test_small_micro_batches_compute_at_a_lower_efficiency() -> None:
    t = trainer(half_efficiency_tokens=2000.0)
    largest, whole = 8 * 16384.0, trainer()
    assert t.train_s(8 * 2000.0, 8) == pytest.approx(2 * whole.train_s(8 * 2000.0, 8))
    assert t.train_s(largest, 8) == pytest.approx((1 + 2000 / 16384) * whole.train_s(largest, 8))
    assert t.train_s(2 * largest, 8) == pytest.approx(2 * t.train_s(largest, 8)), "whether it is one call or two"
    assert trainer(half_efficiency_tokens=5000.0).balanced_tokens(8) == 5000


def test_mixtures_compute_at_a_share_of_the_efficiency() -> None:
    mixed = trainer("qwen3-30b-a3b", mixture_efficiency=0.2)
    assert mixed.flops_per_s(0.4) == pytest.approx(0.08 * 362.05e12)
    assert trainer(mixture_efficiency=0.2).flops_per_s(0.4) == pytest.approx(0.4 * 362.05e12)


def test_state_is_sharded_as_little_as_memory_allows() -> None:
    assert trainer("qwen2.5-7b").sharding(16).name == "optimizer and gradients"
    assert trainer("qwen2.5-7b", models=2).sharding(16).name == "all"


def test_a_small_micro_batch_of_a_sharded_model_takes_its_transfers() -> None:
    t = trainer("qwen2.5-7b", models=2)
    assert t.train_s(100.0, 16) == pytest.approx(3 * t.gather_s(16))
    assert t.gather_s(16) == pytest.approx(15 / 16 * t.model.weight_bytes / 19.3e9)


def test_unreduced_gradients_hide_behind_the_last_backward_pass() -> None:
    t = trainer()
    adam = 28 * t.model.parameters / 8 / 864e9
    assert t.update_s(8, 1e9) == pytest.approx(adam)
    assert t.update_s(8, 0) == pytest.approx(adam + t.gather_s(8))


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown device `H10`; did you mean `H100`\?"):
        catalog.device("H10")
    with pytest.raises(ValueError, match=r"unknown model `qwen2\.5-3B-x`; did you mean `qwen2\.5-3b`\?"):
        catalog.model("qwen2.5-3B-x")


def test_a_device_of_the_user(tmp_path) -> None:
    mine = catalog.device({"like": "H100", "name": "H100-slow", "memory_bytes_per_s": 2e12})
    assert isinstance(mine, Device) and mine.memory_bytes_per_s == 2e12 and mine.link_bytes_per_s == catalog.device("H100").link_bytes_per_s
    assert catalog.device({"like": "CPU-core", "step_s": 0, "spot_preempt_per_hour": 0.0}).step_s == 0, "these may be absent, which is 0"
    with pytest.raises(ValueError, match="`memory_bytes` must be a positive, finite number, not -1"):
        catalog.device({"like": "H100", "memory_bytes": -1})
    with pytest.raises(ValueError, match="`memory_bytes_per_s` is missing"):
        catalog.device({"name": "x", "memory_bytes": 1e9})


def test_a_model_from_a_config_file(tmp_path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}'
    )
    model = catalog.model(str(folder))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert model.parameters == 2 * layer + 2 * 100 * 64 and model.kv_heads == 4
    (folder / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match="`intermediate_size` must be a positive integer"):
        catalog.model(str(folder / "config.json"))
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a Hugging Face model configuration"):
        catalog.model(str(folder))
    whole = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    for field, value in (("num_key_value_heads", "two"), ("num_key_value_heads", -4), ("head_dim", 0.5), ("vocab_size", 10**400)):
        with pytest.raises(ValueError, match=f"`{field}` must be a positive integer"):
            catalog.model({**whole, field: value})
    with pytest.raises(ValueError, match="`hidden_size` 2 is smaller than its 4 `num_attention_heads`"):
        catalog.model({**whole, "hidden_size": 2})


def test_every_figure_has_a_source() -> None:
    for file in ("devices", "phases", "lengths"):
        tree = catalog.read(file)
        tables = tree.values() if file != "phases" else [tree]
        for table in tables:
            for name, entry in table.items():
                assert isinstance(entry, list) and len(entry) == 2 and len(entry[1]) > 5, f"{file}: {name}"


def test_a_mixture_reads_the_experts_that_some_token_is_sent_to() -> None:
    whole = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    mixed = catalog.model({**whole, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32})
    expert = 2 * 3 * 64 * 32  # parameters of one expert in both layers
    assert mixed.layer_parameters - mixed.active_parameters == 6 * expert
    assert mixed.read_bytes - mixed.step_read_bytes(1) == 2 * 6 * expert
    assert mixed.step_read_bytes(1000) == pytest.approx(mixed.read_bytes)


def test_names_of_sizes_in_older_configurations() -> None:
    small = catalog.model({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257})
    assert small.intermediate_size == 3072 and not small.gated and small.parameters == pytest.approx(124e6, rel=0.01)


def test_families_without_a_gate_and_with_shared_kv_heads() -> None:
    bloom = catalog.model({"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100})
    assert bloom.intermediate_size == 256 and not bloom.gated
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024}
    seven = catalog.model({**falcon, "multi_query": True, "num_kv_heads": 71})
    assert seven.kv_heads == 1 and seven.parameters == pytest.approx(6.92e9, rel=0.001)
    wide = {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8}
    assert catalog.model({**falcon, **wide, "new_decoder_architecture": True}).kv_heads == 8
    assert catalog.model({**falcon, "multi_query": False}).kv_heads == 71


def test_a_configuration_by_another_name_than_config_json_is_called_by_it(tmp_path) -> None:
    whole = '{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}'
    (tmp_path / "mine.json").write_text(whole)
    assert catalog.model(str(tmp_path / "mine.json")).name == "mine"


def test_a_model_by_its_name_in_the_hugging_face_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Some--Model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    whole = '{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}'
    (folder / "snapshots" / "abc" / "config.json").write_text(whole)
    assert catalog.model("Some/Model").name == "Some/Model" and catalog.model("Some/Model").layers == 2
    with pytest.raises(ValueError, match=r"model Some/Other: not a folder here and not in .*hf download Some/Other config\.json"):
        catalog.model("Some/Other")
