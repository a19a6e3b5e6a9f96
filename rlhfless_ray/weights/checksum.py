"""Checksum of published weights.

Weights are pulled, never pushed: a collective would fix its members and prevent elasticity. The arrays are a return value of
the learner's method, so the driver owns them and they outlive the learner.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash


def digests(weights: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the xxh3 hash of each tensor's name, dtype, shape and bytes, in name order."""
    found = {}
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest = xxhash.xxh3_64(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        found[name] = digest.intdigest()
    return found


def combined(found: Mapping[str, int]) -> int:
    """Combine `digests` into one checksum."""
    return xxhash.xxh3_64(b"".join(found[name].to_bytes(8, "little") for name in sorted(found))).intdigest()


def checksum(weights: Mapping[str, np.ndarray]) -> int:
    """Return one checksum of all tensors: names, dtypes, shapes and bytes."""
    return combined(digests(weights))


def damaged(found: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Return the names of tensors that are missing, unexpected, or different, in order."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def listed(names: list[str], max_names: int = 8) -> str:
    """List the first names, for a message."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
