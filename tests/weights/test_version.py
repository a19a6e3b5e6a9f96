from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.weights.checksum import checksum


def some_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "layers.0.weight": rng.normal(size=(5, 7)).astype(np.float32),
        "layers.0.bias": rng.normal(size=7).astype(np.float32),
        "scale": np.array(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


@given(st.integers(0, 5 * 7 * 4 - 1), st.integers(0, 7))
@settings(deadline=None)
def test_changes_with_any_bit(byte: int, bit: int) -> None:
    weights = some_weights()
    before = checksum(weights)
    weights["layers.0.weight"].reshape(-1).view(np.uint8)[byte] ^= 1 << bit
    assert checksum(weights) != before


def test_changes_with_name_dtype_shape_and_number() -> None:
    weights = some_weights()
    bias = weights["layers.0.bias"]
    others = [
        {**weights, "layers.0.bias": bias.view(np.int32)},
        {**weights, "layers.0.bias": bias.reshape(7, 1)},
        {**weights, "layers.0.weight": weights["layers.0.weight"].reshape(7, 5)},
        {**weights, "empty": np.zeros((4, 0), np.float32)},
        {("layers.1.bias" if k == "layers.0.bias" else k): v for k, v in weights.items()},
        {k: v for k, v in weights.items() if k != "empty"},
        {**weights, "layers.0.bias": weights["scale"], "scale": bias},
    ]
    sums = [checksum(w) for w in [weights, *others]]
    assert len(set(sums)) == len(sums)


def test_does_not_depend_on_order_or_memory_layout() -> None:
    weights = some_weights()
    before = checksum(weights)
    assert checksum(dict(reversed(weights.items()))) == before
    assert checksum({**weights, "layers.0.weight": np.asfortranarray(weights["layers.0.weight"])}) == before
    frozen = {k: v.copy() for k, v in weights.items()}
    for array in frozen.values():
        array.setflags(write=False)
    assert checksum(frozen) == before
    assert checksum({}) == checksum({})
