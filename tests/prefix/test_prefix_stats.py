"""Tokens and pages per engine, against an engine's prefix cache played through token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.prefix.prefix_stats import prefix_demand

prompt = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


@given(prompts=st.lists(prompt, min_size=1, max_size=6), block=st.integers(1, 4), data=st.data())
def test_the_demand_equals_a_simulation_of_the_prefix_cache(prompts: list[tuple[int, ...]], block: int, data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=8), min_size=1, max_size=3))
    found = prefix_demand(prompts, [*map(np.array, shares), np.array([], int)], block)
    assert len(found.off_tokens) == len(shares)
    for engine, share in enumerate(shares):
        cached: set[tuple[int, ...]] = set()
        computed = loaded = 0
        for tokens in (prompts[i] for i in share):
            at = 0
            while at + block < len(tokens) and tokens[: at + block] in cached:
                at += block
            computed += len(tokens) - at
            loaded += -(-(len(tokens) - 1 - at) // block)
            cached |= {tokens[:end] for end in range(block, len(tokens), block)}
        assert found.off_tokens[engine] == computed
        assert found.load_pages[engine] == loaded and found.on_tokens[engine] == len(share)
    distinct = {p[: min(end, len(p) - 1)] for p in prompts for end in range(block, len(p) + block - 1, block)}
    assert found.distinct_pages == len(distinct)
    assert found.distinct_tokens == sum((len(p) - 1) % block + 1 for p in distinct)
    common = min(len(p) - 1 for p in prompts)
    while common % block or len({p[:common] for p in prompts}) > 1:
        common -= 1
    assert found.trunk_tokens == common


def test_without_requests_there_is_no_demand() -> None:
    with pytest.raises(ValueError, match="no engine"):
        prefix_demand([(1, 2)], [np.array([], int)], 4)
