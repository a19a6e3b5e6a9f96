from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.scaling.engine_assignment import assign_engines

TIMES = st.floats(0, 100, allow_nan=False)


@given(st.lists(TIMES, max_size=5), st.lists(TIMES, min_size=5, max_size=6))
@settings(deadline=None, max_examples=150)
def test_no_other_seats_are_done_sooner(work: list[float], around: list[float]) -> None:
    found = assign_engines(np.array(work), np.array(around))
    assert len(set(found)) == len(work)
    best = min(
        max((w + around[e] for w, e in zip(work, engines, strict=True)), default=0.0)
        for engines in itertools.permutations(range(len(around)), len(work))
    )
    assert max((w + around[e] for w, e in zip(work, found, strict=True)), default=0.0) == pytest.approx(best)


def test_engines_that_are_alike_keep_the_order_of_the_groups() -> None:
    assert assign_engines(np.array([1.0, 3.0, 2.0]), np.array([0.5, 0.5, 0.5, 0.5])) == [0, 1, 2]
    assert assign_engines(np.array([1.0, 3.0, 2.0]), np.array([9.0, 0.5, 0.5, 0.5])) == [1, 2, 3]
    assert assign_engines(np.array([1.0, 3.0]), np.array([0.5, 0.1])) == [0, 1]
    assert assign_engines(np.array([3.0, 1.0]), np.array([0.5, 0.1])) == [1, 0]


def test_too_few_engines_and_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups need as many engines"):
        assign_engines(np.ones(2), np.ones(1))
    with pytest.raises(ValueError, match="finite times"):
        assign_engines(np.array([np.nan]), np.ones(1))
