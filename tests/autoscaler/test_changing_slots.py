"""Plans of a run whose cluster gains and loses slots between them, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from placement.measurements.term import Term
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.initial_speed import ExpectedEngine
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.demand import NoDemand
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.worker_pool import NoRoom
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step
from tests.autoscaler.test_autoscaler import prompts, recipe, trained


class Run:
    """A run that plans steps. `limits` is what its cluster allows now."""

    def __init__(self, limits: Limits, width: int = 1, **sections: Any) -> None:
        self.limits, self.number, self.said = limits, 0, list[str]()
        self.session = session = RolloutSession.__new__(RolloutSession)
        own = recipe(objective={"prefer": 1.0}, **sections)
        self.autoscaler = trained(Autoscaler(own, Speed(1e-3, 1e-3)))
        self.autoscaler.terms.cold_start = Term(1e4)  # so that no change of a pool pays, unless it has to be
        leases, record = SimpleNamespace(resource="cpu"), SimpleNamespace(progress=SimpleNamespace(message=self.said.append))
        session.context = SimpleNamespace(  # type: ignore[assignment]
            limits=lambda: self.limits, leases=leases, record=record, autoscaler=self.autoscaler, demand=NoDemand()
        )
        session.mode, session.stage = own.rollout.mode, SimpleNamespace(warm=lambda width: 0)  # type: ignore[assignment]

    def plan(self, warm: int | None = None) -> RolloutPlan:
        """Plan a step, and work with the planned engines."""
        self.number += 1
        self.session.stage.warm = lambda width: self.autoscaler.actors if warm is None else warm  # type: ignore[method-assign]
        step = Step(self.number)
        step.prompts, step.forecast = prompts(), self.autoscaler.predictor.forecast(prompts(), self.number)
        plan = self.session._plan(step)
        assert not plan.has_failed, step.troubles
        self.autoscaler.actors = plan.actors
        return plan


def test_a_plan_has_more_engines_once_slots_have_joined_and_says_so() -> None:
    run = Run(Limits({"a": 2}, {1: 8}))
    run.autoscaler.terms.cold_start = run.autoscaler.terms.warm_start = Term(0.0)
    assert run.plan(warm=8).actors == 2 and run.plan(warm=8).actors == 2 and not run.said
    run.limits = Limits({"a": 2, "b": 3}, {1: 8})
    more = run.plan(warm=8)
    assert more.actors == 5 and more.reason.startswith("3 slots joined: the pool may be 5; ")
    assert run.said == ["step 3: 3 slots joined: the pool may be 5"]
    assert "joined" not in run.plan(warm=8).reason, "it is told once"


def test_a_plan_never_holds_engines_whose_slots_are_gone() -> None:
    """To hold them would be cheaper than to change: starts are dear."""
    run = Run(Limits({"a": 2, "b": 2}, {1: 8}))
    run.autoscaler.terms.cold_start = Term(0.0)
    assert run.plan(warm=8).actors == 4
    run.autoscaler.terms.cold_start = Term(1e4)
    run.limits = Limits({"b": 1}, {1: 8})
    fewer = run.plan()
    assert fewer.actors == 1 and "3 slots left: the pool may be 1" in fewer.reason


def test_a_failed_planner_keeps_no_more_engines_than_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Limits({"a": 4}, {1: 8}))
    run.autoscaler.terms.cold_start = Term(0.0)
    assert run.plan(warm=8).actors == 4
    monkeypatch.setattr("rlhfless_ray.autoscaler.rollout_frontiers.frontier", lambda *a, **k: 1 / 0)
    run.limits = Limits({"a": 1}, {1: 8})
    step = Step(9)
    step.prompts, step.forecast = prompts(), run.autoscaler.predictor.forecast(prompts(), 9)
    plan = run.session._plan(step)
    assert plan.has_failed and plan.actors == 1


def test_the_runs_own_node_needs_fewer_engines_than_the_recipe_wants() -> None:
    rollout = {"min_actors": 3, "max_actors": 8}
    run = Run(Limits({"a": 4}, {1: 8}, 3), rollout=rollout)
    assert run.plan().actors >= 3
    run.limits = Limits({"home": 1}, {1: 8}, 3, is_own=True)
    assert run.plan().actors == 1
    run.limits = Limits({"a": 1}, {1: 8}, 3)
    assert run.plan().actors == 3, "it waits for nodes of its own, as at the start"


def test_a_fixed_pool_is_all_engines_for_which_there_are_slots_now() -> None:
    run = Run(Limits({"a": 2}, {1: 8}), functions={"elastic": False})
    assert run.plan().actors == 2
    run.limits = Limits({"a": 2, "b": 9}, {1: 8})
    assert run.plan().actors == 8 and run.said[-1].endswith("9 slots joined: the pool may be 8 (rollout.max_actors)")


def test_wide_engines_become_narrower_once_no_node_has_room_for_one() -> None:
    limits = Limits({"large": 4, "small": 2}, {1: 4, 2: 2, 4: 1})
    run = Run(limits, rollout={"tensor_parallel": "auto", "max_actors": 4})
    run.autoscaler.expect({w: ExpectedEngine(Speed(1e-3, 1e-3 / w), 10**6, "") for w in (1, 2, 4)}, "")
    run.autoscaler.use_width(4)
    run.limits = Limits({"small": 2}, {1: 4, 2: 2, 4: 1})
    plan = run.plan()
    assert plan.width in (1, 2) and plan.actors * plan.width <= 2


@pytest.mark.parametrize("working", [[], ["an engine"]])
def test_a_rollout_beside_the_update_whose_engines_are_lost_begins_after_it(working: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Limits({"a": 2}, {1: 8}))
    run.session.update, run.session.stage.pool = Pending(lambda: None), SimpleNamespace(working=working)  # type: ignore[assignment]

    def lost(*_: Any) -> Any:
        raise NoRoom("no slot is free for a successor")

    step = Step(4, batch=SimpleNamespace(ids=[], count=1))  # type: ignore[arg-type]
    monkeypatch.setattr(run.session, "generate", lost)
    run.session._generate(step)
    assert not step.samples and run.said == ["step 4: no slot is free beside the update, so its rollout begins after it"]
    run.session.update, run.session.context.leases.waited_s = None, 0.0
    with pytest.raises(NoRoom):
        run.session._generate(step)
