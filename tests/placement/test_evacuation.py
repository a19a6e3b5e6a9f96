from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.migration.evacuation import CUT_S, RESERVE_S, MoveTimes, plan_evacuation

TIMES = MoveTimes(prefill=(0.05, 1e-3), pages=(0.06, 2e-4))  # pages are faster above 12.5 tokens
CONTEXTS = np.array([10.0, 1000.0, 2000.0, 4000.0])


def test_two_minutes_and_five_seconds_of_notice_are_not_the_same() -> None:
    long, short = plan_evacuation(CONTEXTS, 120.0, TIMES), plan_evacuation(CONTEXTS, 2.0, TIMES)
    sent_s = 0.06 + 2e-4 * 7000
    assert long.wait_s == pytest.approx(120 - RESERVE_S - CUT_S - sent_s)
    assert long.reason == "the node is removed in 120 s: it works on for 117 s"
    assert short.wait_s == 0 and short.pages.tolist() == [False, False, False, True], "0.94 s are enough for the longest context only"
    assert short.reason == "the node is removed in 2.0 s: 1 by pages, 3 by prefill"


def test_without_pages_the_node_works_nearly_to_its_end() -> None:
    plan = plan_evacuation(CONTEXTS, 5.0, MoveTimes(prefill=(0.05, 1e-3)))
    assert plan.wait_s == pytest.approx(5 - RESERVE_S - CUT_S) and not plan.pages.any()
    assert plan_evacuation(CONTEXTS, 1.0, MoveTimes(prefill=(0.05, 1e-3))).wait_s == 0


def test_an_unknown_end_is_now() -> None:
    plan = plan_evacuation(CONTEXTS, None, TIMES)
    assert plan.wait_s == 0 and plan.pages.tolist() == [False, True, True, True]


@given(st.lists(st.integers(1, 10**5), max_size=30), st.floats(0, 300), st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2))
def test_what_is_sent_arrives_in_time_and_is_faster(contexts: list[int], notice_s: float, prefill: float, pages: float) -> None:
    context, times = np.array(contexts, float), MoveTimes((0.05, prefill), (0.06, pages))
    plan = plan_evacuation(context, notice_s, times)
    sent_s = 0.06 + pages * context[plan.pages].sum() if plan.pages.any() else 0.0
    assert plan.wait_s + sent_s <= max(0.0, notice_s - RESERVE_S) + 1e-6
    by_prefill, by_pages = times.seconds(context)
    assert (by_pages < by_prefill)[plan.pages].all()
    enough = plan_evacuation(context, notice_s + 10**6, times)
    assert (plan.pages <= enough.pages).all() and enough.pages.tolist() == (by_pages < by_prefill).tolist()
