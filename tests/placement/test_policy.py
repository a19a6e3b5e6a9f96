from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.policy import after_drain, deal, rollout_size, slots_to_yield
from placement.speed import Speed

LENGTHS = st.lists(st.floats(1, 500), min_size=1, max_size=40).map(np.array)
SPEED = st.builds(Speed, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2))


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
    parts = deal(lengths, groups, actors)
    assert len(parts) == actors
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths)))
    assert all(part.dtype.kind == "i" for part in parts), "they are used as indices"
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set(groups.tolist()))
    loads = sorted(lengths[part].sum() for part in parts)
    np.testing.assert_allclose(loads, dealt_by_hand(lengths, groups, actors), rtol=1e-9)


def test_deal_of_nothing() -> None:
    assert [len(part) for part in deal(np.empty(0), np.empty(0, int), 3)] == [0, 0, 0]


def by_brute_force(
    lengths: np.ndarray, speed: Speed, low: int, high: int, prefer: float
) -> list[tuple[float, float, float]]:
    """(score, time, cost) for every allowed number of actors."""
    rows = []
    for actors in range(low, max(low, min(high, len(lengths))) + 1):
        parts = deal(lengths, np.arange(len(lengths)), actors)
        each = [speed.base_s * max(lengths[p]) + speed.per_seq_s * sum(lengths[p]) for p in parts if len(p)]
        rows.append((max(each), sum(each)))
    fastest, cheapest = min(t for t, _ in rows), min(c for _, c in rows)
    return [(prefer * t / fastest + (1 - prefer) * c / cheapest, t, c) for t, c in rows]


@given(LENGTHS, SPEED, st.integers(1, 4), st.integers(0, 8), st.floats(0, 1), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_rollout_size_against_every_size(
    lengths: np.ndarray, speed: Speed, low: int, more: int, prefer: float, current: int
) -> None:
    high = low + more
    found = rollout_size(lengths, speed, current=current, min_actors=low, max_actors=high, prefer=prefer)
    rows = by_brute_force(lengths, speed, low, high, prefer)
    assert low <= found.actors <= high
    assert found.actors <= max(low, len(lengths)), "never an actor without a sequence unless asked for"
    score, time_s, cost = rows[found.actors - low]
    assert score <= min(row[0] for row in rows) + 1e-9
    assert (found.time_s, found.cost_slot_s) == (pytest.approx(time_s), pytest.approx(cost))
    assert found.action == ("Hold" if found.actors == current else "Grow" if found.actors > current else "Shrink")


@given(LENGTHS, SPEED, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_the_two_ends_of_the_preference(lengths: np.ndarray, speed: Speed, high: int) -> None:
    rows = by_brute_force(lengths, speed, 1, high, 0.5)
    fast = rollout_size(lengths, speed, current=1, min_actors=1, max_actors=high, prefer=1.0)
    cheap = rollout_size(lengths, speed, current=1, min_actors=1, max_actors=high, prefer=0.0)
    assert fast.time_s == pytest.approx(min(t for _, t, _ in rows))
    assert cheap.cost_slot_s == pytest.approx(min(c for _, _, c in rows))
    assert cheap.actors == 1, "one actor reads every token once and waits for one longest response: nothing is cheaper"


def test_equal_scores_take_fewer() -> None:
    """Without a base, time and cost of the longest response alone do not change beyond two actors."""
    found = rollout_size(np.array([100.0, 1.0, 1.0]), Speed(0.0, 1.0), current=3, min_actors=1, max_actors=3, prefer=1.0)
    assert (found.actors, found.action) == (2, "Shrink")
    assert "2 of 3" in found.reason and "prefer 1" in found.reason


def test_bounds_are_checked() -> None:
    for low, high in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="min_actors"):
            rollout_size(np.ones(4), Speed(1, 1), current=1, min_actors=low, max_actors=high, prefer=0.5)


def test_no_sequences_is_the_least() -> None:
    assert rollout_size(np.empty(0), Speed(1, 1), current=2, min_actors=1, max_actors=4, prefer=0.5).actors == 1


@given(st.floats(0, 100), st.floats(0, 100), st.booleans())
def test_after_drain(remaining: float, retake: float, needed: bool) -> None:
    """Keep the lease exactly where that costs no more than taking it again."""
    found = after_drain(remaining, retake, needed)
    assert found.action == ("Hold" if needed and remaining <= retake else "Release")
    assert found.reason


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
