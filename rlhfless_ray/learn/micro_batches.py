"""Divide a step's sequences into the micro-batches of each rank. Without torch, because the driver divides batches too.

Responses to one prompt may follow each other in a row that has the prompt once. Each sees only the prompt and itself, at the positions
of a separate sequence, so every log-probability is the same. Rows are padded to the longest of their micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.packing import padded, shared
from rlhfless_ray.types import PromptImage

# Families whose log-probabilities and gradients are tested to be the same in both layouts. Others, such as models with recurrent
# layers, would need a check of their own.
SHARING_FAMILIES = {
    *("gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe"),
    *("phi3", "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "smollm3"),
}

MicroBatch = list[np.ndarray]  # rows; each holds indices of sequences with the same prompt


@dataclass(frozen=True)
class PromptSharing:
    """Conditions under which responses share a row.

    Attributes:
        width: of the model's hidden states.
        window: tokens that its attention reaches back; None: all. If a sequence is longer, no row is shared, because the window would
            have to follow positions instead of rows.
        obstacle: why no row is shared; "" if rows may be shared.
    """

    width: int
    window: int | None = None
    obstacle: str = ""

    @classmethod
    def of(cls, model: Any, share_prompts: str = "auto", dropout: float = 0.0) -> PromptSharing:
        """Return the conditions for a model. `share_prompts`: as in the recipe. `dropout`: share of the adapters' inputs."""
        config = model.config.get_text_config()
        obstacle = ""
        if share_prompts == "off":
            obstacle = "learner.share_prompts is off"
        elif dropout:
            obstacle = "lora.dropout is drawn for each sequence"
        elif config.model_type not in SHARING_FAMILIES:
            obstacle = f"not tested with models of type {config.model_type}"
        elif config._attn_implementation not in ("sdpa", "eager"):
            obstacle = f"the attention {config._attn_implementation} takes no mask"
        return cls(config.hidden_size, getattr(config, "sliding_window", None) or None, obstacle)


def micro_batches(
    batch: Batch, indices: np.ndarray, max_tokens: int, sharing: PromptSharing | None, rank: int = 0, ranks: int = 1
) -> list[MicroBatch]:
    """Cut these sequences into micro-batches, see `dealt`, and return those of one rank."""
    return dealt(batch, indices, max_tokens, sharing, ranks)[rank]


def dealt(batch: Batch, indices: np.ndarray, max_tokens: int, sharing: PromptSharing | None, ranks: int = 1) -> list[list[MicroBatch]]:
    """Cut these sequences into micro-batches of at most `max_tokens` padded tokens, and return those of every rank.

    Every rank has the same number, so some may be empty. Without `sharing` every sequence has a row of its own.
    """
    prompts, lengths = batch.prompt_lengths[indices], batch.lengths[indices]
    if sharing is None or sharing.obstacle or (sharing.window is not None and lengths.max(initial=0) > sharing.window):
        return [[list(indices[cut][:, None]) for cut in cuts] for cuts in padded(lengths, max_tokens, ranks)]
    by_rank = shared(prompts, lengths, _same_prompts(batch, indices), max_tokens, sharing.width, ranks)
    return [[[indices[row] for row in rows] for rows in cuts] for cuts in by_rank]


def _same_prompts(batch: Batch, indices: np.ndarray) -> np.ndarray:
    """Return (n,) int64 numbers that are equal for sequences of the same group with equal prompts."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    numbers: dict[tuple[int, bytes, tuple[PromptImage, ...]], int] = {}
    keys = (
        (
            int(batch.groups[i]),
            batch.tokens[starts[i] : starts[i] + batch.prompt_lengths[i]].tobytes(),
            () if batch.pictures is None else batch.pictures[i],
        )
        for i in indices
    )
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
