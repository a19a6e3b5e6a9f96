"""Anatomy of a step from ledger rows, against a step laid out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.ledger_anatomy import anatomy, complement, gaps, length, union, warm_starts, without
from rlhfless_ray.functions.ledger import Row


def row(kind: str, activity: str, begin: float, end: float, slots: int = 1, instance: str = "", step: int = 1) -> Row:
    holder = instance or f"{kind}-1"
    return Row("lease", "node", "0", "cpu", kind, holder, activity, step, begin, end, end - begin, slots, 0.0, 0.0)


STEP = [
    row("score", "parked", 0.0, 10.0, slots=0),
    row("rollout", "idle", 0.0, 0.5),
    row("rollout", "transfer", 0.5, 1.0),
    row("rollout", "work", 1.0, 4.0),
    row("rollout", "idle", 4.0, 4.25),
    row("rollout", "work", 1.5, 3.0, instance="rollout-2"),  # beside the first: counts once in wall time
    row("score", "idle", 4.25, 4.5),
    row("score", "work", 4.5, 5.0),
    row("learn", "idle", 5.0, 5.25),
    row("learn", "work", 5.25, 9.0),
    row("learn", "work", 5.25, 9.0, instance="learn-2"),
    row("learn", "transfer", 9.25, 9.5),
    row("learn", "idle", 9.0, 9.25),
]


def test_a_step_taken_apart() -> None:
    found = anatomy(STEP)[1]
    assert found.wall_s == 10.0
    assert found.parts == {"generate": 3.0, "score": 0.5, "learn": 3.75, "publish": 0.25, "load": 0.5, "start": 0.0}
    # 0–0.5 and 4–4.25 with rollout, 4.25–4.5 with score, 5–5.25 and 9–9.25 with learn, 9.5–10 with nobody
    assert found.overhead_by_holder == pytest.approx({"rollout": 0.75, "score": 0.25, "learn": 0.5, "nobody": 0.5})
    assert found.overhead_s == pytest.approx(2.0)
    assert found.overhead_share == pytest.approx(0.2)
    assert found.idle_slot_s == pytest.approx(1.5)


def test_parts_and_overhead_make_up_the_step_when_nothing_runs_side_by_side() -> None:
    found = anatomy(STEP)[1]
    assert sum(found.parts.values()) + found.overhead_s == pytest.approx(found.wall_s)


def test_gaps_are_named_by_what_lies_on_either_side() -> None:
    found = gaps(STEP, [1])
    assert found == {
        "step begins → load": [0.5],
        "generate → score": [0.5],
        "score → learn": [0.25],
        "learn → publish": [0.25],
        "publish → next step": [0.5],
    }
    assert sum(map(sum, found.values())) == pytest.approx(anatomy(STEP)[1].overhead_s)


def test_steps_are_kept_apart() -> None:
    found = anatomy([*STEP, row("learn", "work", 10.0, 11.0, step=2)])
    assert list(found) == [1, 2]
    assert found[2].overhead_s == 0.0 and found[2].wall_s == 1.0


def test_warm_start_is_the_idle_time_just_before_the_first_span() -> None:
    held_over = [row("learn", "idle", 0.0, 0.1), *STEP]  # leases kept from the step before do not count
    found = warm_starts(held_over, 1)
    assert found["learn"][0] == pytest.approx(0.25)
    assert found["score"] == pytest.approx([0.25])
    assert found["rollout"] == pytest.approx([0.5, 0.0])
    assert warm_starts(STEP, first_step=2) == {}


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8)


def covered(found: list[tuple[float, float]], point: float) -> bool:
    return any(begin <= point < end for begin, end in found)


@given(intervals, intervals)
def test_interval_arithmetic_point_by_point(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    a, b = union(first), union(second)
    rest, outside = without(a, b), complement(a, (0.0, 40.0))
    for half in range(80):
        point = half / 2
        assert covered(a, point) == covered(first, point)
        assert covered(rest, point) == (covered(a, point) and not covered(b, point))
        assert covered(outside, point) == (not covered(a, point))
    assert length(a) + length(outside) == pytest.approx(40.0)
