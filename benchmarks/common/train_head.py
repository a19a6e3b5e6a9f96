"""Train an EAGLE-3 head for a policy on its own responses, for `benchmarks.speculation`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhfless_ray.engine.head_drafts import Eagle3Head
from rlhfless_ray.weights.tensor_file import Files

HIDDEN, BATCH, LEARNING_RATE = 128, 16, 2e-3
FURTHER = 2  # drafted tokens after the first that are trained too: the head reads its own outputs for them


def train_head(policy: Path, layers: tuple[int, ...], sequences: Sequence[Sequence[int]], passes: int) -> Files:
    """Return the files of a head that reads the hidden states before these layers.

    `policy`: its folder. `passes`: over the sequences. Learns the policy's distribution of each next token (cross-entropy).
    """
    model: Any = AutoModelForCausalLM.from_pretrained(policy, local_files_only=True, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": model.config.hidden_size,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN // 32,
        "num_key_value_heads": HIDDEN // 32,
        "vocab_size": model.config.vocab_size,
        "max_position_embeddings": model.config.max_position_embeddings,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    head = Eagle3Head(LlamaConfig(**config), len(layers) * model.config.hidden_size, owns_embeddings=True)
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE, weight_decay=0.0)
    steps = passes * -(-len(sequences) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(passes):
        order = torch.randperm(len(sequences)).tolist()
        for first in range(0, len(order), BATCH):
            loss = _loss(head, model, layers, [sequences[i] for i in order[first : first + BATCH]])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(head.state_dict())}


def widened_head(head: Files, hidden: int) -> Files:
    """Return the head for the policy after `widen.widened`, whose states are those of the smaller one and zeros."""
    config, tensors = json.loads(bytes(head["config.json"])), load(bytes(head["model.safetensors"]))
    layers = tensors["fc.weight"].split(config["target_hidden_size"], 1)
    padded = [torch.nn.functional.pad(layer, (0, hidden - layer.shape[1])) for layer in layers]
    tensors["fc.weight"] = torch.cat(padded, 1)
    return {"config.json": json.dumps({**config, "target_hidden_size": hidden}).encode(), "model.safetensors": save(tensors)}


def _loss(head: Eagle3Head, model: Any, layers: tuple[int, ...], sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    assert head.embed_tokens is not None
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in sequences], batch_first=True)
    there = torch.nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in sequences], batch_first=True)
    with torch.no_grad():
        states: list[torch.Tensor] = []
        modules = [*model.model.layers, model.model.norm]
        hooks = [modules[layer].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for layer in layers]
        wanted = model(tokens).logits.softmax(-1)
        for hook in hooks:
            hook.remove()
    # entry i has the states of i and token i + 1, and predicts token i + 2
    embedded, counted, wanted = head.embed_tokens(tokens[:, 1:-1]), there[:, 2:], wanted[:, 1:-1]
    count = embedded.shape[1]
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    positions = torch.arange(count)[None]
    read, loss = head.fc(torch.cat(states, -1)[:, :-2]), torch.zeros(())
    for further in range(1 + FURTHER):
        outputs = head(embedded, read, positions, mask)
        entropy = -(wanted * head.logits(outputs).log_softmax(-1)).sum(-1)
        loss = loss + (entropy * counted)[:, further:].sum() / counted[:, further:].sum() * 0.8**further
        read = torch.cat([read[:, :1], outputs[:, :-1]], 1)
    return loss
