"""Carry samples that do not fill an optimizer step over to the first one of the next rollout (`algorithm.remainder: carry`).

No optimizer step lies between the two rollouts, so the gradients are those that would have been accumulated before. The samples
keep the advantages, log-probabilities, values and returns of their own rollout.
"""

from __future__ import annotations

import io
from dataclasses import fields, replace

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.batch import Batch, experts_of

FILE = "carried.npz"  # in a checkpoint
NOT_ARRAYS = ("steps", "kl_coefficient")


def carried(left: Batch | None, batch: Batch, size: int, epochs: int, rng: np.random.Generator) -> tuple[Batch, Batch | None]:
    """Divide `left`, the samples left from the previous rollout, and `batch` into optimizer steps of `size` sequences.

    Each epoch has its own order, drawn from `rng`. The samples in `left` come first. Samples that do not fill a step at the end of
    an epoch continue in the next one, like accumulated gradients.

    Returns:
        The joined batch with its `steps`, and the sequences that fill no step (None if there are none).
    """
    if not len(batch):
        return batch, left
    whole = batch if left is None else joined(left, batch)
    first = 0 if left is None else len(left)
    order = np.concatenate([np.arange(first), *(first + rng.permutation(len(batch)) for _ in range(epochs))])
    full = len(order) // size * size
    steps = tuple(np.sort(order[start : start + size]) for start in range(0, full, size))
    rest = order[full:]
    return replace(whole, steps=steps), whole.take(rest) if len(rest) else None


def joined(first: Batch, second: Batch) -> Batch:
    """Join two batches. The result has the settings of the second.

    Raises:
        UserError: One of them lacks an array that the other one has, after a resume with other settings.
    """
    names = [field.name for field in fields(Batch) if field.name not in (*NOT_ARRAYS, "mask", "experts")]
    arrays: dict[str, np.ndarray | None] = {}
    for name in names:
        pair = getattr(first, name), getattr(second, name)
        if (pair[0] is None) != (pair[1] is None):
            raise UserError(
                f"algorithm.remainder: the checkpoint's carried samples and this run's do not both have `{name}`; resume with the "
                "settings of algorithm that it was written with"
            )
        arrays[name] = None if pair[0] is None else np.concatenate(pair)
    if first.mask is None and second.mask is None:
        arrays["mask"] = None
    else:
        arrays["mask"] = np.concatenate([
            np.ones(int((one.lengths - one.prompt_lengths).sum()), bool) if one.mask is None else one.mask for one in (first, second)
        ])  # fmt: skip
    arrays["experts"] = experts_of([first.experts, second.experts], [int(one.lengths.sum()) for one in (first, second)])
    return replace(second, **arrays)  # type: ignore[arg-type]


def as_bytes(batch: Batch) -> bytes:
    """Return the batch's arrays as bytes, for a checkpoint."""
    out = io.BytesIO()
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in NOT_ARRAYS}
    np.savez(out, **{name: array for name, array in arrays.items() if array is not None})
    return out.getvalue()


def of_bytes(content: bytes) -> Batch:
    """Return the batch that `as_bytes` stored."""
    with np.load(io.BytesIO(content)) as arrays:
        return Batch(**{name: arrays[name] for name in arrays.files})
