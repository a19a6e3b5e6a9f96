"""What a run tells Ray's autoscaler."""

from __future__ import annotations

from typing import Any

import pytest

from placement.pools import OWN, PoolKind
from rlhfless_ray.functions import demand
from rlhfless_ray.functions.demand import NoDemand, Wanted, make_demand
from rlhfless_ray.recipe import Recipe

pytestmark = pytest.mark.pure
KINDS = PoolKind("spot", {"market": "spot"}), PoolKind(OWN)


def recipe(**functions: Any) -> Recipe:
    return Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "cluster": {"pool": False}, "functions": functions})


def test_an_announcement_has_all_slots_of_a_plan_and_the_last_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(demand, "request_resources", lambda **given: asked.append(given))
    made = make_demand(recipe(demand=True), "gpu", KINDS)
    made.announce(lambda: Wanted({"spot": 2, OWN: 1}, 4, learner=1))
    made.close()
    bundles, labels = [{"GPU": 4}] * 3 + [{"GPU": 1}], [{"market": "spot"}] * 2 + [{}] * 2
    assert asked == [{"bundles": bundles, "bundle_label_selectors": labels}, {"bundles": []}]


def test_a_run_that_announces_nothing_plans_for_no_further_nodes() -> None:
    made = make_demand(recipe(), "cpu", KINDS)
    made.announce(lambda: pytest.fail("planned"))
    made.close()
    assert type(made) is NoDemand
