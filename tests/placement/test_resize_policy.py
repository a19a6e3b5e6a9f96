from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.planning.frontier import frontier
from placement.planning.objective import Objective, choose, choose_nearest
from placement.planning.plan import Plan
from placement.scaling.resize_policy import (
    Decision,
    Grow,
    Hold,
    ResizeHistory,
    Shrink,
    Transition,
    best_held_plan,
    decide,
    started_later,
    time_value,
    with_starts,
)
from placement.speed.decode_speed import Speed


def plan(actors: int, time_s: float, cost: float) -> Plan:
    return Plan(time_s, cost, tuple(np.array([i]) for i in range(actors)), (0,) * actors)


def go(current: int, chosen: Plan, stay: Plan | None, **more) -> Decision:
    named = {"transition": Transition(10.0, restart_s=1.0), "history": ResizeHistory(), "step": 1, "value_per_s": 1.0, **more}
    return decide(current, chosen, stay, **named)


@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0, 20), st.integers(1, 8), st.integers(1, 8), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_a_plan_with_its_starts_is_better_exactly_where_the_change_pays_back(
    before_s: float, after_s: float, start_s: float, current: int, more: int, lasts: int
) -> None:
    stay, larger = plan(current, before_s, current * before_s), plan(current + more, after_s, (current + more) * after_s)
    move, value_per_s = Transition(start_s, restart_s=0.1, warm=current + 1), 3.0
    history = ResizeHistory(current + more, 1, float(lasts))
    found = go(current, larger, stay, transition=move, history=history, step=1, value_per_s=value_per_s, min_saving=0.0)
    with_start = with_starts(larger, current, move, history.horizon(1))
    gain = stay.cost + value_per_s * stay.time_s - with_start.cost - value_per_s * with_start.time_s
    if abs(gain) > 1e-9:
        assert (found.actors == larger.actors) == (gain > 0)
    assert with_starts(stay, current, move, 1.0) is stay


@given(st.floats(0.1, 50), st.floats(0.0, 1.0), st.floats(0, 100), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_engines_that_start_later_save_less_and_no_plan_takes_longer_than_without_them(
    now_s: float, share: float, start_s: float, working: int, more: int
) -> None:
    now, larger = plan(working, now_s, working * now_s), plan(working + more, share * now_s, (working + more) * share * now_s)
    later = started_later(larger, now, Transition(start_s))
    assert larger.time_s - 1e-9 <= later.time_s <= now.time_s + 1e-9
    assert later.time_s == pytest.approx(min(start_s, now_s) + max(0.0, 1 - start_s / now_s) * larger.time_s)
    assert later.cost == pytest.approx(working * later.time_s + more * later.time_s), "all slots are held until it ends"
    assert started_later(larger, now, Transition(start_s, warm=working + more)).time_s == pytest.approx(larger.time_s)


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.floats(0.1, 50),
    st.floats(0.1, 50),
    st.floats(0.1, 50),
    st.floats(0.1, 50),
    st.floats(0, 5),
    st.floats(0, 60),
    st.integers(1, 100),
)
@settings(max_examples=300, deadline=None)
def test_a_change_is_made_exactly_where_it_pays_back(
    current: int, wanted: int, t0: float, c0: float, t1: float, c1: float, value_per_s: float, start: float, since: int
) -> None:
    """The rule by hand: one-time cost ≤ ½ · saving · horizon, and more than 2 % of a step's worth."""
    move = Transition(start, restart_s=0.3 * start, price=2.0)
    found = go(current, plan(wanted, t1, c1), plan(min(current, 3), t0, c0), transition=move, step=since, value_per_s=value_per_s)
    if wanted == current:
        assert isinstance(found, Hold) and found.time_s == t1
        return
    idle = current - min(current, 3)
    before, after = c0 + idle * 2.0 * 0.3 * start + value_per_s * t0, c1 + value_per_s * t1
    once = (wanted - current) * 2.0 * start + value_per_s * start if wanted > current else (current - wanted) * 2.0 * 0.3 * start
    pays = before - after > 0.02 * before and once <= 0.5 * (before - after) * since
    assert found.actors == (wanted if pays else current)
    assert found.action == ("Hold" if not pays else "Grow" if wanted > current else "Shrink")
    assert (found.time_s, found.cost) == ((t1, c1) if pays else (t0, c0)), "what is predicted is what will be done"
    assert found.plan is not None and found.reason


def test_actors_that_no_plan_uses_are_given_up_once_the_target_has_lasted() -> None:
    """Plans bill only actors that work, so a plan for one costs the same with eight held. Each idle one still starts in every step."""
    one = plan(1, 5.0, 5.0)
    move = Transition(0.5, restart_s=0.5)
    first = go(8, one, one, transition=move)
    assert isinstance(first, Hold) and "and 7 idle" in first.reason
    later = go(8, one, one, transition=move, step=2)
    assert isinstance(later, Shrink) and later.actors == 1 and "saves the worth of 3.5 slot-s a step for 3.5 once" in later.reason
    assert isinstance(go(8, one, one, transition=move, step=2, least=8), Hold), "the recipe wants eight"
    assert isinstance(go(8, one, one, transition=Transition(0.01, restart_s=0.01), step=50), Hold), "less than 2 % of the step"


def test_urgent_changes_do_not_ask_what_they_cost() -> None:
    dear = Transition(1e9)
    assert isinstance(go(0, plan(4, 1, 4), None, transition=dear), Grow)
    assert "none is held yet" in go(0, plan(4, 1, 4), None, transition=dear).reason
    assert isinstance(go(8, plan(4, 1, 4), plan(8, 1, 4.1), transition=dear, urgent="four slots are lost"), Shrink)
    assert "no plan works with the 2 that are held" in go(2, plan(4, 1, 4), None, transition=dear).reason


def test_small_differences_change_nothing_in_either_direction() -> None:
    free = Transition(0.0)
    for current, wanted in ((4, 5), (5, 4)):
        assert isinstance(go(current, plan(wanted, 0.99, 4.0), plan(current, 1.0, 4.0), transition=free), Hold)


def test_forecasts_that_go_to_and_fro_do_not_make_the_pool_do_so() -> None:
    """Two workloads alternate; each change costs more than one step of it saves. The pool settles instead of flapping."""
    history, current, changes = ResizeHistory(), 2, 0
    a, b = {2: plan(2, 5.0, 10.0), 4: plan(4, 5.6, 12.0)}, {2: plan(2, 8.0, 13.0), 4: plan(4, 6.0, 12.0)}
    for step in range(1, 41):
        here = (a, b)[step % 2]
        chosen = min(here.values(), key=lambda p: p.cost + p.time_s)
        history = history.record(step, chosen.actors)
        found = decide(
            current, chosen, here[current], transition=Transition(3.0, restart_s=3.0), history=history, step=step, value_per_s=1.0
        )
        if found.actors != current:
            current, changes = found.actors, changes + 1
    assert changes == 0


def test_a_wish_that_lasts_is_followed() -> None:
    """The workload grows for good; a growth that takes more than one step to pay back is made once it has lasted so long."""
    history, made = ResizeHistory(), []
    for step in range(1, 12):
        chosen = plan(4 if step >= 4 else 2, 6.0, 12.0)
        history = history.record(step, chosen.actors)
        found = decide(2, chosen, plan(2, 8.0, 13.0), transition=Transition(3.0), history=history, step=step, value_per_s=1.0)
        made.append(found.action)
    # 6 + 3 once against 3 a step: six steps of horizon; the wish began at step 4, three steps after the first
    assert made == ["Hold"] * 9 + ["Grow"] * 2


def test_the_horizon_is_how_long_wishes_last() -> None:
    history = ResizeHistory().record(1, 4)
    assert history.horizon(1) == 1 and history.horizon(8) == 7
    assert history.record(5, 5) == history, "25 % more is the same wish"
    history = history.record(11, 8).record(15, 2)  # they lasted 10 and 4 steps
    assert history.horizon(16) == pytest.approx(7) and history.horizon(40) == 25


def test_a_change_at_the_end_of_a_run_must_pay_back_before_it() -> None:
    many = ResizeHistory(4, 0, 100.0)
    assert isinstance(go(2, plan(4, 5, 10), plan(2, 10, 10), history=many, step=50), Grow)
    assert isinstance(go(2, plan(4, 5, 10), plan(2, 10, 10), history=many, step=50, steps_left=3), Hold)


@given(st.integers(0, 1000), st.floats(0, 1), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_the_worth_of_a_second_agrees_with_the_choice(seed: int, prefer: float, current: int) -> None:
    """The chosen plan is the cheapest at that worth, so staying never looks better than it; free changes go where the choice
    is."""
    lengths = np.random.default_rng(seed).lognormal(5, 0.6, 40)
    plans = frontier(lengths, Speed(0.0085, 3e-5), max_actors=6)
    objective = Objective(prefer=prefer)
    chosen, value_per_s = choose(plans, objective).plan, time_value(objective, plans)
    stay = best_held_plan(plans, current, objective)
    assert stay is None or stay.actors <= current
    if stay is not None and prefer < 0.99:
        assert chosen.cost + value_per_s * chosen.time_s <= stay.cost + value_per_s * stay.time_s + 1e-9
    found = decide(
        current, chosen, stay, transition=Transition(0.0), history=ResizeHistory(), step=1, value_per_s=value_per_s, min_saving=0.0
    )
    if stay is not None and prefer < 0.99 and chosen.actors < current:
        assert found.actors in (chosen.actors, current)
    assert found.plan is not None and found.plan.actors <= max(found.actors, chosen.actors)


def test_a_budget_that_every_plan_meets_is_spent_on_speed() -> None:
    plans, objective = [plan(1, 56.1, 56.1), plan(4, 17.0, 60.0), plan(8, 10.9, 67.9)], Objective(budget=80.0)
    chosen, stay = choose(plans, objective).plan, best_held_plan(plans, 1, objective)
    assert isinstance(go(1, chosen, stay, value_per_s=time_value(objective, plans)), Grow)
    assert time_value(Objective(budget=50.0), plans) == 0.0  # no plan meets it, so the cheapest is the nearest


def test_staying_keeps_to_the_deadline_and_the_budget_where_it_can() -> None:
    plans = [plan(4, 1.0, 9.0), plan(3, 2.0, 6.0), plan(2, 3.0, 5.0), plan(1, 5.0, 4.0)]
    assert best_held_plan(plans, 3, Objective(deadline_s=3.5)).actors == 2
    assert best_held_plan(plans, 2, Objective(deadline_s=2.5)) is None, "three actors meet it, two do not"
    assert best_held_plan(plans, 2, Objective(deadline_s=0.5)).actors == 2, "none meets it, and this is the nearest"
    assert best_held_plan(plans, 2, Objective(budget=3.0)).actors == 1
    assert best_held_plan(plans, 4, Objective(budget=5.5)).actors == 2
    assert best_held_plan(plans[:1], 3, Objective(knee=True)) is None
    assert time_value(Objective(deadline_s=2.0), plans) == 0
    assert time_value(Objective(deadline_s=0.5), plans) == time_value(Objective(prefer=1.0), plans)
    assert time_value(Objective(knee=True), plans) == pytest.approx(5 / 4)
    assert time_value(Objective(prefer=0.5), plans) == pytest.approx(4.0)


@pytest.mark.parametrize("deadline_s", [2.5, 0.5])
def test_a_missed_deadline_brings_more_actors_although_they_cost_more(deadline_s: float) -> None:
    """2.5 s can be met by three actors. 0.5 s cannot be met, and four come nearest."""
    plans, goal = [plan(4, 1.0, 9.0), plan(3, 2.0, 6.0), plan(2, 3.0, 5.0), plan(1, 9.0, 4.0)], Objective(deadline_s=deadline_s)
    chosen, stay = choose_nearest(plans, goal).plan, best_held_plan(plans, 1, goal)
    worth = time_value(goal, plans)
    found = decide(1, chosen, stay, transition=Transition(0.1), history=ResizeHistory(), step=1, value_per_s=worth)
    assert found.action == "Grow" and found.actors == chosen.actors


def test_infinite_preference_stays_finite() -> None:
    assert math.isfinite(time_value(Objective(prefer=1.0), [plan(1, 5.0, 4.0)]))
