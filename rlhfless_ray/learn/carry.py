"""Samples that do not fill an optimizer step wait for the first one of the next rollout (`algorithm.remainder` carry).

No optimizer step lies between the two, so their gradients are taken at the weights at which they would have been accumulated. They
keep what their own rollout gave them: advantages, old log-probabilities, the reference's, values and returns.
"""

from __future__ import annotations

import io
from dataclasses import fields, replace

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.batch import Batch

FILE = "carried.npz"  # in a checkpoint
NOT_ARRAYS = ("steps", "kl_coefficient")


def carried(left: Batch | None, batch: Batch, size: int, epochs: int, rng: np.random.Generator) -> tuple[Batch, Batch | None]:
    """Cut what is left of the rollout before and `batch` into optimizer steps of `size` sequences.

    Each epoch is in an order of its own, drawn from `rng`. What is left comes first, and what does not fill a step at the end of an
    epoch goes on into the next one, as gradients that accumulate do.

    Returns:
        The joined batch with its `steps`, and the sequences that fill no step, None where there are none.
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
    """Both, one after the other; settings of the second.

    Raises:
        UserError: One of them lacks what the other one has, after a resume with other settings.
    """
    names = [field.name for field in fields(Batch) if field.name not in (*NOT_ARRAYS, "mask")]
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
    return replace(second, **arrays)  # type: ignore[arg-type]


def as_bytes(batch: Batch) -> bytes:
    """The arrays, for a checkpoint."""
    out = io.BytesIO()
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in NOT_ARRAYS}
    np.savez(out, **{name: array for name, array in arrays.items() if array is not None})
    return out.getvalue()


def of_bytes(content: bytes) -> Batch:
    """The inverse of `as_bytes`."""
    with np.load(io.BytesIO(content)) as arrays:
        return Batch(**{name: arrays[name] for name in arrays.files})
