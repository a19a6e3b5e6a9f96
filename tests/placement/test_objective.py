from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import NotFeasible, Objective, Plan, Speed, choose, choose_nearest, frontier

POINTS = [Plan(1.0, 9.0, ()), Plan(1.2, 5.0, ()), Plan(2.0, 3.0, ()), Plan(6.0, 2.0, ())]


@pytest.mark.parametrize(
    ("objective", "index"),
    [
        ({"prefer": 0}, 3),
        ({"prefer": 1}, 0),
        ({"prefer": 0.5}, 2),
        ({"deadline_s": 2.5}, 2),
        ({"deadline_s": 1.0}, 0),
        ({"budget": 5.0}, 1),
        ({"budget": 2.0}, 3),
        ("knee", 2),
        (0.0, 3),
        ({"knee": True}, 2),
    ],
)
def test_the_choice_is_the_one_worked_out_by_hand(objective: object, index: int) -> None:
    choice = choose(POINTS, Objective.parse(objective))
    assert (choice.index, choice.plan, choice.met) == (index, POINTS[index], True)
    assert f"{choice.plan.time_s:g} s" in choice.reason and f"{choice.plan.cost:g}" in choice.reason


@pytest.mark.parametrize(("objective", "nearest"), [({"deadline_s": 0.5}, 0), ({"budget": 1.5}, 3)])
def test_what_cannot_be_met_names_and_offers_the_nearest(objective: dict, nearest: int) -> None:
    with pytest.raises(NotFeasible, match="nearest") as raised:
        choose(POINTS, Objective.parse(objective))
    assert isinstance(raised.value, ValueError)
    assert raised.value.nearest.plan is POINTS[nearest]
    figure = POINTS[0].time_s if "deadline_s" in objective else POINTS[3].cost
    assert f"{figure:.4g}" in str(raised.value) and "\n" not in str(raised.value)
    offered = choose_nearest(POINTS, Objective.parse(objective))
    assert offered.plan is POINTS[nearest] and not offered.met and offered.reason == str(raised.value)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=40), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_preferring_speed_more_never_takes_a_slower_plan(lengths: list[int], less: float, more: float) -> None:
    plans = frontier(np.array(lengths, float), Speed(0.01, 0.002), max_actors=6)
    slow, fast = (choose(plans, Objective(prefer=p)).plan.time_s for p in sorted((less, more)))
    assert fast <= slow
    # whatever plan is chosen meets the deadline and the budget made from it
    for plan in plans:
        assert choose(plans, Objective(deadline_s=plan.time_s)).plan == plan
        assert choose(plans, Objective(budget=plan.cost)).plan == plan


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "one of"),
        ({"prefer": 0.5, "budget": 3}, "prefer, budget"),
        ({"prefer": 2}, "between 0"),
        ({"deadline_s": -1}, "above 0"),
        ({"budget": float("nan")}, "finite"),
        ({"speed": 1}, "not speed"),
        ("fast", "knee"),
        (True, "knee"),
    ],
)
def test_objectives_that_say_nothing_or_too_much(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Objective.parse(value)


def test_no_plans_no_choice() -> None:
    with pytest.raises(ValueError, match="no plans"):
        choose_nearest([], Objective(prefer=0.5))


def test_a_reason_says_what_another_engine_would_change() -> None:
    points = [Plan(t, c, (np.arange(1),) * n) for t, c, n in ((3.6, 9.0, 3), (3.8, 7.1, 2), (6.0, 5.2, 1))]
    reasons = [choose_nearest(points, Objective(budget=budget), "core-s").reason for budget in (8.0, 6.0)]
    assert reasons[0] == "the fastest for at most 8 core-s: 2 engines, 3.8 s, 7.1 core-s; a third would save 0.2 s for 1.9 core-s"
    assert reasons[1].endswith("1 engine, 6 s, 5.2 core-s; a second would save 2.2 s for 1.9 core-s")
    assert choose_nearest(points, Objective(prefer=1)).reason == "3 engines, 3.6 s, 9 slot-s; 2 would save 1.9 slot-s but take 0.2 s longer"
    many = [Plan(9.0, 9.0, (np.arange(1),)), Plan(2.0, 20.0, (np.arange(1),) * 4)]
    assert choose_nearest(many, Objective(prefer=0)).reason.endswith("; 3 more would save 7 s for 11 slot-s")
    assert choose_nearest(many[:1], Objective(prefer=0)).reason == "1 engine, 9 s, 9 slot-s"
