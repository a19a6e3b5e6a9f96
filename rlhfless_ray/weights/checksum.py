"""Checksum of published weights.

Engines pull weights instead of receiving them in a collective, which would fix its members and prevent elasticity. The arrays are a
return value of the learner's method, so the driver owns them and they outlive the learner.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

MAX_NAMES = 8  # in a message


def digests(weights: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the xxh3 hash of each tensor's name, dtype, shape and bytes, in name order."""
    digest_of = {}
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest = xxhash.xxh3_64(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        digest_of[name] = digest.intdigest()
    return digest_of


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
