"""Drafts from a small causal language model in the engine's process.

The drafter draws with the same random numbers as the policy. If both have nearly the same distribution, they draw the same token, at any
temperature. Only engines with `rollout.drafter` import this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from placement.drafting.acceptance import MODEL_SEQUENCES, SOURCES, Draft
from rlhfless_ray.engine.fused_layer import FusedLayer, RotaryTable, can_be_fused, rms_norm
from rlhfless_ray.engine.keyed_sampler import Truncation, draw_in_chunks

MOST_LOGIT = 1e4  # limit on logits: from an overflow, no token can be drawn, and on GPU a wrong index ends the process
LEAST_CACHED = 256  # tokens of a sequence for which the cache has room at first


@dataclass(frozen=True)
class Ask:
    """A sequence to draft for. `tokens`: (n,) so far. `uniforms`: the random numbers of its stream from the next position. `most`:
    maximum number of tokens to draft."""

    name: int
    tokens: np.ndarray
    uniforms: np.ndarray
    most: int
    temperature: float
    truncation: tuple[float, int]  # top-p and top-k


class DraftSource(ABC):
    """A drafter with a cache of keys and values for up to `MODEL_SEQUENCES` sequences."""

    def __init__(self, module: torch.nn.Module, longest_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """`longest_tokens`: tokens of the longest sequence with its draft."""
        self.module, self.longest_tokens, self.dtype, self.device = module, longest_tokens, dtype, device
        self.cache = _SlotCache()
        self.slots: dict[int, int] = {}  # cache row of each sequence
        self.sizes = np.zeros(MODEL_SEQUENCES, int)  # entries of each row

    @abstractmethod
    def fits(self, name: int, tokens: np.ndarray, most: int) -> bool:
        """Return whether up to `most` tokens can be drafted for a sequence."""

    @abstractmethod
    def _unread(self, slot: int, ask: Ask) -> np.ndarray:
        """Return the tokens of a sequence for which the cache has no entries yet, at least one. Sets `sizes[slot]`."""

    @abstractmethod
    def _compute(self, tokens: torch.Tensor, mask: torch.Tensor, entries: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the logits (sequences, vocabulary) after the last new token of each sequence.

        tokens: (sequences, width), padded. mask: (sequences, 1, width, entries), added to the scores of attention. entries: (sequences,
        width), the tokens' places in the cache. last: (sequences,) columns of the last tokens.
        """

    @torch.inference_mode()
    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Replace the weights. Keys and values of the old ones are dropped."""
        for name, parameter in self.module.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
        self.slots.clear()
        self.sizes[:] = 0

    def forget_all_but(self, names: Sequence[int]) -> None:
        for name in self.slots.keys() - set(names):
            del self.slots[name]

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask], passes: int) -> list[Draft]:
        """Return a draft of up to `passes` tokens for each of at most `MODEL_SEQUENCES` sequences.

        The tokens of a pass are the next one's input on the device. The host waits once, for all of them.
        """
        slots = self._slots_of(asks)
        new = [self._unread(slot, ask) for slot, ask in zip(slots.tolist(), asks, strict=True)]
        counts = np.array([len(tokens) for tokens in new])
        padded = np.zeros((len(new), counts.max()), np.int64)
        for row, tokens in enumerate(new):
            padded[row, : len(tokens)] = tokens
        passes = min(passes, max(ask.most for ask in asks))
        numbers = [[ask.uniforms[min(i, len(ask.uniforms) - 1)] for ask in asks] for i in range(passes)]
        uniforms = self._tensor(numbers, torch.float64)  # (passes, sequences)
        temperature = self._tensor([ask.temperature for ask in asks], torch.float32)
        truncation = Truncation.of((ask.truncation for ask in asks), self.device)
        has_greedy = any(ask.temperature == 0 for ask in asks)
        read, drawn = self._tensor(padded), []
        for uniform in uniforms:
            logits = self._forward(slots, read, counts).nan_to_num_(0.0).clamp_(-MOST_LOGIT, MOST_LOGIT)
            tokens_of_pass, logprobs = draw_in_chunks(logits, temperature, uniform, truncation, has_greedy)
            drawn.append(torch.stack([tokens_of_pass.double(), logprobs.double()]))
            read, counts = tokens_of_pass[:, None], np.ones_like(counts)
        drafted, logs = torch.stack(drawn, 2).cpu().numpy()  # (sequences, passes) each
        self._keep(slots, asks, drafted.astype(np.int64))
        model, chances = SOURCES.index("model"), np.maximum(np.exp(logs), 1e-3).tolist()
        columns = zip(drafted.astype(int).tolist(), chances, asks, strict=True)
        return [Draft(tokens[: ask.most], estimates[: ask.most], 0, model) for tokens, estimates, ask in columns]

    @abstractmethod
    def _keep(self, slots: np.ndarray, asks: Sequence[Ask], drafted: np.ndarray) -> None:
        """Record the drafted tokens (sequences, passes), of which the cache has entries of all but the last."""

    def _slots_of(self, asks: Sequence[Ask]) -> np.ndarray:
        free = sorted(set(range(MODEL_SEQUENCES)) - set(self.slots.values()))
        known = {ask.name for ask in asks}
        for name in [name for name in self.slots if name not in known]:
            free.append(self.slots[name])
        for ask in asks:
            if ask.name not in self.slots:
                slot = free.pop(0)
                self.slots = {name: used for name, used in self.slots.items() if used != slot} | {ask.name: slot}
                self.sizes[slot] = 0
        return np.array([self.slots[ask.name] for ask in asks])

    def _tensor(self, values: object, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)

    def _forward(self, slots: np.ndarray, tokens: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
        """Compute the first `counts` of new tokens (sequences, width). Returns logits (sequences, vocabulary) after the last of them."""
        begins = self.sizes[slots]
        self.sizes[slots] += counts
        # Padding is written behind a sequence's end, where nothing attends to it before it is overwritten.
        entries = np.minimum(begins[:, None] + np.arange(tokens.shape[1]), self.longest_tokens - 1)
        width = int(entries.max()) + 1
        hidden, least = self._tensor(np.arange(width) > entries[:, :, None])[:, None], torch.finfo(self.dtype).min
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, least)
        at = self._tensor(entries)
        self.cache.place(slots, at, width)
        return self._compute(tokens, mask, at, self._tensor(counts - 1))


class ModelSource(DraftSource):
    """Drafts from a whole causal language model."""

    def __init__(self, folder: Path, vocabulary: int, longest_tokens: int, device: torch.device) -> None:
        """`vocabulary`: the policy's, to which drafts are limited."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
        longest_tokens = min(longest_tokens, getattr(model.config, "max_position_embeddings", None) or longest_tokens)
        super().__init__(model.eval().to(device), longest_tokens, model.dtype, device)
        self.vocabulary = vocabulary
        self.last_token = len(model.get_input_embeddings().weight) - 1
        self.cached = np.zeros((MODEL_SEQUENCES, longest_tokens), np.int64)  # tokens whose keys and values the cache has
        self.fused = _FusedModel(self.module, longest_tokens) if can_be_fused(model.config) else None

    def fits(self, name: int, tokens: np.ndarray, most: int) -> bool:
        return len(tokens) + most <= self.longest_tokens

    def _unread(self, slot: int, ask: Ask) -> np.ndarray:
        size = min(int(self.sizes[slot]), len(ask.tokens) - 1)  # the last one is computed in any case, for its logits
        other = np.flatnonzero(self.cached[slot, :size] != ask.tokens[:size])
        self.sizes[slot] = int(other[0]) if len(other) else size
        self.cached[slot, : len(ask.tokens)] = ask.tokens
        return ask.tokens[self.sizes[slot] :]

    def _keep(self, slots: np.ndarray, asks: Sequence[Ask], drafted: np.ndarray) -> None:
        for slot, ask, tokens in zip(slots.tolist(), asks, drafted, strict=True):
            room = self.cached[slot, len(ask.tokens) :]
            room[: len(tokens)] = tokens[: len(room)]

    def _compute(self, tokens: torch.Tensor, mask: torch.Tensor, entries: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        # Vocabularies may be padded to different sizes, and a policy may sample its padding. On GPU, a wrong index ends the process.
        tokens = tokens.clamp(max=self.last_token)
        if self.fused is not None:
            return self.fused.logits(tokens, mask, entries, last, self.cache)[:, : self.vocabulary].float()
        logits = self.module(tokens, attention_mask=mask, position_ids=entries, past_key_values=self.cache, use_cache=True).logits
        return logits[torch.arange(len(tokens)), last, : self.vocabulary].float()


class _FusedModel:
    """A causal language model of `fused_layer.MODEL_TYPES`."""

    def __init__(self, model: Any, longest_tokens: int) -> None:
        self.base, self.head = model.model, model.lm_head
        self.layers = [FusedLayer(layer.self_attn, layer.mlp) for layer in self.base.layers]
        self.rotary = RotaryTable(self.base.rotary_emb, longest_tokens, self.base.embed_tokens.weight)

    def logits(
        self, tokens: torch.Tensor, mask: torch.Tensor, entries: torch.Tensor, last: torch.Tensor, cache: _SlotCache
    ) -> torch.Tensor:
        states, rotation = self.base.embed_tokens(tokens), self.rotary.at(entries)
        for number, (layer, fused) in enumerate(zip(self.base.layers, self.layers, strict=True)):
            states = states + fused.attend(rms_norm(states, layer.input_layernorm), rotation, mask, cache, number)
            states = states + fused.feed_forward(rms_norm(states, layer.post_attention_layernorm))
        return self.head(rms_norm(states[torch.arange(len(tokens)), last], self.base.norm))


class _SlotCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of sequences of different lengths: a row for each slot, written at any entries. Rows grow with the longest one."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer

    def place(self, slots: np.ndarray, entries: torch.Tensor, width: int) -> None:
        """Set the slots and entries of the next pass. `width`: number of entries that it attends to."""
        self.at, self.entries, self.width = torch.as_tensor(slots, device=entries.device), entries, width
        # rows that follow each other are read where they are, others are copied
        self.rows = slice(slots[0], slots[-1] + 1) if (np.diff(slots) == 1).all() else self.at

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object) -> Any:
        both, attended = (key_states, value_states), []
        if layer_idx not in self.states or self.states[layer_idx][0].shape[2] < self.width:
            self.states[layer_idx] = self._grown(layer_idx, both)
        for kept, states in zip(self.states[layer_idx], both, strict=True):
            kept[self.at[:, None], :, self.entries] = states.transpose(1, 2)
            attended.append(kept[self.rows, :, : self.width])
        return tuple(attended)

    def _grown(self, layer: int, new: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        room = max(LEAST_CACHED, 1 << (self.width - 1).bit_length())
        grown = tuple(states.new_zeros(MODEL_SEQUENCES, states.shape[1], room, states.shape[3]) for states in new)
        for to, kept in zip(grown, self.states.get(layer, ()), strict=False):
            to[:, :, : kept.shape[2]] = kept
        return grown[0], grown[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width
