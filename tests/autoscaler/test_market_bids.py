"""A run's bids: what it asks for of a shared pool, and how its plans follow what the pool has for it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from placement.market import Bid
from placement.planning.frontier import frontier
from placement.planning.objective import Objective, choose_nearest
from placement.planning.plan import Plan
from placement.planning.plan import Pool as PlannerPool
from placement.scaling.learner_size import LearnerSize
from placement.scaling.phase_delay import Delay
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.pool_state import PoolState
from rlhfless_ray.functions.pool_view import view_of
from tests.functions.test_pool_state import ask, pool


class Pool:
    """What `PoolClient` does, without Ray."""

    def __init__(self, state: PoolState, run: str, share: float | None = None) -> None:
        self.state, self.info = state, RunInfo(run, share, folder=run)
        assert state.join(self.info, 0.0) == []
        self.view = view_of(state, run, 0.0)

    @property
    def viewed_s(self) -> float:
        return time.monotonic()

    def bid(self, bid, gives_s=None) -> None:
        self.state.bid(bid, 0.0)
        self.state.runs[self.info.run].gives_at_s = gives_s
        self.view = view_of(self.state, self.info.run, 0.0)

    def renew_bid(self, bid) -> None:
        self.bid(bid)

    def what_if(self, bid):
        return self.state.what_if(bid)


def plans(*points: tuple[int, float]) -> list[SimpleNamespace]:
    return [SimpleNamespace(actors=actors, time_s=seconds, cost=actors * seconds) for actors, seconds in points]


def as_they_are(width: int, plan: Plan) -> Plan:
    """No engine has to start."""
    return plan


def begin(bids: MarketBids, wanted: int = 4, seconds: float = 9.0, grows: bool = True) -> Delay:
    return bids.begin_rollout(wanted, seconds, grows, 4.0)


def hold(bids: MarketBids, count: int) -> None:
    """Have a run take free slots."""
    ask(bids.pool.state, bids.pool.info.run, count, 0.0)
    assert len(bids.pool.state.match(0.0)) == count


def update_sizes() -> LearnerSize:
    """An update that takes 8 s on one slot, and half on twice as many."""
    sizes = LearnerSize(4)
    for count, seconds in ((1, 8.0), (2, 4.0), (4, 2.0)):
        sizes.observe(count, 1000.0, seconds)
        sizes.observe(count, 1000.0, seconds)
    sizes.settle()
    return sizes


FRONTIER = plans((1, 40.0), (2, 20.0), (3, 14.0), (4, 11.0))


@pytest.fixture
def runs() -> tuple[MarketBids, MarketBids]:
    state = pool(4)
    return tuple(MarketBids(Pool(state, name), Objective(prefer=0.8), 1) for name in ("x", "y"))


def test_a_run_alone_may_plan_with_every_slot():
    bids = MarketBids(Pool(pool(4), "x"), Objective(prefer=0.8), 1)
    left, note = bids.divide({1: FRONTIER}, 0, as_they_are)
    assert left == {1: FRONTIER} and note == "" and bids.most == 4


@pytest.mark.parametrize(("budget", "slots"), [(45.0, (1, 2, 3, 4)), (41.0, (1, 2)), (30.0, (1,))])
def test_an_update_and_a_rollout_beside_it_are_valued_under_a_budget_as_a_rollout_alone_is(budget: float, slots: tuple[int, ...]) -> None:
    """Clearing compares both bids with those of other runs. The last budget is less than any plan costs."""
    bids = MarketBids(Pool(pool(4), "x"), Objective(budget=budget), 1)
    bids.divide({1: FRONTIER}, 0, as_they_are)
    bids.room_for_pairs([(plan.actors, plan) for plan in FRONTIER], FRONTIER)
    assert bids.pair == bids.rollout and bids.pair.slots == slots


@pytest.mark.parametrize("prefer", [0.1, 0.5, 0.8, 0.9, 0.97])
def test_a_run_that_nobody_disturbs_chooses_as_it_would_alone(prefer):
    """Bids took a second for p / (1 - p) slot-seconds, however many slots had work: runs left free slots that they would pay for."""
    lengths = np.random.default_rng(0).gamma(2.0, 150.0, 512).clip(1, 1000)
    alone = frontier(lengths, pools=[PlannerPool(Speed(0.034, 1.2e-4), max_actors=16)])
    objective = Objective(prefer=prefer)
    left, note = MarketBids(Pool(pool(16), "x"), objective, 1).divide({1: alone}, 0, as_they_are)
    assert note == "" and choose_nearest(left[1], objective).plan == choose_nearest(alone, objective).plan


def test_a_plan_leaves_others_their_share_and_says_so(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0, as_they_are)
    begin(y)
    left, note = x.divide({1: FRONTIER}, 0, as_they_are)
    assert [plan.actors for plan in left[1]] == [1, 2] and "its share is 2" in note and x.most == 4


def test_a_run_whose_tail_needs_one_slot_leaves_the_others(runs):
    x, y = runs
    y.divide({1: plans((1, 5.0))}, 0, as_they_are)
    begin(y)
    assert [plan.actors for plan in x.divide({1: FRONTIER}, 0, as_they_are)[0][1]] == [1, 2, 3]


def test_slots_beside_the_engines_count_and_the_smallest_plan_stays(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0, as_they_are)
    begin(y)
    left, _ = x.divide({1: FRONTIER, 2: plans((1, 18.0), (2, 9.0))}, 2, as_they_are)
    assert {width: [plan.actors for plan in kept] for width, kept in left.items()} == {1: [1], 2: [1]}


def test_an_update_gets_the_slots_that_the_pool_has_for_it(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0, as_they_are)
    begin(y)
    delay, why = x.begin_update(update_sizes(), 4, 1000.0, 4.0)
    assert delay == Delay(0.0, 2, "") and "its share is 2" in why
    assert x.begin_update(update_sizes(), 2, 1000.0, 4.0) == (Delay(0.0, 2, ""), "")
    assert x.metrics()["shared/runs"] == 2 and x.metrics()["shared/target_slots"] == 2


def test_an_update_gets_free_slots_to_try_them():
    bids = MarketBids(Pool(pool(4), "x"), Objective(prefer=0.8), 1)
    assert bids.begin_update(LearnerSize(2), 2, 1000.0, 4.0) == (Delay(0.0, 2, ""), "")
    sizes = LearnerSize(4)
    sizes.observe(2, 1000.0, 4.0)
    sizes.settle()
    assert bids.begin_update(sizes, 4, 1000.0, 4.0) == (Delay(0.0, 4, ""), "")


def test_the_warm_up_of_a_number_of_slots_is_not_its_price():
    """The first update of a process is slow. With its time, two slots were worth nothing, and the run never tried them again."""
    bids = MarketBids(Pool(pool(4), "x"), Objective(prefer=0.8), 1)
    sizes = LearnerSize(2)
    for count, seconds in ((1, 0.9), (1, 0.6), (2, 4.6)):
        sizes.observe(count, 1000.0, seconds)
    sizes.settle()
    assert sizes.decide(1, 1000.0, value_per_s=4.0).actors == 2
    assert bids.begin_update(sizes, 2, 1000.0, 4.0) == (Delay(0.0, 2, ""), "")


def test_a_number_of_slots_that_seems_worse_is_tried_again_by_a_run_alone():
    bids = MarketBids(Pool(pool(2), "x"), Objective(prefer=0.8), 1)
    sizes = LearnerSize(2)
    for count, seconds in ((2, 0.94), (2, 0.94), (1, 0.88), (1, 0.88), (1, 0.88), (1, 0.88)):
        sizes.observe(count, 1000.0, seconds)
    assert sizes.decide(1, 1000.0, value_per_s=100.0).actors == 2
    assert bids.begin_update(sizes, 2, 1000.0, 100.0) == (Delay(0.0, 2, ""), "")
    Pool(bids.pool.state, "y").bid(Bid("y", (1,), (0.0,)))
    assert bids.begin_update(sizes, 2, 1000.0, 100.0)[0].slots == 1


def test_an_update_waits_for_a_slot_that_a_rollout_gives_back(runs):
    x, y = runs
    hold(x, 1)
    y.divide({1: FRONTIER}, 0, as_they_are)
    begin(y)
    hold(y, 3)
    delay, _ = x.begin_update(update_sizes(), 4, 1000.0, 4.0)
    assert delay.slots == 2 and 0 < delay.seconds <= 2.0
    assert "waits for 1 slot that another run gives back in about 0.5 s: 4 s on 2 slots, 8 s on 1" in delay.reason


def test_an_update_does_not_wait_for_a_long_phase_and_says_so(runs):
    x, y = runs
    hold(x, 1)
    y.divide({1: FRONTIER}, 0, as_they_are)
    begin(y, seconds=9.0, grows=False)
    hold(y, 3)
    delay, _ = x.begin_update(update_sizes(), 4, 1000.0, 4.0)
    assert (delay.seconds, delay.slots) == (0.0, 2) and "begins on 1 slot: another one comes in about 9 s, and saves 4 s" in delay.reason


def test_a_rollout_that_cannot_grow_waits_for_the_end_of_an_update(runs):
    x, y = runs
    hold(x, 1)
    y.begin_update(update_sizes(), 4, 1000.0, 4.0)
    hold(y, 3)
    x.divide({1: FRONTIER}, 0, as_they_are)
    assert begin(x, wanted=2) == Delay(0.0, 2, ""), "it takes slots later"
    delay = begin(x, wanted=2, grows=False)
    assert delay.slots == 2 and delay.seconds == 5.0 and "in about 2 s" in delay.reason


def test_a_rollout_waits_by_what_it_takes_without_starts(runs):
    """Their part of a step is no time of this rollout."""
    x, y = runs
    hold(x, 1)
    y.begin_update(update_sizes(), 4, 1000.0, 4.0)
    hold(y, 3)
    x.divide({1: FRONTIER}, 0, lambda width, plan: SimpleNamespace(**{**vars(plan), "time_s": plan.time_s + 5.0 * (plan.actors > 1)}))
    assert begin(x, wanted=2, grows=False).reason.endswith("20 s on 2 slots, 40 s on 1")


def test_a_tail_leaves_its_slots_to_the_plans_of_others(runs):
    x, y = runs
    y.divide({1: FRONTIER}, 0, as_they_are)
    begin(y)
    assert [plan.actors for plan in x.divide({1: FRONTIER}, 0, as_they_are)[0][1]] == [1, 2]
    assert y.renew_rollout(plans((1, 5.0), (2, 4.95), (2, 4.9))) == 1
    assert [plan.actors for plan in x.divide({1: FRONTIER}, 0, as_they_are)[0][1]] == [1, 2, 3]
    assert y.most == 4, "the next rollout's bid is another one"


def test_a_bid_is_renewed_only_if_it_has_changed_much(runs, monkeypatch):
    x, _ = runs
    x.divide({1: FRONTIER}, 0, as_they_are)
    begin(x)
    told = []
    monkeypatch.setattr(x.pool, "renew_bid", told.append)
    for share in (1.0, 0.9, 0.8, 0.7, 0.65, 0.6, 0.5):
        assert x.renew_rollout(plans(*((plan.actors, share * plan.time_s) for plan in FRONTIER))) == 4
    assert [bid.worth[-1] / x.rollout.worth[-1] for bid in told] == pytest.approx([0.7, 0.5])


def test_the_rest_of_a_rollout_has_the_rest_of_its_deadline_or_budget(runs, monkeypatch):
    x, _ = runs
    for objective, rest, most, learner in (
        (Objective(deadline_s=15.0), plans((1, 14.0), (2, 9.0), (3, 7.0)), 1, 0),
        (Objective(budget=30.0), plans((1, 12.0), (2, 7.0), (3, 5.0)), 3, 0),
        (Objective(budget=30.0), plans((1, 12.0), (2, 7.0), (3, 5.0)), 3, 2),
    ):
        x.objective = objective
        x.divide({1: FRONTIER}, learner, as_they_are)
        begin(x)
        assert x.renew_rollout(rest) == most
        x.begun_s -= 7.0
        monkeypatch.setattr(x.pool, "view", SimpleNamespace(slot_s=x.paid_slot_s + 15.5 + 7.0 * learner))
        assert x.renew_rollout(rest) == {1: 3, 3: 2}[most]
        monkeypatch.undo()
