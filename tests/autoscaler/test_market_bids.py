"""A run's bids: what it asks for of a shared pool, and how its plans follow what the pool has for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from placement.planning.objective import Objective
from placement.scaling.learner_size import LearnerSize
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.pool_state import PoolState
from tests.functions.test_pool_state import pool


class Pool:
    """What `PoolClient` does, without Ray."""

    def __init__(self, state: PoolState, run: str, share: float | None = None) -> None:
        self.state, self.info = state, RunInfo(run, share, folder=run)
        assert state.join(self.info, 0.0) == []
        self.view = state.view(run, 0.0)

    def bid(self, bid) -> None:
        self.state.bid(bid, 0.0)
        self.view = self.state.view(self.info.run, 0.0)

    def what_if(self, bid):
        return self.state.what_if(bid)


def plans(*points: tuple[int, float]) -> list[SimpleNamespace]:
    return [SimpleNamespace(actors=actors, time_s=seconds) for actors, seconds in points]


FRONTIER = plans((1, 40.0), (2, 20.0), (3, 14.0), (4, 11.0))


@pytest.fixture
def runs() -> tuple[MarketBids, MarketBids]:
    state = pool(4)
    return tuple(MarketBids(Pool(state, name), Objective(prefer=0.8), 1) for name in ("x", "y"))


def test_a_run_alone_may_plan_with_every_slot():
    bids = MarketBids(Pool(pool(4), "x"), Objective(prefer=0.8), 1)
    left, note = bids.divide({1: FRONTIER}, 0)
    assert left == {1: FRONTIER} and note == "" and bids.most == 4


def test_a_plan_leaves_others_their_share_and_says_so(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0)
    y.begin_rollout()
    left, note = x.divide({1: FRONTIER}, 0)
    assert [plan.actors for plan in left[1]] == [1, 2] and "its share is 2" in note and x.most == 4


def test_a_run_whose_tail_needs_one_slot_leaves_the_others(runs):
    x, y = runs
    y.divide({1: plans((1, 5.0))}, 0)
    y.begin_rollout()
    assert [plan.actors for plan in x.divide({1: FRONTIER}, 0)[0][1]] == [1, 2, 3]


def test_slots_beside_the_engines_count_and_the_smallest_plan_stays(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0)
    y.begin_rollout()
    left, _ = x.divide({1: FRONTIER, 2: plans((1, 18.0), (2, 9.0))}, 2)
    assert {width: [plan.actors for plan in kept] for width, kept in left.items()} == {1: [1], 2: [1]}


def test_an_update_gets_the_slots_that_the_pool_has_for_it(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0)
    y.begin_rollout()
    sizes = LearnerSize(4)
    for count, seconds in ((1, 8.0), (2, 4.0), (4, 2.0)):
        sizes.observe(count, 1000.0, seconds)
        sizes.observe(count, 1000.0, seconds)
    sizes.settle()
    room, why = x.begin_update(sizes, 4, 1000.0)
    assert room == 2 and "its share is 2" in why
    assert x.begin_update(sizes, 2, 1000.0) == (2, "")
    assert x.metrics()["shared/runs"] == 2 and x.metrics()["shared/target_slots"] == 2
