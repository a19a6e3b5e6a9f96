"""Names and shapes that engines get, against what `save_pretrained` writes: many families, no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_ray.weights.saved_names import saved_state

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES: dict[str, tuple[bool, dict[str, Any]]] = {
    "Llama": (False, {}),
    "Qwen2": (False, {"tie_word_embeddings": True}),
    "Qwen3": (False, {"head_dim": 16}),
    "Phi3": (False, {}),
    "Olmo2": (False, {}),
    "Granite": (False, {}),
    "Gemma3Text": (False, {"head_dim": 16}),
    "Mistral": (False, {"head_dim": 16}),
    "Qwen2Moe": (True, {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3Moe": (True, {**EXPERTS, "head_dim": 16}),
    "Mixtral": (True, {"num_local_experts": 4}),
    "Olmoe": (True, {"num_experts": 4, "num_experts_per_tok": 2}),
    "Phimoe": (True, {"num_local_experts": 4}),
    "DeepseekV3": (True, {**ROUTED, **LATENT, "first_k_dense_replace": 1}),
    "Glm4Moe": (True, {**ROUTED, "head_dim": 16, "first_k_dense_replace": 1}),
    "GraniteMoe": (True, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_saved_as_transformers_saves_it(family: str, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    converts, more = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**{"tie_word_embeddings": False, **SHAPE, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "first")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)  # as an update would
    model.save_pretrained(tmp_path / "second")
    wanted = load_file(tmp_path / "second" / "model.safetensors")
    tied = set(model.all_tied_weights_keys)
    live = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    found = saved_state(model, live)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    assert (live.keys() != wanted.keys() or any(live[name].shape != x.shape for name, x in wanted.items())) == converts
