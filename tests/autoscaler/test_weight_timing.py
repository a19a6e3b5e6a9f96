"""When the engines of one rollout beside an update take its weights, as the run asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement import Speed
from placement.scaling.resize_policy import Hold
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.session import rollout_session, weight_timing
from rlhfless_ray.session.pause import Pause
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.session.weight_timing import WeightTiming
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step

pytestmark = pytest.mark.pure

ROLLOUT = {"samples_per_prompt": 4, "partial": "continue", "ahead": True, "max_lag_steps": 1, "max_tokens": 1000}


def measured() -> Autoscaler:
    """An autoscaler that knows all that the decision needs: 10 ms a token, pauses of 0.2 s, steps of a second."""
    recipe = Recipe.parse({"prompts": {"task": "chain", "batch_prompts": 8}, "reward": {"function": "task"}, "rollout": ROLLOUT})
    autoscaler = Autoscaler(recipe, Speed(0.01, 0.0))
    autoscaler.engines.fit.observe(np.arange(1, 32), np.full(31, 0.01))
    autoscaler.terms.pause.observe(0.0, [0.2] * 64)
    autoscaler.predictor.step_s, autoscaler.predictor.update_tokens = 1.0, 1000.0
    return autoscaler


def rest(*left: float) -> Any:
    """A rollout on two engines whose responses still get so many tokens."""
    found = SimpleNamespace(pool=SimpleNamespace(working=[1, 2]))
    found.remaining = lambda: (np.array(left), np.full(len(left), 100.0))
    found.horizon = lambda: max(left)
    return found


def timing(
    autoscaler: Autoscaler, stale_cost: float | None = 0.01, is_ready: bool = True, has_failed: bool = False, **more: Any
) -> WeightTiming:
    update = Pending(lambda: None, lambda: is_ready, lambda: has_failed)
    return WeightTiming(autoscaler, update, stale_cost, **{"most_engines": 2, "learner_slots": 1, "can_wait": True, **more})


def test_a_short_rest_goes_on_under_the_old_weights_and_is_looked_at_again_when_it_should_have_ended() -> None:
    one = timing(measured())
    assert not one.ends(rest(10.0, 3.0))
    assert one.reason.startswith("old weights to the end of the rollout in 0.1 s")
    assert one.ready_s is not None and one.look_at_s - one.ready_s == pytest.approx(0.1, abs=0.01)
    assert not one.ends(rest(5000.0)), "the decision stands until then"
    one.look_at_s = 0.0
    assert one.ends(rest(*[5000.0] * 9)), "responses that go on far longer than forecast"
    assert one.waited_s is not None and one.metrics()["partial/weights_wait_s"] == one.waited_s


def test_engines_gain_no_slots_by_a_pause_that_other_runs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found, decide = [], weight_timing.decide_weights
    monkeypatch.setattr(weight_timing, "decide_weights", lambda *given: found.append(given[-1].most_engines) or decide(*given))
    autoscaler = measured()
    timing(autoscaler, most_engines=8).ends(rest(10.0))
    autoscaler.criteria.bids = SimpleNamespace(room=3)
    timing(autoscaler, most_engines=8).ends(rest(10.0))
    assert found == [8, 3]


def test_waits_for_slots_of_other_runs_are_no_part_of_a_pause() -> None:
    session, leases = RolloutSession.__new__(RolloutSession), SimpleNamespace(waited_s=4.0)
    recipe, step = measured().recipe, Step(2)
    autoscaler = Autoscaler(recipe, Speed(0.01, 0.0))
    session.context = SimpleNamespace(recipe=recipe, leases=leases, autoscaler=autoscaler, broker=None)
    session.prefix = None
    session.mode, session.weights, session.step, session.accounted = recipe.rollout.mode, object(), step, lambda name, phase: phase
    session._take_groups = lambda step, samples: samples

    @contextmanager
    def phase(*how: Any) -> Iterator[None]:
        began_s = time.monotonic()
        time.sleep(0.3)  # for a slot of another run
        leases.waited_s += time.monotonic() - began_s
        time.sleep(0.01)  # an engine starts
        yield

    session.stage = SimpleNamespace(grows=True, phase=phase, generate=lambda *how: [], restart_s=0.02)
    session.pause, step.batch = Pause(leases, 0.03), object()
    with session._phase(RolloutPlan(Hold(1, ""), 1)):
        session._generate(step)
    autoscaler.terms.pause.settle()
    (seconds,) = autoscaler.terms.pause.seconds
    assert 0.06 <= seconds < 0.3, "planning, an engine's start and the rollout's overhead"


def test_what_ended_under_the_old_weights_waited_to_its_end() -> None:
    one = timing(measured())
    assert not one.ends(rest(10.0))
    time.sleep(0.02)
    assert 0.02 <= one.metrics()["partial/weights_wait_s"] < 1
    before = timing(measured(), is_ready=False)
    assert not before.ends(rest(10.0)) and before.metrics() == {"partial/weights_wait_s": 0.0, "partial/weights_reason": ""}


def test_engines_take_weights_at_once_where_waiting_is_unsafe_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    short, autoscaler = rest(10.0), measured()
    assert timing(autoscaler, stale_cost=None).ends(short) and timing(autoscaler, can_wait=False).ends(short)
    assert timing(autoscaler, has_failed=True).ends(short), "the learner must be replaced"
    waiting = timing(autoscaler)
    assert not waiting.ends(short)
    monkeypatch.setattr(STOP, "number", 2)
    assert waiting.ends(short), "Ctrl-C waits for the update only"
    monkeypatch.setattr(STOP, "number", None)
    unknown = Autoscaler(autoscaler.recipe, Speed(0.01, 0.0))
    assert timing(unknown).ends(short)
    broken = rest(10.0)
    broken.remaining = lambda: (np.zeros(0), np.zeros(3))
    assert timing(autoscaler).ends(broken) and "when engines take new weights" in autoscaler.troubles[0]


@pytest.mark.parametrize(
    ("changed", "waits"),
    [
        ({}, True),
        ({"functions": {"elastic": False}}, False),
        ({"algorithm": {"importance_cap": 0.0, "uncorrected_lag": True}}, False),
        ({"reward": {}, "agent": {"path": "agent.py"}}, False),
    ],
)
def test_runs_whose_waiting_cannot_be_priced_take_weights_at_once(changed: dict, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(rollout_session, "WeightTiming", lambda *arguments, can_wait: asked.append(can_wait) or timing(measured()))
    tree = {"prompts": {"task": "chain", "batch_prompts": 8}, "reward": {"function": "task"}, "rollout": ROLLOUT}
    session, recipe = RolloutSession.__new__(RolloutSession), Recipe.parse(tree | changed)
    session.prefix = None
    session.mode, session.update, session.weights = recipe.rollout.mode, Pending(lambda: None), object()
    session.groups = SimpleNamespace(stale_cost=SimpleNamespace(lags=1.0, per_version=0.1))
    session.context = SimpleNamespace(recipe=recipe, autoscaler=measured(), most_engines=lambda width: 2)
    session.learn = SimpleNamespace(worker_group=SimpleNamespace(by_rank=[SimpleNamespace(leases=[1])]))
    session.stage = SimpleNamespace(generate=lambda *arguments: [])
    step = Step(2)
    session._generate_beside_update(step)
    assert asked == [waits] and set(step.metrics) == {"partial/weights_wait_s", "partial/weights_reason"}
