"""A step's sequences → the micro-batches of one rank, and their tensors.

Responses to one prompt lie behind each other in a row that has the prompt once. Each sees the prompt and itself only, at the positions
that it has in a sequence of its own, so every log-probability is the same. Rows are padded to the longest of their micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.packing import padded as pack
from rlhfless_ray.learn.packing import shared

# Families whose log-probabilities and gradients are tested to be the same in both layouts. Others, such as models with recurrent
# layers, would need a check of their own.
SHARING_FAMILIES = {
    *("gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
}

MicroBatch = list[np.ndarray]  # rows; each holds indices of sequences with the same prompt


@dataclass(frozen=True)
class PromptSharing:
    """What decides which responses share a row.

    `width`: of the model's hidden states. `window`: tokens that its attention reaches back; None: all. With a longer sequence every
    sequence has a row of its own, because the window would have to follow positions and not rows. `obstacle`: why every sequence has
    a row of its own, empty if some may share one.
    """

    width: int
    window: int | None = None
    obstacle: str = ""

    @classmethod
    def of(cls, model: Any, share_prompts: str = "auto", dropout: float = 0.0) -> PromptSharing:
        """`share_prompts`: as in the recipe. `dropout`: of adapters."""
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
    """Cut these sequences into micro-batches of at most `max_tokens` padded tokens, and return those of one rank.

    Every rank has the same number, so some may be empty. Without `sharing` every sequence has a row of its own.
    """
    prompts, lengths = batch.prompt_lengths[indices], batch.lengths[indices]
    if sharing is None or sharing.obstacle or (sharing.window is not None and lengths.max(initial=0) > sharing.window):
        return [list(indices[cut][:, None]) for cut in pack(lengths, max_tokens, ranks)[rank]]
    cuts = shared(prompts, lengths, _same_prompts(batch, indices), max_tokens, sharing.width, ranks)[rank]
    return [[indices[row] for row in rows] for rows in cuts]


def _same_prompts(batch: Batch, indices: np.ndarray) -> np.ndarray:
    """(n,) int64: equal for sequences of a group with equal prompts."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    numbers: dict[tuple[int, bytes], int] = {}
    keys = ((int(batch.groups[i]), batch.tokens[starts[i] : starts[i] + batch.prompt_lengths[i]].tobytes()) for i in indices)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _row_tokens(batch: Batch, row: np.ndarray) -> int:
    prompt = batch.prompt_lengths[row[0]]
    return int(prompt + (batch.lengths[row] - prompt).sum())


def padded(batch: Batch, rows: Sequence[np.ndarray] | np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of one micro-batch for `TokenLogprobs`, with the flat position of each token in `batch.logprobs`.

    `rows`: indices of the sequences of each row, or one index for each.

    Returns:
        ids (rows, longest); rows, columns, targets, flat (response tokens,): the place from which each token is foreseen, the token,
        and its number in the batch; sequence (response tokens,): the sequence's index in the batch. Of responses these are the tokens
        that the policy wrote; all others are in `ids` only. Where a row has several responses also positions and segments (rows,
        longest): each token's position in its own sequence, and its response's number in the row, 0 for the prompt, -1 for padding.
    """
    rows = [np.atleast_1d(row) for row in rows]
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    response_starts = np.concatenate([[0], np.cumsum(batch.response_lengths)])
    written_starts = starts - np.concatenate([[0], np.cumsum(batch.prompt_lengths)])  # in the mask
    longest = max(_row_tokens(batch, row) for row in rows)
    ids, positions = np.zeros((2, len(rows), longest), np.int64)
    segments = np.full((len(rows), longest), -1, np.int64)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("rows", "columns", "targets", "flat", "sequence")}
    for number, row in enumerate(rows):
        end = prompt = int(batch.prompt_lengths[row[0]])
        ids[number, :prompt] = batch.tokens[starts[row[0]] : starts[row[0]] + prompt]
        positions[number, :prompt], segments[number, :prompt] = np.arange(prompt), 0
        for segment, i in enumerate(row, start=1):
            response = batch.tokens[starts[i] + prompt : starts[i + 1]]
            here = slice(end, end + len(response))
            ids[number, here], positions[number, here], segments[number, here] = response, prompt + np.arange(len(response)), segment
            before = np.arange(end - 1, end + len(response) - 1)
            before[:1] = prompt - 1  # the first token is foreseen from the prompt's end
            if batch.mask is not None:
                written = batch.mask[written_starts[i] : written_starts[i + 1]]
                before, response = before[written], response[written]
            parts["rows"].append(np.full(len(before), number))
            parts["columns"].append(before)
            parts["targets"].append(response)
            parts["flat"].append(np.arange(response_starts[i], response_starts[i + 1]))
            parts["sequence"].append(np.full(len(before), i))
            end = here.stop
    arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()} | {"ids": ids}
    if any(len(row) > 1 for row in rows):
        arrays |= {"positions": positions, "segments": segments}
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to attention scores so that responses of a row see its prompt and themselves: (rows, 1, length, length).

    `segments` (rows, length): see `padded`.
    """
    length = segments.shape[1]
    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    seen &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    # of the model's dtype: every layer would make such a copy of a mask of bools, and keep it for the backward pass
    return torch.zeros(seen.shape, dtype=dtype, device=segments.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def passed(forward: Callable[[dict[str, Tensor]], Tensor], batch: Batch, cuts: Sequence[MicroBatch], device: torch.device) -> Tensor:
    """What `forward` says of each response token, for the sequences of these micro-batches; 0 of all others: (Σ response length,)
    float32. It is called once for each of them, also where one is empty: with several ranks the others wait for its collectives."""
    flat = torch.zeros(len(batch.logprobs), device=device)
    with torch.no_grad():
        for cut in cuts:
            tensors = padded(batch, cut or [np.arange(1)], device)
            found = forward(tensors)
            if cut:
                flat[tensors["flat"]] = found
    return flat
