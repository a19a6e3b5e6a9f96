"""Drafts from a small causal language model in the engine's process.

The drafter draws with the same random numbers as the policy. If both have nearly the same distribution, they draw the same token, at any
temperature. Only engines with `rollout.drafter` import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from placement.drafting import MODEL_SEQUENCES, SOURCES, Draft
from rlhfless_ray.rollout.keyed_sampler import draw_in_chunks


@dataclass(frozen=True)
class Ask:
    """A sequence to draft for. `tokens`: (n,) so far. `uniforms`: the random numbers of its stream from the next position. `most`:
    maximum number of tokens to draft."""

    name: int
    tokens: np.ndarray
    uniforms: np.ndarray
    most: int
    temperature: float
    top_p: float


class ModelSource:
    def __init__(self, folder: Path, vocabulary: int, longest_tokens: int, device: torch.device) -> None:
        """`vocabulary`: the policy's, to which drafts are limited. `longest_tokens`: tokens of the longest sequence with its draft."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
        self.model, self.device = model.eval().to(device), device
        self.vocabulary = vocabulary
        longest_tokens = min(longest_tokens, getattr(self.model.config, "max_position_embeddings", None) or longest_tokens)
        self.cache = _SlotCache(longest_tokens)
        self.slots: dict[int, int] = {}  # cache row of each sequence
        self.cached = np.zeros((MODEL_SEQUENCES, longest_tokens), np.int64)  # tokens whose keys and values the cache has
        self.sizes = np.zeros(MODEL_SEQUENCES, int)  # number of these tokens

    @torch.inference_mode()
    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Replace the weights. Keys and values of the old ones are dropped."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
        self.slots.clear()
        self.sizes[:] = 0

    def fits(self, tokens: np.ndarray, most: int) -> bool:
        """Return whether the model can read a sequence with its draft."""
        return len(tokens) + most <= self.cache.longest

    def forget_all_but(self, names: Sequence[int]) -> None:
        for name in self.slots.keys() - set(names):
            del self.slots[name]

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask], goes_on: Callable[[list[Draft]], bool]) -> list[Draft]:
        """Return a draft for each of at most `MODEL_SEQUENCES` sequences.

        `goes_on`: returns whether a further token is worth its pass, given the drafts so far.
        """
        free = sorted(set(range(MODEL_SEQUENCES)) - set(self.slots.values()))
        known = {ask.name for ask in asks}
        for name in [name for name in self.slots if name not in known]:
            free.append(self.slots[name])
        for ask in asks:
            if ask.name not in self.slots:
                slot = free.pop(0)
                self.slots = {name: used for name, used in self.slots.items() if used != slot} | {ask.name: slot}
                self.sizes[slot] = 0
        slots = np.array([self.slots[ask.name] for ask in asks])
        new = [ask.tokens[self._shared(slot, ask.tokens) :] for slot, ask in zip(slots, asks, strict=True)]
        drafts = [Draft([], [], 0, SOURCES.index("model")) for _ in asks]
        temperature, top_p = self._tensor([ask.temperature for ask in asks], torch.float32), None
        if any(ask.top_p < 1 for ask in asks):
            top_p = self._tensor([ask.top_p for ask in asks], torch.float64)
        for count in range(max(ask.most for ask in asks)):
            logits = self._forward(slots, new)
            uniform = self._tensor([ask.uniforms[min(count, len(ask.uniforms) - 1)] for ask in asks], torch.float64)
            tokens, logprobs = draw_in_chunks(logits, temperature, uniform, top_p)
            new = [np.array([token]) for token in tokens.tolist()]
            for draft, ask, token, chance in zip(drafts, asks, tokens.tolist(), logprobs.exp().tolist(), strict=True):
                if count < ask.most:
                    draft.tokens.append(token)
                    draft.estimates.append(max(chance, 1e-3))
            if not goes_on(drafts):
                break
        return drafts

    def _tensor(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)

    def _shared(self, slot: int, tokens: np.ndarray) -> int:
        """Return how many of the first tokens the cache has. The last one is computed in any case, for its logits."""
        size = min(int(self.sizes[slot]), len(tokens) - 1)
        other = np.flatnonzero(self.cached[slot, :size] != tokens[:size])
        self.sizes[slot] = int(other[0]) if len(other) else size
        return int(self.sizes[slot])

    def _forward(self, slots: np.ndarray, new: Sequence[np.ndarray]) -> torch.Tensor:
        """Compute new tokens of each sequence, and return the logits (sequences, vocabulary) after the last ones."""
        counts = np.array([len(tokens) for tokens in new])
        padded = np.zeros((len(new), counts.max()), np.int64)
        begins = self.sizes[slots]
        for row, (slot, tokens) in enumerate(zip(slots, new, strict=True)):
            padded[row, : len(tokens)] = tokens
            self.cached[slot, begins[row] : begins[row] + len(tokens)] = tokens
        self.sizes[slots] += counts
        # Padding is written behind a sequence's end, where nothing attends to it before it is overwritten.
        positions = np.minimum(begins[:, None] + np.arange(padded.shape[1]), self.cache.longest - 1)
        width = int(positions.max()) + 1
        hidden, least = self._tensor(np.arange(width) > positions[:, :, None])[:, None], torch.finfo(self.model.dtype).min
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(hidden, least)
        at = self._tensor(positions)
        self.cache.place(self._tensor(slots), at, width)
        logits = self.model(self._tensor(padded), attention_mask=mask, position_ids=at, past_key_values=self.cache, use_cache=True).logits
        return logits[torch.arange(len(new)), self._tensor(counts - 1), : self.vocabulary].float()


class _SlotCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of sequences of different lengths: a row for each slot, written at any positions."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer

    def place(self, slots: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """Set the slots and positions of the next pass. `width`: number of positions that it attends to."""
        self.at, self.positions, self.width = slots, positions, width

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx not in self.states:
            self.states[layer_idx] = (self._empty(key_states), self._empty(value_states))
        attended = []
        for kept, states in zip(self.states[layer_idx], (key_states, value_states), strict=True):
            kept[self.at[:, None], :, self.positions] = states.transpose(1, 2)
            attended.append(kept[self.at, :, : self.width])
        return tuple(attended)

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(MODEL_SEQUENCES, states.shape[1], self.longest, states.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width
