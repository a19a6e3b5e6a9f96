"""Whether a model may compute a prompt once for several responses to it, and the cut into micro-batches that follows.

A row then holds the prompt and the responses one after the other. An attention mask keeps the responses apart, and positions go on
from the prompt in each of them (`policy_model.hidden_states`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.packing import Rows, micro_batches

# `model_type` of the families whose shared rows equal separate ones, log-probabilities and gradients: test_prompt_sharing.py. Others may
# ignore the mask or the positions, or carry a state from token to token.
EXACT = frozenset({
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "smollm3",
})  # fmt: skip


@dataclass(frozen=True)
class Cutter:
    """Cuts a batch into the micro-batches of one rank.

    `obstacle`: why no prompt is shared, empty if they may be. `window`: tokens that a layer with a sliding window looks back, None
    without such layers. `attention_tokens`: see `packing.micro_batches`.
    """

    max_tokens: int
    ranks: int
    rank: int
    obstacle: str = ""
    window: int | None = None
    attention_tokens: int = 1

    def cut(self, batch: Batch, indices: np.ndarray) -> list[Rows]:
        """Return the rows of each micro-batch. Some may be empty, because every rank has as many as the others."""
        lengths = batch.lengths[indices]
        # A mask of ours has no window. Sequences that fit into the window see all of themselves.
        shares = not self.obstacle and (self.window is None or lengths.max(initial=0) <= self.window)
        of_prompts = batch.prompts[indices], batch.prompt_lengths[indices], lengths
        cuts = micro_batches(*of_prompts, self.max_tokens, self.ranks, self.attention_tokens if shares else None)
        return [[indices[row] for row in rows] for rows in cuts[self.rank]]


def make_cutter(model: Any, share_prompts: str, max_tokens: int, ranks: int, rank: int, dropout: float = 0.0) -> Cutter:
    """Make the cutter for a transformers model. `share_prompts`: as in the recipe; `dropout`: of its adapters."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    obstacle = ""
    if share_prompts == "off":
        obstacle = "learner.share_prompts is off"
    elif dropout:
        obstacle = "lora.dropout draws for each sequence, its prompt included"
    elif config.model_type not in EXACT:
        obstacle = f"shared prompts are not tested with models of type {config.model_type}"
    # per layer and token the weights take 24·width² operations, attention to n tokens 4·width·n
    return Cutter(max_tokens, ranks, rank, obstacle, window, 6 * config.hidden_size)
