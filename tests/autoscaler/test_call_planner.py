"""Calls run side by side where that pays: by their times first, and then by what steps of both kinds took."""

from __future__ import annotations

from typing import Any

import pytest

from placement.call_slots import CallPlan
from placement.calls import REFERENCE, TRAIN_CRITIC, TRAIN_POLICY, VALUES, Features, step_graph
from placement.scaling.resize_policy import Hold
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.call_planner import CallToPlan
from rlhfless_ray.recipe import Recipe

GRAPH = step_graph(Features(values=True, reference=True))
TOKENS = 1000.0
PASSES = {REFERENCE: 0.3, VALUES: 0.3}
UPDATES = {TRAIN_CRITIC: 0.7, TRAIN_POLICY: 0.7}


def planner(**changes: Any) -> Autoscaler:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"max_slots_per_rank": 2}, **changes}
    return Autoscaler(Recipe.parse(tree), Speed(0.01, 1e-4))


def plan(autoscaler: Autoscaler, room: int, decision: int = 1) -> CallPlan:
    stages = [{name: CallToPlan(1, TOKENS) for name in stage} for stage in (PASSES, UPDATES)]
    return autoscaler.calls.plan(GRAPH, stages, Hold(decision, "as the test says"), room)


def took(autoscaler: Autoscaler, made: CallPlan, slowdown: float) -> None:
    """Record a step whose calls take `slowdown` times as long while they run side by side."""
    factor = slowdown if made.together else 1.0
    seconds = {name: factor * alone_s for name, alone_s in (PASSES | UPDATES).items()}
    for slots in (1, 2):
        autoscaler.learner.observe(slots, TOKENS, seconds[TRAIN_POLICY])
    wall_s = seconds[VALUES] + seconds[TRAIN_POLICY] if made.together else sum(seconds.values())
    tokens = dict.fromkeys(seconds, TOKENS)
    autoscaler.calls.observe(made, tokens, {name: (made.slots[name], value) for name, value in seconds.items()}, wall_s)


@pytest.mark.parametrize(("slowdown", "mostly"), [(1.0, True), (1.1, True), (2.0, False)])
def test_steps_of_both_kinds_decide_how_most_of_the_others_run(slowdown: float, mostly: bool) -> None:
    """At twice the time, as with more slots than cores, the same seconds cost twice the slot-seconds."""
    autoscaler, kinds = planner(), []
    for _ in range(30):
        made = plan(autoscaler, 4)
        kinds.append(made.together)
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
    assert not plan(autoscaler, 1).together


def test_a_number_of_slots_that_is_being_tried_is_kept_and_fewer_may_be_taken_of_a_known_one() -> None:
    autoscaler = planner()
    assert plan(autoscaler, 4, decision=2).slots[TRAIN_POLICY] == 2, "not measured yet"
    for _ in range(8):
        took(autoscaler, plan(autoscaler, 2, decision=2), 1.0)
    assert plan(autoscaler, 2, decision=2).slots[TRAIN_POLICY] == 1, "so that the critic's update fits beside it"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"plan": {"search": "fixed"}}, "plan.search is fixed: calls take turns"), ({"functions": {"elastic": False}}, "")],
)
def test_fixed_plans_take_turns(changes: dict[str, Any], reason: str) -> None:
    made = plan(planner(**changes), 4)
    assert not made.together and made.reason == reason


def test_one_call_after_the_other_needs_no_reason() -> None:
    autoscaler = planner()
    made = autoscaler.calls.plan(GRAPH, [{REFERENCE: CallToPlan(1, TOKENS)}, {TRAIN_POLICY: CallToPlan(1, TOKENS)}], Hold(1, ""), 4)
    assert not made.together and made.reason == ""
