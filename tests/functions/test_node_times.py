"""How long nodes of a pool were in use, and how many were lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.functions.node_times import NodeTimes, PoolTime

pytestmark = pytest.mark.pure


def test_node_counts_once_however_many_slots_of_it_are_leased() -> None:
    times = NodeTimes()
    times.begin("a", "spot", 0.0)
    times.begin("a", "spot", 2.0)
    times.end("a", 5.0, is_lost=False)
    assert times.take(6.0) == {"spot": PoolTime(6.0, 0)}
    times.end("a", 8.0, is_lost=True)
    assert times.take(20.0) == {"spot": PoolTime(2.0, 1)} and times.take(30.0) == {}


def test_lost_node_is_one_preemption_and_no_longer_in_use() -> None:
    times = NodeTimes()
    for _ in range(3):
        times.begin("a", "spot", 0.0)
    times.begin("b", "own", 1.0)
    times.end("a", 4.0, is_lost=True)
    times.end("a", 9.0, is_lost=True)
    assert times.take(10.0) == {"spot": PoolTime(4.0, 1), "own": PoolTime(9.0, 0)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0.1, 5.0)), max_size=30))
def test_seconds_add_up_to_those_of_nodes_with_leases(moves: list[tuple[str, bool, float]]) -> None:
    times, held, now, used, found = NodeTimes(), Counter[str](), 0.0, 0.0, 0.0
    for node, begins, seconds in moves:
        if begins:
            times.begin(node, "spot", now)
            held[node] += 1
        elif held[node]:
            times.end(node, now, is_lost=False)
            held[node] -= 1
        now += seconds
        used += seconds * sum(count > 0 for count in held.values())
        found += sum(time.node_s for time in times.take(now).values()) if begins else 0.0
    found += sum(time.node_s for time in times.take(now).values())
    assert found == pytest.approx(used)
