"""Checksum of published weights.

Engines pull weights instead of receiving them in a collective, which would fix its members and prevent elasticity. Shards are
return values of the ranks' method, so the driver owns them and they outlive the learner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

from rlhfless_ray.weights.tensor_slice import Slices, TensorSlice, slice_called, whole_slices

MAX_NAMES = 8  # in a message


def digests(weights: Slices) -> dict[str, int]:
    """Return the xxh3 hash of each slice's name, dtype, shape and bytes, in name order."""
    digest_of = {}
    for name, piece in sorted((str(piece), piece) for piece in weights):
        values = np.ascontiguousarray(weights[piece])
        digest = xxhash.xxh3_64(f"{name} {values.dtype} {piece.shape}".encode())
        digest.update(values.view(np.uint8).data)
        digest_of[name] = digest.intdigest()
    return digest_of


def digests_like(weights: Mapping[str, np.ndarray], published: Iterable[str]) -> dict[str, int]:
    """Return the digests of whole tensors in the pieces that the keys of published `digests` name."""
    shapes = {name: array.shape for name, array in weights.items()}
    cut = [piece for text in published if (piece := slice_called(text, shapes)) is not None]
    rest = [TensorSlice.whole(name, shapes[name]) for name in shapes.keys() - {piece.name for piece in cut}]
    return digests({piece: weights[piece.name].reshape(-1)[piece.start : piece.end] for piece in (*cut, *rest)})


def combined(digest_of: Mapping[str, int]) -> int:
    """Combine `digests` into one checksum."""
    return xxhash.xxh3_64(b"".join(digest_of[name].to_bytes(8, "little") for name in sorted(digest_of))).intdigest()


def checksum(weights: Mapping[str, np.ndarray]) -> int:
    """Return one checksum of all tensors: names, dtypes, shapes and bytes."""
    return combined(digests(whole_slices(weights)))


def damaged(actual: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Return the names of tensors that are missing, unexpected, or different, in order."""
    return sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))


def listed(names: list[str]) -> str:
    """List the first names, for a message."""
    others = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + others
