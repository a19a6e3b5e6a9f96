"""Small random policies of families that vLLM (0.32) cannot compute on CPU. Not collected by pytest."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.rollout.families import EOS, VOCABULARY

SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": EOS}
ATTENTION = {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "layer_types": ["linear_attention", "full_attention"],
}
# Their recurrent states and sinks of attention are computed by kernels that vLLM has for GPUs.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **ATTENTION,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 32},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {**ATTENTION, **EXPERTS, **LINEAR, "head_dim": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**ATTENTION, **LINEAR, "head_dim": 32},
    "phimoe": {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {**ATTENTION, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**ATTENTION, **EXPERTS, "layer_types": ["conv", "full_attention"], "moe_intermediate_size": 32, "num_dense_layers": 1},
    "falcon_h1": {**ATTENTION, **{"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}},
    "jamba": {
        **{**ATTENTION, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 16, "use_mamba_kernels": False},
    },
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "olmo_hybrid": {**ATTENTION, **LINEAR},
}


def other_policy(family: str, dtype: str) -> dict[str, bytes]:
    """Return a model folder's files. Matrices are larger than transformers draws them, see `families.policy`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHAPE, **OTHERS[family]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "conv" not in name and "A_log" not in name:
                    parameter.mul_(4)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
