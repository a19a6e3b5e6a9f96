"""Drafts from an EAGLE-3 head: one decoder layer that reads the policy's hidden states (Li et al., arXiv 2503.01840).

The head's entry for position i reads the hidden states of the policy at i, from a few of its layers, and token i + 1. It predicts token
i + 2. For a further drafted token it reads its own output instead of the policy's states, which are not computed yet. Only engines whose
`rollout.drafter` is a head import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from placement.drafting.acceptance import MODEL_SEQUENCES, Draft
from rlhfless_ray.engine.fused_layer import FusedLayer, RotaryTable, rms_norm
from rlhfless_ray.engine.head_model import load_head
from rlhfless_ray.engine.model_drafts import Ask, DraftSource

KEPT_STATES = 512  # of a sequence that at least wait to be read. Without the older ones the head sees a shorter context.


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

    def propose(self, asks: Sequence[Ask], passes: int) -> list[Draft]:
        self.states = []
        return super().propose(asks, passes)

    def _unread(self, slot: int, ask: Ask) -> np.ndarray:
        track, end = self.tracks[ask.name], len(ask.tokens) - 1
        track.cut(end)
        self.begins[slot], self.sizes[slot] = track.begin, track.read  # entries of earlier drafted tokens are overwritten
        tokens = ask.tokens[track.begin + track.read + 1 :]
        self.states.append(track.take())
        return tokens

    def _keep(self, slots: np.ndarray, asks: Sequence[Ask], drafted: np.ndarray) -> None:
        """Forget them: `_unread` reads the policy's states of accepted tokens, over the entries of drafted ones."""

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
