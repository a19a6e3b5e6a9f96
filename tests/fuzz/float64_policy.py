"""Tiny Qwen2 and Mixtral models in float64, written from their papers: one sequence at a time, without padding and without masks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

VOCABULARY, EXPERTS, CHOSEN = 37, 4, 2  # Mixtral has 4 experts, of which each token chooses 2


@cache
def model_files(family: str, seed: int = 0, scalar_head: str = "") -> dict[str, bytes]:
    """Return a model folder with random weights as {file name: content}.

    Args:
        family: qwen2 or mixtral.
        scalar_head: name of a scalar head that the file has too; "": none.
    """
    import transformers
    from safetensors.torch import save

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2 if family == "qwen2" else 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if family == "qwen2":
        config, kind = transformers.Qwen2Config(**shape), transformers.Qwen2ForCausalLM
    else:
        config = transformers.MixtralConfig(**shape, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, sliding_window=None)
        kind = transformers.MixtralForCausalLM
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
        weights = load(files["model.safetensors"])
        for name, tensor in weights.items():  # biases and norms are constants otherwise
            if name.endswith("bias") or "norm" in name:
                weights[name] = tensor + 0.1 * torch.randn(tensor.shape)
        if scalar_head:
            weights[f"{scalar_head}.weight"] = 0.2 * torch.randn(1, 32)
    return {**files, "model.safetensors": save(weights, {"format": "pt"})}


class Float64Policy:
    """Weights by their names in the model's file, and the forward pass of one sequence."""

    def __init__(self, files: dict[str, bytes], scalar_head: str = "") -> None:
        """`scalar_head`: name of the head in the file, which is called `score` from then on; "": the language model's head."""
        self.config = json.loads(files["config.json"])
        stored = load(files["model.safetensors"])
        self.head = "score.weight" if scalar_head else "lm_head.weight"
        if scalar_head:
            stored["score.weight"] = stored.pop(f"{scalar_head}.weight")
            del stored["lm_head.weight"]
        self.weights = {name: tensor.double().requires_grad_() for name, tensor in stored.items()}
        self.router_logits: list[Tensor] = []  # (tokens, experts) of each layer in the last pass

    def outputs(self, ids: Sequence[int], experts: Tensor | None = None) -> Tensor:
        """Return the head's outputs (tokens, vocabulary), or (tokens, 1) of a scalar head.

        `experts` (tokens, layers, experts per token): the choices of the routers; None: their own. A row of 255 is unknown.
        """
        w, config = self.weights, self.config
        self.router_logits = []
        x = w["model.embed_tokens.weight"][torch.as_tensor(ids, dtype=torch.int64)]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attention(at + "self_attn.", self._norm(at + "input_layernorm.weight", x))
            normed = self._norm(at + "post_attention_layernorm.weight", x)
            if at + "mlp.gate_proj.weight" in w:
                gate, up, down = (w[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
                x = x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
            else:
                x = x + self._experts(at + "block_sparse_moe.", normed, None if experts is None else experts[:, layer])
        return self._norm("model.norm.weight", x) @ w[self.head].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self.weights[name] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def _attention(self, at: str, x: Tensor) -> Tensor:
        length, size = len(x), self.config["head_dim"]
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]

        def project(part: str, count: int) -> Tensor:
            y = x @ self.weights[f"{at}{part}_proj.weight"].T
            if f"{at}{part}_proj.bias" in self.weights:
                y = y + self.weights[f"{at}{part}_proj.bias"]
            return y.view(length, count, size).transpose(0, 1)

        theta = self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(length)[:, None] / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        cos, sin = torch.cos(angles), torch.sin(angles)

        def rotate(y: Tensor) -> Tensor:
            first, second = y[..., : size // 2], y[..., size // 2 :]
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        q, k, v = rotate(project("q", heads)), rotate(project("k", kv_heads)), project("v", kv_heads)
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        mixed = (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(length, heads * size)
        return mixed @ self.weights[f"{at}o_proj.weight"].T

    def _experts(self, at: str, x: Tensor, replayed: Tensor | None) -> Tensor:
        logits = x @ self.weights[f"{at}gate.weight"].T
        self.router_logits.append(logits)
        chosen = logits.topk(CHOSEN, -1).indices
        if replayed is not None:
            chosen = torch.where(replayed == 255, chosen, replayed.long())
        shares = torch.softmax(logits, -1).gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        rows = []
        for token, experts, share in zip(x, chosen.tolist(), shares, strict=True):
            parts = []
            for number, expert in enumerate(experts):
                first, down, up = (self.weights[f"{at}experts.{expert}.w{part}.weight"] for part in (1, 2, 3))
                parts.append(share[number] * ((torch.nn.functional.silu(first @ token) * (up @ token)) @ down.T))
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)


def balance_loss(router_logits: list[Tensor]) -> Tensor:
    """Return the auxiliary loss of Fedus et al. 2021 (arXiv 2101.03961, equation 4) over these tokens: E · Σ_e f_e · P_e.

    `router_logits`: (tokens, experts) of each router and sequence. f_e is the number of choices of expert e per token, and P_e its mean
    probability.
    """
    logits = torch.cat(router_logits)
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN, -1).indices, 1.0)
    return EXPERTS * (chosen.mean(0) * torch.softmax(logits, -1).mean(0)).sum()
