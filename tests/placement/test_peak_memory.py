"""Predicted peaks: what was measured at 494 M parameters, and how they depend on settings in every family."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.memory import FAMILIES, Training
from placement.peak_memory import MicroBatch, UpdateSettings, adapter_parameters, choices, layer_bytes, trainer_parts, update_bytes
from tests.placement.test_memory import LLAMA_70B, MIXTRAL, QWEN_05B, QWEN_7B, QWEN_30B_A3B, config

PARAMETERS = 494_032_768
ONE_RANK = Training(1, 1, 2)
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
CONFIGS = [config(family, 1024, 2816, 12, 16, 4, 32_000, **EXPERTS) for family in FAMILIES]
CONFIGS += [
    LLAMA_70B,
    MIXTRAL,
    QWEN_7B,
    QWEN_30B_A3B,
    {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50_257},
]


def peak(model: dict[str, Any], batch: MicroBatch, training: Training = ONE_RANK, **options: Any) -> int:
    options = {"checkpointing": False, "on_gpu": False, **options}
    return sum(size for _, size in trainer_parts(model, PARAMETERS, training, batch, **options))


def plain(tokens: int, is_only: bool = False) -> MicroBatch:
    """Rows of one prompt of 24 tokens and one response of 128."""
    return MicroBatch(tokens, 152, tokens * 128 // 152, is_only)


@pytest.mark.parametrize(
    ("training", "tokens", "count", "options", "measured_gb"),
    [
        (Training(1, 1, 2), 456, 2, {}, 10.80),
        (Training(2, 2, 2), 456, 2, {}, 6.80),
        (Training(1, 1, 2), 1824, 1, {}, 13.68),
        (Training(1, 1, 2), 1824, 2, {}, 13.70),
        (Training(1, 1, 2), 1824, 1, {"checkpointing": True}, 10.97),
        (Training(1, 3, 2), 456, 2, {}, 12.46),
        (Training(1, 0, 4), 456, 2, {}, 12.11),
        (Training(1, 1, 4), 456, 2, {}, 15.45),
        (Training(1, 2, 4), 456, 2, {}, 15.33),
        (Training(1, 1, 2, adapters=True), 912, 1, {"lora_rank": 16}, 4.28),
        (Training(1, 1, 2, adapters=True), 912, 1, {"lora_rank": 16, "checkpointing": True}, 3.07),
    ],
)
def test_measured_peaks_of_a_learner_rank(training, tokens, count, options, measured_gb):
    """A rank on two cores, the shape of Qwen2.5-0.5B, its second update of `count` micro-batches."""
    predicted = peak(QWEN_05B, plain(tokens, count == 1), training, **options)
    print(predicted / 1e9, measured_gb)
    assert predicted / 1e9 == pytest.approx(measured_gb, rel=0.15)


@pytest.mark.parametrize("model", CONFIGS, ids=lambda model: model["model_type"])
@pytest.mark.parametrize("training", [Training(1, 1, 2), Training(4, 3, 2, offload=True), Training(2, 0, 4)])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_more_tokens_take_more_and_recomputing_takes_less(model, training, on_gpu):
    sizes = [512, 1024, 8192, 65_536]
    for recomputes in (False, True):
        peaks = [peak(model, plain(tokens), training, checkpointing=recomputes, on_gpu=on_gpu) for tokens in sizes]
        assert peaks == sorted(peaks) and peaks[-1] > peaks[0]
    assert peak(model, plain(65_536), training, checkpointing=True) < peak(model, plain(65_536), training)


@given(
    st.sampled_from(CONFIGS), st.integers(1, 20_000), st.integers(1, 20_000), st.integers(0, 1000), st.sampled_from([2, 4]), st.booleans()
)
def test_an_update_s_bytes_grow_with_each_size(model, tokens, more, longest, width, recomputes):
    batch, wider = MicroBatch(tokens, longest, tokens), MicroBatch(tokens + more, longest, tokens + more)
    assert 0 < update_bytes(model, batch, width, recomputes) < update_bytes(model, wider, width, recomputes)
    assert update_bytes(model, batch, width, recomputes) <= update_bytes(
        model, MicroBatch(tokens, longest + more, tokens), width, recomputes
    )
    assert update_bytes(model, MicroBatch(tokens, longest, 0), width, recomputes) < update_bytes(model, batch, width, recomputes)


def test_adapters_and_offload_take_less_than_all_weights_on_the_device():
    batch = plain(1024)
    whole = peak(QWEN_7B, batch, on_gpu=True)
    assert peak(QWEN_7B, batch, Training(1, 1, 2, offload=True), on_gpu=True) < whole
    assert peak(QWEN_7B, batch, Training(1, 1, 2, adapters=True), on_gpu=True, lora_rank=16) < whole
    assert adapter_parameters(QWEN_05B, 16) == 8_798_208  # as peft counts them
    assert layer_bytes({"model_type": "unknown"}, 10, 2) == 0


def test_choices_begin_with_the_default_and_end_with_the_least_memory():
    found = list(choices(may_offload=True))
    assert found[0] == UpdateSettings() == UpdateSettings(8192, False, False) and found[-1] == UpdateSettings(512, True, True)
    assert len(set(found)) == len(found) and not any(choice.offload for choice in choices(may_offload=False))


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "qwen3", "gemma", "phi3", "granite", "smollm3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_keep_what_transformers_saves(family, dtype):
    """Count the tensors that a forward pass saves, and compare."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def saved(layers: int, tokens: int) -> int:
        shape = config(family, 128, 320, layers, 4, 2, 100, head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        described = AutoConfig.for_model(**shape)
        model = AutoModelForCausalLM.from_config(described, dtype=getattr(torch, dtype), attn_implementation="sdpa").train()
        own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False).logits
        assert kept.requires_grad
        return sum(sizes.values())

    each = (saved(3, 128) - saved(1, 128)) / 2 / 128
    shape = config(family, 128, 320, 1, 4, 2, 100, head_dim=32)
    assert layer_bytes(shape, 128, {"bfloat16": 2, "float32": 4}[dtype]) == pytest.approx(each, rel=0.05)


def test_ranks_that_share_sequences_hold_a_part_of_the_activations_and_logits():
    batch = MicroBatch(8192, 4096, 8192, is_masked=False)
    alone, both = peak(QWEN_7B, batch), peak(QWEN_7B, batch, Training(1, 1, 2, sequence_parallel=2))
    assert alone - both == pytest.approx(update_bytes(QWEN_7B, batch, 2, checkpointing=False) / 2, rel=0.2)
    masked = MicroBatch(8192, 4096, 8192)
    of_mask = update_bytes(QWEN_7B, masked, 2, False, slices=2) - update_bytes(QWEN_7B, batch, 2, False, slices=2)
    assert of_mask == update_bytes(QWEN_7B, masked, 2, False) - update_bytes(QWEN_7B, batch, 2, False), "each has the whole mask"
