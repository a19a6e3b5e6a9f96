"""Drafts from an EAGLE-3 head: one decoder layer that reads the policy's hidden states (Li et al., arXiv 2503.01840).

The head's entry for position i reads the hidden states of the policy at i, from a few of its layers, and token i + 1. It predicts token
i + 2. For a further drafted token it reads its own output instead of the policy's states, which are not computed yet. Only engines whose
`rollout.drafter` is a head import this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from placement.drafting.acceptance import MODEL_SEQUENCES, Draft
from rlhfless_ray.engine.fused_layer import FusedLayer, RotaryTable, rms_norm
from rlhfless_ray.engine.head_config import EMBEDDINGS, plain_name
from rlhfless_ray.engine.model_drafts import Ask, DraftSource

KEPT_STATES = 512  # of a sequence that at least wait to be read. Without the older ones the head sees a shorter context.


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


@dataclass
class _Track:
    """Hidden states of the policy that the head reads, from position `begin` of a sequence on. The cache has entries of the first `read`.
    `waiting`: (positions, hidden) states after them."""

    begin: int
    read: int = 0
    waiting: list[torch.Tensor] = field(default_factory=list)

    @property
    def unread(self) -> int:
        return sum(map(len, self.waiting))

    @property
    def end(self) -> int:
        return self.begin + self.read + self.unread

    def cut(self, end: int) -> None:
        """Drop what is waiting from position `end` on: states of drafted tokens that were refused."""
        while self.waiting and self.end > end:
            last = self.waiting.pop()
            if (left := end - self.end) > 0:
                self.waiting.append(last[:left])

    def add(self, states: torch.Tensor) -> None:
        """Add the next positions. Drop states that waited too long, and their context."""
        self.waiting.append(states)
        if self.unread > 2 * KEPT_STATES:
            kept = torch.cat(self.waiting)[-KEPT_STATES:].clone()
            self.begin, self.read, self.waiting = self.end - KEPT_STATES, 0, [kept]

    def take(self) -> torch.Tensor:
        """Return what is waiting. It counts as read from now on."""
        states, self.waiting = torch.cat(self.waiting), []
        self.read += len(states)
        return states


class HeadSource(DraftSource):
    """Drafts from a head. `observe` gets the policy's hidden states of every engine step."""

    def __init__(self, folder: Path, longest_tokens: int, dtype: torch.dtype, device: torch.device, embed: Callable[..., Any]) -> None:
        """`dtype`: of the policy. `embed`: embeds tokens as the policy does, for a head without embeddings."""
        self.head = load_head(folder).to(device, dtype)
        super().__init__(self.head, min(longest_tokens, self.head.config.max_position_embeddings), dtype, device)
        self.layer = FusedLayer(self.head.midlayer.self_attn, self.head.midlayer.mlp)
        self.rotary = RotaryTable(self.head.rotary, self.longest_tokens, self.head.fc.weight)
        self.embed = self.head.embed_tokens or embed
        self.tracks: dict[int, _Track] = {}
        self.states: list[torch.Tensor] = []  # (new tokens, hidden) that the next pass reads, by sequence
        self.begins = np.zeros(MODEL_SEQUENCES, int)  # position of each cache row's first entry

    @torch.inference_mode()
    def observe(self, names: Sequence[int], begins: Sequence[int], bounds: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Take over the policy's hidden states of an engine step.

        begins: first position that was computed, by sequence. bounds: (sequences + 1,) where each sequence's rows begin in `states`, one
        (tokens, hidden) tensor for each layer that the head reads. With more sequences than can be drafted for, nothing is kept.
        """
        tracks: dict[int, _Track] = {}
        if len(names) <= MODEL_SEQUENCES:
            read = self.head.fc(torch.cat([layer[: bounds[-1]] for layer in states], -1))
            for name, begin, first, last in zip(names, begins, bounds, bounds[1:], strict=False):
                track = self.tracks.get(name)
                if track is None or not track.begin + track.read <= begin <= track.end:
                    track = _Track(begin)
                track.cut(begin)
                track.add(read[first:last].clone())  # a view would keep the states of all sequences, also those of long prompts
                tracks[name] = track
        self.tracks = tracks
        self.forget_all_but(list(tracks))

    def fits(self, name: int, tokens: np.ndarray, most: int) -> bool:
        """The newest token has no states yet. Those of the token before it are the first that must be there."""
        track, end = self.tracks.get(name), len(tokens) - 1
        return track is not None and track.begin + track.read < end <= track.end and len(tokens) + most <= self.longest_tokens

    def propose(self, asks: Sequence[Ask], goes_on: Callable[[list[Draft]], bool]) -> list[Draft]:
        self.states = []
        return super().propose(asks, goes_on)

    def _unread(self, slot: int, ask: Ask) -> np.ndarray:
        track, end = self.tracks[ask.name], len(ask.tokens) - 1
        track.cut(end)
        self.begins[slot], self.sizes[slot] = track.begin, track.read  # entries of earlier drafted tokens are overwritten
        tokens = ask.tokens[track.begin + track.read + 1 :]
        self.states.append(track.take())
        return tokens

    def _compute(self, tokens: torch.Tensor, mask: torch.Tensor, entries: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        states = torch.nn.utils.rnn.pad_sequence(self.states, batch_first=True)
        positions = entries + self._tensor(self.begins)[self.cache.at, None]
        outputs = self._outputs(self.embed(tokens), states, positions, mask)[torch.arange(len(tokens)), last]
        self.states = list(outputs[:, None])
        return self.head.logits(outputs)

    def _outputs(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute what `Eagle3Head.forward` does."""
        layer, normed = self.head.midlayer, rms_norm(states, self.head.midlayer.hidden_norm)
        both = torch.cat([rms_norm(embedded, layer.input_layernorm), normed], -1)
        attended = self.layer.attend(both, self.rotary.at(positions), mask, self.cache, 0)
        residual = (normed if layer.norm_before_residual else states) + attended
        return residual + self.layer.feed_forward(rms_norm(residual, layer.post_attention_layernorm))
