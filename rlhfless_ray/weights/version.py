"""Publishing and fetching WeightVersions.

Weights are pulled, never pushed: a collective would fix its members and so fight elasticity. The arrays are a *return
value* of the learner's method, so the driver owns them and they outlive their producer.
"""

from __future__ import annotations

import numpy as np
import xxhash


def checksum(weights: dict[str, np.ndarray]) -> int:
    """xxh3 over names, shapes, dtypes and bytes, in name order."""
    digest = xxhash.xxh3_64()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.intdigest()
