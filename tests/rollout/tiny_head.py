"""An EAGLE-3 head with random weights, as files of a folder."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save
from transformers import LlamaConfig

from rlhfless_ray.engine.head_model import Eagle3Head

LAYERS = [0, 1, 2]  # of a policy with two layers


def tiny_head(
    policy: bytes, seed: int = 0, draft_vocabulary: int | None = None, embeddings: bool = False, **changes: Any
) -> dict[str, bytes]:
    """`policy`: its config.json. `draft_vocabulary`: number of tokens that can be drafted, if not all."""
    wanted = json.loads(policy)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": wanted["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": wanted["vocab_size"],
        "draft_vocab_size": draft_vocabulary or wanted["vocab_size"],
        "max_position_embeddings": wanted["max_position_embeddings"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS},
        "torch_dtype": "float32",
        **changes,
    }
    torch.manual_seed(seed)
    head = Eagle3Head(LlamaConfig(**config), len(LAYERS) * wanted["hidden_size"], embeddings)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    tensors = head.state_dict()
    if draft_vocabulary:
        chosen = torch.randperm(wanted["vocab_size"])[:draft_vocabulary].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocabulary)
    else:
        del tensors["d2t"]
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors)}
