"""The choice for or against the prefix service: against counting, and against the definition of a break-even."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.scaling.prefix_benefit import MARGIN, PrefixCosts, PrefixDemand, PrefixSpeed, choose_prefix, costs_off, costs_on

BLOCK = 32
COSTS = PrefixCosts(1e-4, 2e-4, 1e-4, 1e-4, 2e-3, 5e-3, 1e-2)


def demand_of(header: float, engines: int = 4, prompts: int = 64, own: int = 64, group: int = 8) -> PrefixDemand:
    """Groups split over all engines under a shared header, own tokens in full blocks and one token behind them."""
    pages, each = header / BLOCK, own / BLOCK
    return PrefixDemand(
        BLOCK, int(header + prompts * own), int(pages + prompts * each), int(header),
        np.full(engines, header + prompts * own + prompts * group / engines), np.full(engines, prompts * group / engines),
        np.full(engines, pages + prompts * each), np.full(engines, pages + prompts * each),
    )  # fmt: skip


def test_engine_seconds_by_hand() -> None:
    """One engine, ten pages of 32, one request."""
    demand = PrefixDemand(BLOCK, 320, 10, 320, np.array([321.0]), np.array([1.0]), np.array([10.0]), np.array([10.0]))
    found = choose_prefix(demand, COSTS)
    off, on = costs_off(demand, COSTS), costs_on(demand, COSTS, 1)
    assert off == (found.off_engine_s, found.off_engine_s) == pytest.approx((321 * 1e-4, 321 * 1e-4))
    assert found.on_engine_s == pytest.approx(320 * 1e-4 + 10 * 2e-4 + 5e-3 + 1e-4 + 10 * 2e-4 + 2e-3)
    assert on == (found.on_engine_s, pytest.approx(found.on_engine_s + 1e-2))
    assert not found.on and found.reason.startswith("off:"), "one engine shares with nobody"


costs = st.builds(
    PrefixCosts, st.floats(1e-6, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-2),
    st.floats(0, 1e-1), st.floats(0, 1e-1),
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(price=costs, engines=st.integers(1, 6), group=st.sampled_from([4, 8, 12]), own=st.sampled_from([0, 32, 96]), worth=st.floats(0, 8))
def test_break_even_is_where_the_choice_turns(price: PrefixCosts, engines: int, group: int, own: int, worth: float) -> None:
    """Whatever header it is computed from; shorter ones are off, longer ones are on."""

    def choose(header: float) -> tuple[bool, float]:
        found = choose_prefix(demand_of(BLOCK * header, engines, own=own, group=group), price, time_value=worth)
        return found.on, found.break_even_tokens

    _, even = choose(64)
    if math.isinf(even):
        assert not choose(10**5)[0]
        return
    blocks = even / BLOCK
    assert choose(1000)[1] == pytest.approx(even, rel=1e-6, abs=1e-6 + 1e-9 * 32000)
    if blocks < 10**5:
        assert choose(math.ceil(blocks) + 1 + blocks // 1000)[0]
    if blocks > 2:
        assert not choose(math.floor(blocks) - 1 - blocks // 1000)[0]


@given(price=costs, header=st.integers(1, 100), engines=st.integers(1, 6), worth=st.floats(0, 8))
def test_on_saves_more_than_the_margin(price: PrefixCosts, header: int, engines: int, worth: float) -> None:
    demand = demand_of(BLOCK * header, engines)
    found = choose_prefix(demand, price, time_value=worth)
    off, on = (cost + worth * seconds for cost, seconds in (costs_off(demand, price), costs_on(demand, price, 1)))
    assert found.on == (off - on > MARGIN * off) and found.on == (found.instances == 1)


def test_more_instances_where_time_is_worth_it() -> None:
    demand = demand_of(1024, prompts=512)
    assert choose_prefix(demand, COSTS, max_instances=8, time_value=0.0).instances == 1
    many = choose_prefix(demand, COSTS, max_instances=8, time_value=100.0)
    one = choose_prefix(demand, COSTS, time_value=100.0)
    assert many.instances > 1 and many.on_engine_s > one.on_engine_s
    assert costs_on(demand, COSTS, many.instances)[1] < costs_on(demand, COSTS, 1)[1]


def test_modes_and_what_forbids_it() -> None:
    demand = demand_of(0, engines=1)
    assert not choose_prefix(demand, COSTS).on
    assert choose_prefix(demand, COSTS, mode="on").on
    assert choose_prefix(demand_of(1024), COSTS).on and not choose_prefix(demand_of(1024), COSTS, mode="off").on
    short = choose_prefix(demand_of(1024), COSTS, mode="on", page_bytes=2**20, cap_bytes=100 * 2**20)
    assert not short.on and "need 160 MB of the object store and may take 100 MB" in short.reason
    nothing = replace(demand, distinct_pages=0, distinct_tokens=0)
    assert not choose_prefix(nothing, COSTS, mode="on").on
    with pytest.raises(ValueError, match="auto, on, off"):
        choose_prefix(demand, COSTS, mode="maybe")
    with pytest.raises(ValueError, match="at least one engine"):
        choose_prefix(replace(demand, off_tokens=np.empty(0)), COSTS)


def test_costs_are_fitted_and_survive_a_checkpoint() -> None:
    speed, rng = PrefixSpeed.first_guess(1e-5, 2**14), np.random.default_rng(0)
    for _ in range(40):
        tokens, pages = int(rng.integers(100, 5000)), int(rng.integers(5, 300))
        speed.observe_job(tokens, pages, 0.004 + 1e-4 * tokens, 2e-4 * pages)
        speed.observe_fetch(pages, 0.003 + 5e-5 * pages, pages, 8e-5 * pages)
        speed.observe_step(0.02)
    found = speed.costs()
    assert found.prefill_token_s == pytest.approx(1e-4, rel=0.05) and found.load_page_s == pytest.approx(8e-5, rel=0.1)
    assert found.save_page_s == pytest.approx(2e-4, rel=0.1) and found.fetch_page_s == pytest.approx(5e-5, rel=0.1)
    again = PrefixSpeed.first_guess(1e-5, 2**14)
    again.restore(speed.state())
    assert again.costs() == found


def test_a_service_that_pays_without_a_header_says_so() -> None:
    """One engine computes a prompt's rest for every response. A longer header only moves pages there."""
    rest = PrefixDemand(32, 1000, 40, 320, np.array([8000.0]), np.array([100.0]), np.array([40.0]), np.array([40.0]))
    choice = choose_prefix(rest, PrefixCosts(1e-3, 1e-5, 1e-5, 1e-5))
    assert choice.on and choice.break_even_tokens == 0 and "pays from a shared header of 0 tokens" in choice.reason
