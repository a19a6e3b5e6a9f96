"""Calls run side by side where that pays: by their times first, and then by what steps of both kinds took."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from placement.call_schedule import Option, Problem
from placement.calls import REFERENCE, TRAIN_CRITIC, TRAIN_POLICY, VALUES, Features, part, step_graph
from placement.execution_plan import ExecutionPlan, plan_again
from placement.layouts import Layout
from placement.scaling.resize_policy import Hold
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.call_planner import CallToPlan
from rlhfless_ray.recipe import Recipe

GRAPH = step_graph(Features(values=True, reference=True))
GRAPH_OF_ONE = part(GRAPH, [TRAIN_POLICY])
TOKENS = 1000.0
PASSES = {REFERENCE: 0.3, VALUES: 0.3}
UPDATES = {TRAIN_CRITIC: 0.7, TRAIN_POLICY: 0.7}


def planner(**changes: Any) -> Autoscaler:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"max_slots_per_rank": 2}, **changes}
    return Autoscaler(Recipe.parse(tree), Speed(0.01, 1e-4))


CALLS = {name: CallToPlan(1, TOKENS) for name in PASSES | UPDATES}


def plan(autoscaler: Autoscaler, room: int, decision: int = 1) -> ExecutionPlan:
    return autoscaler.calls.plan(GRAPH, CALLS, Hold(decision, "as the test says"), room)


def is_beside(made: ExecutionPlan) -> bool:
    return made.has_beside(TRAIN_CRITIC, TRAIN_POLICY)


def took(autoscaler: Autoscaler, made: ExecutionPlan, slowdown: float) -> None:
    """Record a step whose calls take `slowdown` times as long while they run side by side."""
    factor = slowdown if is_beside(made) else 1.0
    seconds = {name: factor * alone_s for name, alone_s in (PASSES | UPDATES).items()}
    for slots in (1, 2):
        autoscaler.learner.observe(slots, TOKENS, seconds[TRAIN_POLICY])
    wall_s = seconds[VALUES] + seconds[TRAIN_POLICY] if is_beside(made) else sum(seconds.values())
    tokens = dict.fromkeys(seconds, TOKENS)
    autoscaler.calls.observe(made, tokens, {name: (made[name].layout.slots, value) for name, value in seconds.items()}, wall_s)


@pytest.mark.parametrize(("slowdown", "mostly"), [(1.0, True), (1.1, True), (2.0, False)])
def test_steps_of_both_kinds_decide_how_most_of_the_others_run(slowdown: float, mostly: bool) -> None:
    """At twice the time, as with more slots than cores, the same seconds cost twice the slot-seconds."""
    autoscaler, kinds = planner(), []
    for _ in range(30):
        made = plan(autoscaler, 4)
        kinds.append(is_beside(made))
        took(autoscaler, made, slowdown)
    assert kinds[:2] == [True, True], "the first step is not compared: its processes are cold"
    assert {True, False} == set(kinds[:6]), "each kind is tried"
    assert sum(kind == mostly for kind in kinds[6:]) >= 20 and kinds[6:].count(not mostly) >= 1


def test_the_reason_has_both_times() -> None:
    autoscaler = planner()
    for _ in range(8):
        took(autoscaler, plan(autoscaler, 4), 1.0)
    assert plan(autoscaler, 4).reason.startswith("calls run side by side (1 s side by side, 2 s in turn; saved at least ")
    assert plan(autoscaler, 1).reason.startswith("calls take turns on 1 slot (2 s side by side, 2 s in turn)")
    assert not is_beside(plan(autoscaler, 1))
    words = "values on 1, then critic update on 1 beside policy update on 1 (one after the other: 2 s)"
    assert plan(autoscaler, 4).reason.endswith(words)


def test_the_search_beside_the_update_is_what_the_next_phase_takes_unless_it_is_impossible() -> None:
    autoscaler = planner()
    for _ in range(8):
        took(autoscaler, plan(autoscaler, 4, decision=2), 1.0)
    autoscaler.calls.search(GRAPH, CALLS, Hold(2, ""), 4)
    slots = plan(autoscaler, 4, decision=2).layouts[TRAIN_POLICY].threads
    for count in (1, 2):  # two threads are much better from now on
        autoscaler.learner.terms[count] = type(autoscaler.learner.terms[count])(1.0)
        for _ in range(8):
            autoscaler.learner.observe(count, TOKENS, {1: 4.0, 2: 0.4}[count])
    assert plan(autoscaler, 4, decision=2).layouts[TRAIN_POLICY].threads == slots == 1, "nothing is searched before an update"
    began_s = time.monotonic()
    autoscaler.calls.search(GRAPH, CALLS, Hold(2, ""), 4)
    assert time.monotonic() - began_s < 5.0, "50 ms on an idle core"
    assert plan(autoscaler, 4, decision=2).layouts[TRAIN_POLICY].threads == 2
    assert plan(autoscaler, 4, decision=1).layouts[TRAIN_POLICY].threads == 1, "two are not possible: it is searched at once"


def test_ranks_are_priced_with_all_calls_of_the_phase() -> None:
    autoscaler = planner(learner={"ranks": "auto"})
    autoscaler.sizing.choose_ranks([1, 2])
    for _ in range(8):
        took(autoscaler, plan(autoscaler, 4), 1.0)
    for runs_beside in (False, True):
        autoscaler.calls.runs_beside = runs_beside
        on_ranks = {ranks: {name: replace(call, ranks=ranks) for name, call in CALLS.items()} for ranks in (1, 2)}
        autoscaler.calls.price_ranks(GRAPH, on_ranks, 4)
        found = autoscaler.predictor.learners.others
        assert found.keys() == {(1, 1), (2, 2)}, "two ranks are taken to need the slot-seconds of one"
        for ranks in (1, 2):
            seconds, slot_seconds = (0.3 if runs_beside else 1.3), 1.3
            assert found[ranks, ranks] == pytest.approx((seconds / ranks, slot_seconds), rel=0.05)


def test_a_plan_that_saves_next_to_nothing_changes_no_slots() -> None:
    problem = Problem(GRAPH_OF_ONE, {TRAIN_POLICY: [Option(Layout(threads=1), 1.0), Option(Layout(threads=2), 0.665)]}, 1, 2)
    for held in (1, 2):
        assert plan_again(problem, {TRAIN_POLICY: Layout(threads=held)}, 1.0).layouts[TRAIN_POLICY].threads == held
    assert plan_again(problem, {}, 1.0).layouts[TRAIN_POLICY].threads == 2
    assert plan_again(problem, {TRAIN_POLICY: Layout(threads=1)}, 2.0).layouts[TRAIN_POLICY].threads == 2
    assert plan_again(problem, {TRAIN_POLICY: Layout(2)}, 1.0).layouts[TRAIN_POLICY].threads == 2, "a layout that is not possible"


def test_updates_that_do_not_fit_the_memory_at_once_take_turns_and_passes_do_not() -> None:
    autoscaler = planner()
    autoscaler.calls.obstacle = "both would take about 9.0 GB"
    made = plan(autoscaler, 4)
    assert not is_beside(made) and made.has_beside(REFERENCE, VALUES)
    assert made.reason.endswith("updates take turns: both would take about 9.0 GB")


def test_a_planner_that_fails_lets_calls_take_turns() -> None:
    autoscaler = planner()
    autoscaler.calls.predictor.learners = None  # type: ignore[assignment]
    made = plan(autoscaler, 4)
    assert made.reason == "calls take turns" and made.layouts.keys() == CALLS.keys() and autoscaler.troubles
    assert made.graph[TRAIN_POLICY].needs[-1] == TRAIN_CRITIC


def test_a_number_of_slots_that_is_being_tried_is_kept_and_fewer_may_be_taken_of_a_known_one() -> None:
    autoscaler = planner()
    assert plan(autoscaler, 4, decision=2).layouts[TRAIN_POLICY].threads == 2, "not measured yet"
    for _ in range(8):
        took(autoscaler, plan(autoscaler, 2, decision=2), 1.0)
    autoscaler.calls.search(GRAPH, CALLS, Hold(2, ""), 2)
    assert plan(autoscaler, 2, decision=2).layouts[TRAIN_POLICY].threads == 1, "so that the critic's update fits beside it"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"plan": {"search": "fixed"}}, "plan.search is fixed: calls take turns"), ({"functions": {"elastic": False}}, "")],
)
def test_fixed_plans_take_turns(changes: dict[str, Any], reason: str) -> None:
    made = plan(planner(**changes), 4)
    assert not is_beside(made) and made.reason == reason


def test_one_call_after_the_other_needs_no_reason() -> None:
    autoscaler = planner()
    made = autoscaler.calls.plan(GRAPH, {name: CALLS[name] for name in (REFERENCE, TRAIN_POLICY)}, Hold(1, ""), 4)
    assert not made.has_beside(REFERENCE, TRAIN_POLICY) and made.reason == ""
