"""The module of an EAGLE-3 head (Li et al., arXiv 2503.01840), for engines and for its training. Imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from rlhfless_ray.engine.head_config import EMBEDDINGS, plain_name


class _HeadLayer(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):  # they read a token's embedding beside its states
            size = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, torch.nn.Linear(2 * config.hidden_size, size, bias=config.attention_bias))
        self.mlp = LlamaMLP(config)
        self.norm_before_residual = getattr(config, "norm_before_residual", False)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **attention: object) -> torch.Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        attended, _ = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), **attention)
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Head(torch.nn.Module):
    """The head with the names of its published checkpoints. Its embeddings may be the policy's."""

    def __init__(self, config: LlamaConfig, states_size: int, owns_embeddings: bool) -> None:
        """`states_size`: of the policy's hidden states at a position, over all layers that the head reads."""
        super().__init__()
        self.config, vocabulary = config, getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size) if owns_embeddings else None
        self.fc = torch.nn.Linear(states_size, config.hidden_size, bias=False)
        self.midlayer = _HeadLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(config.hidden_size, vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.d2t: torch.Tensor  # what is added to a drafted token's number for the policy's
        self.register_buffer("d2t", torch.zeros(vocabulary, dtype=torch.int64))

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return outputs (sequences, width, hidden), for training. Engines compute them in `HeadSource`, with a cache.

        embedded, states: (sequences, width, hidden) of tokens and of `fc`.
        """
        return self.midlayer(embedded, states, position_embeddings=self.rotary(embedded, positions), attention_mask=mask)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (…, vocabulary of the policy) after outputs (…, hidden). Tokens that cannot be drafted have −∞."""
        drafted = self.lm_head(self.norm(outputs)).float()
        size = len(self.d2t)
        if size == self.config.vocab_size:
            return drafted
        logits = drafted.new_full((*drafted.shape[:-1], self.config.vocab_size), -torch.inf)
        logits[..., torch.arange(size, device=self.d2t.device) + self.d2t] = drafted
        return logits


def load_head(folder: Path) -> Eagle3Head:
    """Load a head. Raises RuntimeError if its weights are not those of an EAGLE-3 head with one Llama layer."""
    config = LlamaConfig(**json.loads((folder / "config.json").read_bytes()), attn_implementation="sdpa")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {plain_name(name): tensor for name, tensor in load_file(file).items()}
    tensors.pop("t2d", None)  # says again what d2t says
    head = Eagle3Head(config, tensors["fc.weight"].shape[1], EMBEDDINGS in tensors)
    tensors.setdefault("d2t", head.d2t)
    head.load_state_dict(tensors)
    return head.eval()
