"""Checksum of published weights.

Engines pull weights instead of receiving them in a collective, which would fix its members and prevent elasticity. Shards are
return values of the ranks' method, so the driver owns them and they outlive the learner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

from rlhfless_ray.weights.parts import Part, Shard

MAX_NAMES = 8  # in a message


def digests(weights: Shard) -> dict[str, int]:
    """Return the xxh3 hash of each tensor's name, dtype, shape and bytes, in name order. A part is named with its elements."""
    digest_of = {}
    for name, piece in sorted(weights.items()):
        array = np.ascontiguousarray(piece.values if isinstance(piece, Part) else piece)
        if isinstance(piece, Part):
            name = f"{name}[{piece.start}:{piece.end}]"
        digest = xxhash.xxh3_64(f"{name} {array.dtype} {piece.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        digest_of[name] = digest.intdigest()
    return digest_of


def digests_like(weights: Mapping[str, np.ndarray], published: Iterable[str]) -> dict[str, int]:
    """Return the digests of whole tensors in the pieces that the keys of published `digests` name."""
    whole, found = dict(weights), dict[str, int]()
    for key in published:
        if (piece := re.fullmatch(r"(.+)\[(\d+):(\d+)\]", key)) and piece[1] in weights:
            whole.pop(piece[1], None)
            array, start = weights[piece[1]], int(piece[2])
            found |= digests({piece[1]: Part(array.shape, start, array.reshape(-1)[start : int(piece[3])])})
    return {**found, **digests(whole)}


def combined(digest_of: Mapping[str, int]) -> int:
    """Combine `digests` into one checksum."""
    return xxhash.xxh3_64(b"".join(digest_of[name].to_bytes(8, "little") for name in sorted(digest_of))).intdigest()


def checksum(weights: Mapping[str, np.ndarray]) -> int:
    """Return one checksum of all tensors: names, dtypes, shapes and bytes."""
    return combined(digests(weights))


def damaged(actual: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Return the names of tensors that are missing, unexpected, or different, in order."""
    return sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))


def listed(names: list[str]) -> str:
    """List the first names, for a message."""
    others = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + others
