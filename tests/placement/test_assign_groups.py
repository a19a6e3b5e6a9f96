from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.scaling.resize_policy import assign_groups, slots_to_yield

LENGTHS = st.lists(st.floats(1, 500), min_size=1, max_size=40).map(np.array)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    lengths = draw(LENGTHS)
    groups = draw(st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths)))
    return lengths, np.array(groups)


def dealt_by_hand(lengths: np.ndarray, groups: np.ndarray, actors: int) -> list[float]:
    """Loads when the heaviest group goes to the lightest actor, one after the other."""
    sums = sorted((float(lengths[groups == g].sum()) for g in set(groups.tolist())), reverse=True)
    loads = [0.0] * actors
    for load in sums:
        loads[loads.index(min(loads))] += load
    return sorted(loads)


@given(grouped(), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_deal_is_a_partition_into_whole_groups_longest_first(case: tuple[np.ndarray, np.ndarray], actors: int) -> None:
    lengths, groups = case
    parts = assign_groups(lengths, groups, actors)
    assert len(parts) == actors
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths)))
    assert all(part.dtype.kind == "i" for part in parts), "they are used as indices"
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set(groups.tolist()))
    loads = sorted(lengths[part].sum() for part in parts)
    np.testing.assert_allclose(loads, dealt_by_hand(lengths, groups, actors), rtol=1e-9)


def test_deal_of_nothing() -> None:
    assert [len(part) for part in assign_groups(np.empty(0), np.empty(0, int), 3)] == [0, 0, 0]


@given(st.integers(0, 20), st.integers(1, 3), st.booleans())
def test_slots_to_yield(held: int, least: int, waiting: bool) -> None:
    found = slots_to_yield(held, least, waiting)
    kept = found.actors
    if not waiting or held == 0:
        assert (found.action, kept) == ("Hold", held)
        return
    assert found.action == "Release" and 0 <= kept < held, "somebody waits: something is given up"
    assert kept == 0 or kept >= least, "what is kept is enough to work with"
    assert kept <= max(least, (held + 1) // 2)


def test_only_slots_that_waiting_runs_can_use_are_yielded() -> None:
    assert slots_to_yield(4, 1, True, surplus=3, usable=2).actors == 2
    assert slots_to_yield(4, 1, True, surplus=1, usable=4).actors == 3
    assert slots_to_yield(4, 1, True, surplus=3, usable=0).action == "Hold"
