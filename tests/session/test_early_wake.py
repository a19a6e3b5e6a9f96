"""When engines of the next step wake beside the end of an update, and why others do not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from placement.measurements.registry import Measurements
from placement.scaling.keep_warm import Prewarm
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.initial_speed import ANY_SPEED
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.session.early_wake import wake_early

MISSING = 2


def session_of(at_s: float = 0.0, takes: bool = True, **changes: Any) -> Any:
    """A session whose admitted step lacks two engines, which wake `at_s` seconds from now if nothing forbids it."""
    step = SimpleNamespace(metrics={}, plan=None, samples=[], computes_prefixes=False, batch=SimpleNamespace(is_complete=False))
    stage = SimpleNamespace(pool=SimpleNamespace(width=1), count_missing=lambda plan: MISSING, wake=lambda plan: MISSING)
    autoscaler = SimpleNamespace(
        criteria=SimpleNamespace(bids=None),
        predictor=SimpleNamespace(expected_update_s=1.0),
        steps=SimpleNamespace(time_wake=lambda left_s, slots: Prewarm(at_s, 0.0, "soon"), takes=lambda measure, ahead: takes),
        terms=Measurements(),
    )
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    context = SimpleNamespace(autoscaler=autoscaler, recipe=recipe)
    given = {"upcoming": step, "stage": stage, "context": context, "update_ends_s": time.monotonic() + 1.0}
    return SimpleNamespace(**{**given, "mode": SimpleNamespace(begins_beside_update=False), **changes})


def working() -> Pending[Any]:
    return Pending(lambda: None, lambda: False)


def test_engines_wake_when_it_is_time_and_the_step_says_so() -> None:
    session = session_of(at_s=0.05)
    began_s = time.monotonic()
    wake_early(session, working(), saves=False)
    assert time.monotonic() - began_s >= 0.05
    found = session.upcoming.metrics
    assert found["rollout/woken_early"] == MISSING and found["rollout/wake_reason"].startswith("soon; taken, ")
    assert 0.5 < found["rollout/woke_early_s"] <= 0.95


def test_steps_go_without_where_the_trial_says_so() -> None:
    session = session_of(takes=False)
    wake_early(session, working(), saves=False)
    assert session.upcoming.metrics["rollout/wake_reason"].startswith("soon; left out, ")
    assert "rollout/woken_early" not in session.upcoming.metrics


def test_an_update_that_ends_first_is_not_waited_for() -> None:
    session = session_of(at_s=60.0)
    end_s = time.monotonic() + 0.05
    wake_early(session, Pending(lambda: None, lambda: time.monotonic() > end_s), saves=False)
    assert time.monotonic() - end_s < 5.0 and "rollout/woken_early" not in session.upcoming.metrics


@pytest.mark.parametrize(
    ("changes", "saves", "reason"),
    [
        ({"mode": SimpleNamespace(begins_beside_update=True)}, False, "engines work beside the update"),
        ({}, True, "a checkpoint comes first"),
        ({"stage": SimpleNamespace(count_missing=lambda plan: 0)}, False, "all engines take slots that the learner holds"),
    ],
)
def test_what_forbids_it_is_named(changes: dict[str, Any], saves: bool, reason: str) -> None:
    session = session_of(**changes)
    wake_early(session, working(), saves)
    assert session.upcoming.metrics == {"rollout/wake_reason": reason}


def test_after_the_last_step_nothing_wakes() -> None:
    wake_early(session_of(upcoming=None), working(), saves=False)


def test_dear_slots_wake_later_than_cheap_ones() -> None:
    """Late costs the step's time, early costs the slots."""
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    autoscaler = Autoscaler(recipe, ANY_SPEED)
    autoscaler.criteria.value_per_s = 4.0
    for _ in range(20):
        autoscaler.terms.warm_start.observe(0.0, 0.2)
        autoscaler.terms.step.observe(2.0, 2.0)
    few, many = (autoscaler.steps.time_wake(1.0, slots) for slots in (1, 16))
    assert few is not None and many is not None and 0 < few.at_s < 0.8 < many.at_s
