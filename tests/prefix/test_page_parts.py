"""Pages divided among the members of an engine: what numpy gives for the heads of each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.prefix.page_parts import LayerPart, PageParts


@given(
    width=st.integers(1, 4),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=3),
    count=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_parts_are_the_heads_of_each_member(width: int, shapes: list[tuple[int, int, int]], count: int, seed: int) -> None:
    """`shapes`: (before the heads, heads of a member, after the heads) of each layer's block, in float32."""
    random = np.random.default_rng(seed)
    layers = [random.random((count, before, width * heads, after), np.float32) for before, heads, after in shapes]
    whole = np.concatenate([layer.reshape(count, -1).view(np.uint8) for layer in layers], axis=1)
    by_member = [[np.ascontiguousarray(part) for part in np.split(layer, width, axis=2)] for layer in layers]
    parts = PageParts(tuple(LayerPart(before, 4 * heads * after) for before, heads, after in shapes), width)
    members = [
        np.concatenate([of_layer[rank].reshape(count, -1).view(np.uint8) for of_layer in by_member], axis=1) for rank in range(width)
    ]
    assert parts.page_bytes == whole.shape[1]
    np.testing.assert_array_equal(parts.join(members), whole)
    for page, number, rank in np.ndindex(count, len(layers), width):
        wanted = by_member[number][rank][page].reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(parts.of_layer(whole[page], number, rank), wanted)
