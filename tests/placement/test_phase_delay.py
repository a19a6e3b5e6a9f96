"""When a phase waits for slots of another run: against every wait, tried one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.scaling.phase_delay import MAX_DELAY_S, Delay, delay
from placement.scaling.resize_policy import MAX_COST_SHARE

STEP_S = 0.25


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, float]], int, list[tuple[float, int]], float]:
    """A phase that takes less on more slots, the slots there are, and those that come at multiples of STEP_S."""
    counts = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=5)))
    seconds = sorted(draw(st.lists(st.floats(0.1, 40.0), min_size=len(counts), max_size=len(counts), unique=True)), reverse=True)
    have = draw(st.integers(counts[0], 8))
    due = draw(st.lists(st.tuples(st.integers(0, 40).map(lambda k: k * STEP_S), st.integers(1, 3)), max_size=4))
    return list(zip(counts, seconds, strict=True)), have, due, draw(st.floats(0.0, 20.0))


def begun_after(wait_s: float, points: list[tuple[int, float]], have: int, due: list[tuple[float, int]]) -> tuple[int, float]:
    """The slots and the seconds of the phase if it begins after a wait."""
    there = have + sum(slots for in_s, slots in due if in_s <= wait_s)
    return max(point for point in points if point[0] <= there)


@given(cases())
def test_it_waits_as_the_best_of_all_waits(case) -> None:
    points, have, due, value = case
    own, own_s = begun_after(-1.0, points, have, due)
    costs = []
    for k in range(41):
        wait_s = k * STEP_S
        count, seconds = begun_after(wait_s, points, have, due)
        if k == 0 or wait_s <= min(MAX_DELAY_S, MAX_COST_SHARE * (own_s - seconds)):
            costs.append((own * wait_s + count * seconds + value * (wait_s + seconds), wait_s, count))
    at_once = own * own_s + value * own_s
    found = delay(points, have, due, value)
    if found.slots == own:
        assert found.seconds == 0 and at_once <= min(costs)[0] * (1 + 1e-9)
    else:
        wait_s = min(in_s for in_s, _ in due if begun_after(in_s, points, have, due)[0] >= found.slots)
        count, seconds = begun_after(wait_s, points, have, due)
        assert own * wait_s + count * seconds + value * (wait_s + seconds) == pytest.approx(min(costs)[0])


@given(cases())
def test_it_ends_earlier_and_loses_at_most_half_of_the_saving_if_the_slots_do_not_come(case) -> None:
    points, have, due, value = case
    own, own_s = begun_after(-1.0, points, have, due)
    found = delay(points, have, due, value)
    saved_s = own_s - dict(points)[found.slots]
    assert 0 <= found.seconds <= min(MAX_DELAY_S, MAX_COST_SHARE * saved_s) and found.slots >= own
    if found.seconds:
        expected_s = min(in_s for in_s, _ in due if begun_after(in_s, points, have, due)[0] >= found.slots)
        assert expected_s <= found.seconds and expected_s + dict(points)[found.slots] < own_s


def test_what_it_says() -> None:
    spare = delay([(1, 8.0), (4, 3.0)], 3, [(0.5, 2)], 2.0)
    assert spare.reason.startswith("waits for 1 slot that another run gives back"), "two of the four are there and idle"
    points = [(1, 8.0), (2, 4.5), (4, 3.0)]
    assert delay(points, 1, [], 2.0) == Delay(0.0, 1, "")
    assert delay(points, 4, [(0.1, 2)], 2.0) == Delay(0.0, 4, ""), "more slots than it can use"
    assert delay(points, 2, [(0.5, 1)], 2.0) == Delay(0.0, 2, ""), "one slot more is of no use"
    assert delay(points, 1, [(0.5, 1), (0.6, 2)], 20.0).slots == 4
    assert delay(points, 1, [(0.5, 1), (0.6, 2)], 0.0).slots == 1, "time is worth nothing, and the wait holds a slot"
