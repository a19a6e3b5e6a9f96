"""Plans over several pools of nodes: by price, by preemptions, by what a run has measured of each, and within the room of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from placement.planning.plan import Plan
from placement.pools import OWN, PoolKind
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.functions.demand import Wanted
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import EngineStep
from tests.autoscaler.test_autoscaler import prompts, recipe, trained

pytestmark = pytest.mark.pure
LENGTHS = np.linspace(190.0, 210.0, 40)


def planner(room: dict[str, int], *kinds: PoolKind, own: float = 4.0, **sections: Any) -> Autoscaler:
    autoscaler = trained(Autoscaler(recipe(**sections), Speed(1e-3, 1e-3)))
    autoscaler.frontiers.use_pools((*kinds, PoolKind(OWN, price_per_hour=own)))
    autoscaler.frontiers.set_rooms({1: room})
    return autoscaler


def plans_of(autoscaler: Autoscaler, most: int = 8) -> list[Plan]:
    return autoscaler.frontiers.plans(LENGTHS, np.full(len(LENGTHS), 8.0), most, 1, autoscaler.engines.fit.speed)


def used(autoscaler: Autoscaler, plan: Plan) -> Counter[str]:
    return Counter(autoscaler.frontiers.pools_of(plan))


def test_cheapest_plan_is_on_the_cheap_pool_and_the_fastest_uses_all_room() -> None:
    autoscaler = planner({"spot": 3, OWN: 2}, PoolKind("spot", {"market": "spot"}, price_per_hour=1.0))
    plans = plans_of(autoscaler)
    assert set(used(autoscaler, plans[-1])) == {"spot"} and used(autoscaler, plans[0]) == {"spot": 3, OWN: 2}
    for plan in plans:
        assert used(autoscaler, plan)["spot"] <= 3 and used(autoscaler, plan)[OWN] <= 2
        assert sorted(np.concatenate(plan.groups).tolist()) == list(range(len(LENGTHS)))


def test_engines_of_all_pools_together_are_no_more_than_the_recipe_allows() -> None:
    autoscaler = planner({"spot": 6, OWN: 4}, PoolKind("spot", {"market": "spot"}, price_per_hour=1.0))
    plans = plans_of(autoscaler, most=4)
    assert max(plan.actors for plan in plans) == 4 and plans[0].time_s < plans[-1].time_s


def test_nodes_are_wanted_for_the_plan_that_would_be_made_with_them() -> None:
    """One slot is there. The fastest plan wants all that the recipe allows, at most as many as a pool may have."""
    spot = PoolKind("spot", {"market": "spot"}, price_per_hour=1.0, max_slots=3)
    limits = Limits({"node": 1}, {1: 6}, pools={"node": OWN}, caps={"spot": 3})
    found = {}
    for prefer in (0.0, 1.0):
        autoscaler = planner({"spot": 0, OWN: 1}, spot, objective={"prefer": prefer})
        found[prefer] = autoscaler.frontiers.wanted(LENGTHS, prompts(len(LENGTHS) // 4), limits, 2)
        assert autoscaler.frontiers.rooms == {1: {"spot": 0, OWN: 1}}, "the plan itself has what is there"
    assert replace(found[1.0], engines={}) == Wanted({}, 1, learner=2)
    assert sum(found[1.0].engines.values()) == 6 and found[1.0].engines.get("spot", 0) <= 3
    assert set(found[0.0].engines) == {"spot"} and found[0.0].engines["spot"] <= 3


def test_pool_without_room_is_in_no_plan() -> None:
    autoscaler = planner({"spot": 0, OWN: 2}, PoolKind("spot", {"market": "spot"}, price_per_hour=1.0))
    assert all(set(used(autoscaler, plan)) == {OWN} for plan in plans_of(autoscaler))
    autoscaler.frontiers.set_rooms({1: {"spot": 0, OWN: 0}})
    assert plans_of(autoscaler, most=1)[0].actors == 1, "it waits for one"


def test_observed_preemptions_make_a_pool_dearer() -> None:
    autoscaler = planner({"spot": 3, OWN: 3}, PoolKind("spot", {"market": "spot"}, price_per_hour=3.9))
    autoscaler.terms.warm_start.observe(0.0, np.full(8, 2.0))
    assert set(used(autoscaler, plans_of(autoscaler)[-1])) == {"spot"}
    autoscaler.terms.pools.observe_use("spot", 3600.0, 300)
    assert set(used(autoscaler, plans_of(autoscaler)[-1])) == {OWN}


def test_a_preemption_costs_the_start_that_successors_took_in_the_pool() -> None:
    autoscaler = planner({"spot": 3, OWN: 3}, PoolKind("spot", {"market": "spot"}, price_per_hour=2.0, preempt_per_hour=20.0))
    assert set(used(autoscaler, plans_of(autoscaler)[-1])) == {"spot"}
    for start_s in (100.0, 600.0):  # at the second they would be lost before they decode
        for _ in range(8):
            autoscaler.terms.pools.observe_start("spot", start_s)
        assert all(set(used(autoscaler, plan)) == {OWN} for plan in plans_of(autoscaler)[-1:])


def test_each_pool_is_planned_with_the_speed_of_its_engines() -> None:
    autoscaler = planner({"slow": 3, OWN: 3}, PoolKind("slow", {"gpu": "old"}, price_per_hour=4.0))

    def steps(factor: float) -> EngineSteps:
        return EngineSteps(EngineStep(n, n, 50 * n, factor * (1e-3 + 1e-3 * n)) for n in [*range(1, 17)] * 4)

    for _ in range(3):
        autoscaler.predictor.observe_pool("slow", steps(3.0))
        autoscaler.predictor.observe_pool(OWN, steps(1.0))
    autoscaler.predictor.learn()
    slow, own = (autoscaler.engines.speed_in(pool, 1) for pool in ("slow", OWN))
    assert slow.per_seq_s == pytest.approx(3 * own.per_seq_s, rel=0.1)
    assert set(used(autoscaler, plans_of(autoscaler)[-1])) == {OWN}
    again = planner({"slow": 3, OWN: 3}, PoolKind("slow", {"gpu": "old"}, price_per_hour=4.0))
    again.restore(autoscaler.state())
    assert again.engines.speed_in("slow", 1).per_seq_s == pytest.approx(slow.per_seq_s)


def test_step_plan_over_pools_predicts_time_and_cost() -> None:
    autoscaler = planner({"spot": 3, OWN: 2}, PoolKind("spot", {"market": "spot"}, price_per_hour=1.0), objective={"prefer": 1.0})
    forecast = autoscaler.predictor.forecast(prompts(), 3)
    plan = autoscaler.plan(forecast, prompts(), 5, step=3, warm=5)
    assert not plan.has_failed and plan.actors == len(autoscaler.frontiers.pools_of(plan.decision.plan)) and plan.predicted_s > 0
