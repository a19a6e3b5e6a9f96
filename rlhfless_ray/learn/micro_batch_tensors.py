"""The tensors of a micro-batch, and forward passes over micro-batches. Rows are padded to the longest, unless there is only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.batch import UNKNOWN_EXPERT, Batch
from rlhfless_ray.learn.micro_batches import MicroBatch
from rlhfless_ray.learn.packing import row_tokens

TensorsOf = Callable[[Batch, MicroBatch, torch.device], dict[str, Tensor]]  # makes the tensors of a micro-batch


def padded(batch: Batch, rows: Sequence[np.ndarray] | np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of one micro-batch for `TokenLogprobs`, with the flat position of each token in `batch.logprobs`.

    `rows`: indices of the sequences of each row, or one index for each.

    Returns:
        ids: (rows, longest) token ids.
        seen: (rows, longest) False for padding.
        rows, columns: (response tokens,) position in `ids` that predicts the token.
        targets, flat: (response tokens,) the token, and its number in the batch.
        sequence: (response tokens,) index of the token's sequence in the batch.
        positions, segments: (rows, longest), only if a row has several responses: each token's position in its own sequence, and its
            response's number in the row, 0 for the prompt and -1 for padding.
        experts: (rows, longest, routers, experts per token), only if the batch has them. A shared prompt has those of its first response.

        Response tokens are those that the policy wrote. All others are in `ids` only.
    """
    rows = [np.atleast_1d(row) for row in rows]
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    response_starts = np.concatenate([[0], np.cumsum(batch.response_lengths)])
    written_starts = starts - np.concatenate([[0], np.cumsum(batch.prompt_lengths)])  # in the mask
    longest = max(row_tokens(batch.prompt_lengths, batch.lengths, row) for row in rows)
    ids, positions = np.zeros((2, len(rows), longest), np.int64)
    segments = np.full((len(rows), longest), -1, np.int64)
    experts = None if batch.experts is None else np.full((len(rows), longest, *batch.experts.shape[1:]), UNKNOWN_EXPERT, np.uint8)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("rows", "columns", "targets", "flat", "sequence")}
    for number, row in enumerate(rows):
        end = prompt = int(batch.prompt_lengths[row[0]])
        ids[number, :prompt] = batch.tokens[starts[row[0]] : starts[row[0]] + prompt]
        positions[number, :prompt], segments[number, :prompt] = np.arange(prompt), 0
        if batch.experts is not None and experts is not None:
            experts[number, :prompt] = batch.experts[starts[row[0]] : starts[row[0]] + prompt]
        for segment, i in enumerate(row, start=1):
            response = batch.tokens[starts[i] + prompt : starts[i + 1]]
            here = slice(end, end + len(response))
            ids[number, here], positions[number, here], segments[number, here] = response, prompt + np.arange(len(response)), segment
            if batch.experts is not None and experts is not None:
                experts[number, here] = batch.experts[starts[i] + prompt : starts[i + 1]]
            before = np.arange(end - 1, end + len(response) - 1)
            before[:1] = prompt - 1  # the prompt's last token predicts the first one
            if batch.mask is not None:
                written = batch.mask[written_starts[i] : written_starts[i + 1]]
                before, response = before[written], response[written]
            parts["rows"].append(np.full(len(before), number))
            parts["columns"].append(before)
            parts["targets"].append(response)
            parts["flat"].append(np.arange(response_starts[i], response_starts[i + 1]))
            parts["sequence"].append(np.full(len(before), i))
            end = here.stop
    arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()} | {"ids": ids, "seen": segments >= 0}
    if any(len(row) > 1 for row in rows):
        arrays |= {"positions": positions, "segments": segments}
    if experts is not None:
        arrays["experts"] = experts
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def packed(batch: Batch, rows: Sequence[np.ndarray] | np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch whose rows lie end to end in one row, without padding.

    Arguments and result are those of `padded`. `positions` are always there, and so are the lengths of the rows: `lengths` (rows,), on the
    host.
    """
    tensors = padded(batch, rows, device)
    seen, rows_of = tensors["seen"], tensors["rows"]
    lengths = seen.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    tensors.setdefault("positions", torch.arange(seen.shape[1], device=device).expand_as(seen))
    tensors |= {name: tensors[name][seen][None] for name in ("ids", "seen", "positions", "segments", "experts") if name in tensors}
    return tensors | {"rows": torch.zeros_like(rows_of), "columns": starts[rows_of] + tensors["columns"], "lengths": lengths.cpu()}


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask (rows, 1, length, length) that lets each response see only its row's prompt and itself.

    `segments` (rows, length): see `padded`.
    """
    length = segments.shape[1]
    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    seen &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    # of the model's dtype: every layer would make such a copy of a mask of bools, and keep it for the backward pass
    return torch.zeros(seen.shape, dtype=dtype, device=segments.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def passed(
    forward: Callable[[dict[str, Tensor]], Tensor],
    batch: Batch,
    cuts: Sequence[MicroBatch],
    device: torch.device,
    tensors_of: TensorsOf = padded,
) -> Tensor:
    """Return the value of `forward` for each response token of these micro-batches, (Σ response length,) float32, 0 for other tokens.

    `forward` is called once for each micro-batch, even an empty one, because other ranks wait for its collectives. `tensors_of`: `padded`
    or `packed`.
    """
    flat = torch.zeros(len(batch.logprobs), device=device)
    with torch.no_grad():
        for cut in cuts:
            tensors = tensors_of(batch, cut or [np.arange(1)], device)
            values = forward(tensors)
            if cut:
                flat[tensors["flat"]] = values.float()
    return flat
