"""The market for slots: exact, fair, stable, and nobody takes by a false bid what another's share gives it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.market import CREDIT_S, TURN_SLOT_S, Bid, Credits, bid_of, clear, entitled_slots
from placement.planning.objective import Objective


@st.composite
def bids(draw: st.DrawFn, most_runs: int = 3, most_slots: int = 6) -> tuple[int, list[Bid]]:
    runs = draw(st.integers(1, most_runs))
    pool = draw(st.integers(runs, most_slots))
    shares = draw(st.lists(st.integers(0, 4), min_size=runs, max_size=runs))
    found = []
    for number in range(runs):
        least = draw(st.integers(0, 1))
        counts = sorted(draw(st.sets(st.integers(least + 1, most_slots), max_size=4)))
        gains = draw(st.lists(st.integers(1, 40), min_size=len(counts), max_size=len(counts)))
        share = shares[number] / max(4, sum(shares)) if draw(st.booleans()) else None
        worth = (0.0, *map(float, itertools.accumulate(gains)))
        found.append(Bid(f"run{number}", (least, *counts), worth, share, draw(st.sampled_from([1.0, 2.5]))))
    return pool, found


def floors(pool: int, found: list[Bid]) -> dict[str, int]:
    entitled = entitled_slots(pool, found)
    return {bid.run: max([bid.slots[0], *(n for n in bid.slots if n <= entitled[bid.run])]) for bid in found}


def worth_of(found: list[Bid], slots: dict[str, int]) -> float:
    return sum(bid.weight * bid.worth[bid.slots.index(slots[bid.run])] for bid in found)


@given(bids())
def test_no_division_is_worth_more(case: tuple[int, list[Bid]]) -> None:
    pool, found = case
    cleared = clear(pool, found)
    assert sum(cleared.slots.values()) <= pool
    low = floors(pool, found)
    divisions = [
        dict(zip([bid.run for bid in found], counts, strict=True))
        for counts in itertools.product(*(bid.slots for bid in found))
        if sum(counts) <= pool
    ]
    allowed = [slots for slots in divisions if all(slots[run] >= low[run] for run in low)]
    if allowed:  # else some run cannot do without more than its share
        assert all(cleared.slots[run] >= low[run] for run in low)
        best = max(worth_of(found, slots) for slots in allowed)
        assert worth_of(found, dict(cleared.slots)) == pytest.approx(best, abs=1e-3)
        free = pool - sum(cleared.slots.values())
        for bid in found:  # nothing is free that somebody would gain from
            assert not any(0 < count - cleared.slots[bid.run] <= free for count in bid.slots)


@given(bids(), st.floats(0, 20))
def test_clearing_again_changes_nothing(case: tuple[int, list[Bid]], handover_s: float) -> None:
    pool, found = case
    once = clear(pool, found, handover_s=handover_s)
    assert clear(pool, found, once.slots, handover_s=handover_s).slots == once.slots


@given(bids(), st.floats(1.0, 1e6), st.data())
def test_a_false_bid_takes_no_share_of_another(case: tuple[int, list[Bid]], factor: float, data: st.DataObject) -> None:
    pool, found = case
    liar = data.draw(st.sampled_from(found))
    false = Bid(liar.run, liar.slots, tuple(factor * x for x in liar.worth), liar.share, liar.weight)
    low, cleared = floors(pool, found), clear(pool, [false if bid is liar else bid for bid in found])
    if sum(low.values()) <= pool:
        assert all(cleared.slots[bid.run] >= low[bid.run] for bid in found)


@given(st.integers(2, 4), st.integers(4, 12), st.data())
def test_a_run_that_overstates_its_need_takes_no_more_than_that_from_others(runs: int, pool: int, data: st.DataObject) -> None:
    found = [Bid(f"run{k}", tuple(range(1, pool + 1)), tuple(float(n * (k + 1)) for n in range(pool))) for k in range(runs)]
    need = data.draw(st.integers(1, pool - runs + 1))
    liar = Bid("run0", tuple(range(need, pool + 1)), tuple(float(n) for n in range(pool - need + 1)))
    low, cleared = floors(pool, found), clear(pool, [liar, *found[1:]])
    lost = sum(max(0, low[bid.run] - cleared.slots[bid.run]) for bid in found[1:])
    assert lost <= max(0, need - entitled_slots(pool, found)["run0"])


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=30))
@settings(max_examples=40)
def test_no_run_starves_and_credits_are_bounded(wanted: list[list[int]]) -> None:
    pool, credits, held = 6, Credits(), {}
    for step in wanted:
        found = [Bid(f"run{k}", tuple(range(most + 1)), tuple(float(n * (k + 1)) for n in range(most + 1))) for k, most in enumerate(step)]
        held = dict(clear(pool, found, held, credits, handover_s=0.01).slots)
        entitled = entitled_slots(pool, found)
        assert all(held[bid.run] >= min(entitled[bid.run], bid.most) for bid in found)
        credits = credits.after(400.0, held, entitled, pool)
        assert all(abs(x) <= CREDIT_S * pool for x in credits.balance.values())


def test_a_lender_comes_first_later() -> None:
    """Two equal runs want all of the spare slots of a third: the one that lent before gets them."""
    a, b = (Bid(run, (0, 1, 2), (0.0, 10.0, 20.0)) for run in "ab")
    idle = Bid("idle", (0,), (0.0,))
    lent = Credits().after(600.0, {"a": 0, "b": 2, "idle": 1}, {"a": 1, "b": 1, "idle": 1}, 3)
    assert lent.of("a") > 0 > lent.of("b")
    assert clear(3, [a, b, idle], credits=lent).slots == {"a": 2, "b": 1, "idle": 0}
    swapped = Credits({"a": lent.of("b"), "b": lent.of("a")})
    assert clear(3, [a, b, idle], credits=swapped).slots == {"a": 1, "b": 2, "idle": 0}


def test_slots_that_nobody_borrows_are_not_lent() -> None:
    after = Credits().after(100.0, {"a": 0, "b": 1}, {"a": 2, "b": 2}, 4)
    assert after.of("a") == after.of("b") == 0


def test_a_change_pays_back_its_hand_over() -> None:
    small = [Bid("a", (1, 2), (0.0, 1.0), 0.25), Bid("b", (1, 2), (0.0, 1.2), 0.25)]
    assert clear(3, small, {"a": 2, "b": 1}).slots == {"a": 1, "b": 2}
    assert clear(3, small, {"a": 2, "b": 1}, handover_s=0.2).slots == {"a": 2, "b": 1}


def test_the_price_is_the_worth_of_one_slot_less() -> None:
    found = [Bid("a", (0, 1, 2), (0.0, 9.0, 12.0), 0.0), Bid("b", (0, 1, 2), (0.0, 7.0, 9.0), 0.0)]
    assert clear(3, found).price == pytest.approx(3.0, abs=1e-3)
    assert clear(4, found).price == pytest.approx(2.0, abs=1e-3)
    assert clear(5, found).price == 0


def test_where_shares_take_all_slots_the_price_is_the_worth_of_one_more() -> None:
    found = clear(2, [Bid("a", (1, 2), (0.0, 9.0)), Bid("b", (1, 2), (0.0, 7.0))])
    assert found.price == pytest.approx(9.0, abs=1e-3) and found.reasons["a"].endswith("its share is 1, and other runs use theirs")
    assert clear(0, [Bid("a", (0, 1), (0.0, 9.0))]).price == pytest.approx(9.0, abs=1e-3)


def test_a_run_that_owns_no_part_of_a_slot_gets_no_turn_with_it() -> None:
    """Of 5 slots a share of 0.4 is exactly 2. What its run has lent of these comes back as credit, not as a third."""
    runs = [Bid("a", (1, 5), (0.0, 9.0), share=0.4), Bid("b", (1, 5), (0.0, 9.0)), Bid("c", (1, 5), (0.0, 9.0))]
    found = entitled_slots(5, runs, {}, Credits({"a": 6 * TURN_SLOT_S}))
    assert found == {"a": 2, "b": 2, "c": 1}
    assert entitled_slots(5, runs, {}, Credits({"c": TURN_SLOT_S})) == {"a": 2, "b": 1, "c": 2}
    assert entitled_slots(5, runs, {}, Credits({"c": TURN_SLOT_S - 1})) == found


def test_bids_follow_the_objective() -> None:
    points = [(1, 40.0, 40.0), (2, 22.0, 44.0), (4, 15.0, 60.0), (8, 14.0, 112.0)]
    assert bid_of("a", points, Objective(prefer=0.0)).slots == (1,)
    assert bid_of("a", points, Objective(prefer=0.5), value_per_s=1.0).slots == (1, 2)
    assert bid_of("a", points, Objective(prefer=0.5)).slots == (1, 2, 4)
    assert bid_of("a", points, Objective(prefer=0.99)).slots == (1, 2, 4, 8)
    assert bid_of("a", points, Objective(deadline_s=20.0)).slots == (1, 2, 4)
    assert bid_of("a", points, Objective(budget=50.0)).slots == (1, 2)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Bid("a", (1,), (0.0,), share=1.5), "the share of a lies between 0 and 1, got 1.5"),
        (lambda: Bid("a", (2, 1), (0.0, 1.0)), "numbers of slots must ascend"),
        (lambda: Bid("a", (1, 2), (0.0, 0.0)), "worths must be finite and ascend"),
        (lambda: clear(4, [Bid("a", (1,), (0.0,), 0.7), Bid("b", (1,), (0.0,), 0.7)]), "shares add up to 1.4, more than 1"),
        (lambda: clear(4, [Bid("a", (1,), (0.0,)), Bid("a", (1,), (0.0,))]), "more than one bid of the same run: a"),
        (lambda: clear(2, [Bid("a", (3,), (0.0,))]), "need at least 3 slots together, but the pool has 2"),
    ],
)
def test_mistakes(attempt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()


def test_sixteen_runs_on_three_hundred_slots_clear_at_once() -> None:
    rng = np.random.default_rng(1)
    found = [Bid(f"run{k:02}", tuple(range(301)), (0.0, *np.cumsum(rng.random(300) + 1e-3).tolist())) for k in range(16)]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        cleared = clear(300, found, handover_s=0.05)
        times.append(time.perf_counter() - start)
    assert sum(cleared.slots.values()) == 300 and min(times) < 0.5  # 25 ms on a quiet machine
