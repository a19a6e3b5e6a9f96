"""Train an EAGLE-3 head for a policy on its own responses, before a run.

The head learns the policy's whole distribution of each next token, and not only the token that was drawn. The policy's hidden states are
computed here again, so engines send none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.head_config import layers_read
from rlhfless_ray.engine.head_model import Eagle3Head
from rlhfless_ray.weights.tensor_file import Files

LEARNING_RATE = 2e-3  # at a width of 128. Others divide it by the root of their ratio to that
BATCH = 16  # sequences of an update
LOGIT_BYTES = 1 << 28  # limit on the logits of an update
FURTHER = 2  # drafted tokens after the first that are trained too: the head reads its own outputs for them
DECAY = 0.8  # weight of a further token against the one before
HEAD_WIDTH = 32  # channels of an attention head
HELD_OUT = 16  # one in so many sequences is not trained on
MOST_NORM = 1.0  # limit of a gradient's norm


def head_config(policy: JsonObject, hidden: int) -> JsonObject:
    """Return the config.json of a head of this width for a policy, whose config.json is given.

    It reads hidden states near the beginning, the middle and the end, before the layers that vLLM takes where there are that many.
    """
    text = policy.get("text_config") or policy
    layers = text["num_hidden_layers"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "target_hidden_size": text["hidden_size"],
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // HEAD_WIDTH,
        "num_key_value_heads": hidden // HEAD_WIDTH,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text.get("max_position_embeddings", 1 << 15),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3] if layers > 7 else [0, layers // 2, layers]},
    }


def train_head(
    policy: Path, config: JsonObject, sequences: Sequence[Sequence[int]], passes: int, say: Callable[[str], None] = print
) -> Files:
    """Return the files of a head that has learned from sequences (prompt and response, in tokens).

    policy: the policy's folder. config: of `head_config`. passes: over the sequences. say: gets a line about each.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(policy, local_files_only=True, dtype=torch.float32).eval().to(device)
    torch.manual_seed(0)
    layers, text = layers_read(config), model.config.get_text_config()
    head = Eagle3Head(LlamaConfig(**config, attn_implementation="sdpa"), len(layers) * text.hidden_size, owns_embeddings=True).to(device)
    held_out = [one for one in sequences[::HELD_OUT] if len(one) > 2]
    trained = sorted((one for i, one in enumerate(sequences) if i % HELD_OUT and len(one) > 2), key=len)
    size = max(1, min(BATCH, LOGIT_BYTES // (4 * text.vocab_size * max(map(len, sequences)))))
    batches = [trained[i : i + size] for i in range(0, len(trained), size)]  # of like lengths
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE * (128 / config["hidden_size"]) ** 0.5, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (passes * len(batches)))
    for number in range(passes):
        for at in torch.randperm(len(batches)).tolist():
            loss, _ = _loss(head, model, layers, batches[at])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), MOST_NORM)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            shared = [_loss(head, model, layers, held_out[i : i + size])[1] for i in range(0, len(held_out), size)]
        say(f"pass {number + 1} of {passes}: {np.mean(shared):.0%} of the policy's probability is the head's too, on sequences held out")
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save({k: v.cpu() for k, v in head.state_dict().items()})}


def _loss(head: Eagle3Head, model: Any, layers: tuple[int, ...], sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, float]:
    """Return the loss, and Σ min(p, q) of the policy's and the head's probabilities of the next token, on average."""
    assert head.embed_tokens is not None
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in sequences], batch_first=True).to(model.device)
    there = torch.nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in sequences], batch_first=True).to(model.device)
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
    mask = torch.full((count, count), torch.finfo(torch.float32).min, device=model.device).triu(1)[None, None]
    positions = torch.arange(count, device=model.device)[None]
    read, loss, shared = head.fc(torch.cat(states, -1)[:, :-2]), torch.zeros((), device=model.device), 0.0
    for further in range(1 + FURTHER):
        outputs = head(embedded, read, positions, mask)
        logprobs = head.logits(outputs).log_softmax(-1)
        if not further:
            shared = float((torch.minimum(wanted, logprobs.detach().exp()).sum(-1) * counted).sum() / counted.sum())
        entropy = -(wanted * logprobs).sum(-1)
        loss = loss + (entropy * counted)[:, further:].sum() / counted[:, further:].sum().clamp(min=1) * DECAY**further
        read = torch.cat([read[:, :1], outputs[:, :-1]], 1)
    return loss, shared
