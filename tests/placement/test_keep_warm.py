from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.scaling.keep_warm import hold_slot, keep_alive, prewarm, start_cost
from placement.scaling.resize_policy import Park, Release

GAPS = st.lists(st.one_of(st.floats(0, 100), st.just(math.inf)), min_size=3, max_size=12)


def cost_of(gaps: list[float], keep_s: float, hold: float, start: float) -> float:
    """By hand: every gap pays for the time it was held, and a start if it outlasted that."""
    return float(np.mean([hold * gap if gap <= keep_s else hold * keep_s + start for gap in gaps]))


@given(GAPS, st.floats(0.01, 10), st.floats(0.01, 100))
def test_keeps_warm_as_long_as_would_have_been_cheapest(gaps: list[float], hold: float, start: float) -> None:
    found = keep_alive(gaps, hold, start)
    kept = found.keep_s if isinstance(found, Park) else 0.0
    every = [cost_of(gaps, t, hold, start) for t in [0.0, *np.linspace(0, 101, 200)]]
    assert cost_of(gaps, kept, hold, start) <= min(every) + 1e-9
    assert found.reason


@given(st.floats(0.01, 10), st.floats(0.01, 100), st.floats(0, 1000))
@settings(deadline=None)
def test_without_history_never_more_than_twice_hindsight(hold: float, start: float, gap: float) -> None:
    found = keep_alive([], hold, start)
    assert isinstance(found, Park) and found.keep_s == pytest.approx(start / hold)
    assert cost_of([gap], found.keep_s, hold, start) <= 2 * min(hold * gap, start) + 1e-9


def test_ends_of_the_price() -> None:
    assert keep_alive([1, 2, 3], 0.0, 5.0).keep_s == math.inf
    assert isinstance(keep_alive([1, 2, 3], 1.0, 0.0), Release)
    assert isinstance(keep_alive([100, 200, math.inf], 1.0, 5.0), Release)
    for wrong in (([-1.0], 1, 1), ([1.0], -1, 1), ([float("nan")], 1, 1)):
        with pytest.raises(ValueError, match="negative"):
            keep_alive(*wrong)


def test_a_start_on_the_critical_path_is_worth_more_warmth() -> None:
    """The same slot-seconds, but a second of the step is worth something: it is held longer."""
    hidden, open_ = start_cost(10, 1.0, 0.0), start_cost(10, 1.0, 4.0)
    assert (hidden, open_) == (10, 50)
    assert keep_alive([], 1.0, open_).keep_s > keep_alive([], 1.0, hidden).keep_s
    assert hold_slot(30, 1.0, hidden).action == "Release" and hold_slot(30, 1.0, open_).action == "Hold"


@pytest.mark.parametrize(("hold", "value_per_s"), [(1.0, 1.0), (1.0, 20.0), (5.0, 1.0)])
def test_prewarm_starts_when_the_expected_loss_is_least(hold: float, value_per_s: float) -> None:
    """Against a search over lead times on sampled phases and starts."""
    rng = np.random.default_rng(0)
    ends, starts = rng.normal(100, 6, 200_000), rng.normal(15, 2, 200_000)

    def loss(at: float) -> float:
        early = ends - (at + starts)
        return float(np.mean(np.where(early > 0, hold * early, -value_per_s * early)))

    found = prewarm(100, 6, 15, 2, hold, value_per_s)
    best = min((loss(at), at) for at in np.arange(60, 110, 0.25))
    assert loss(found.at_s) <= best[0] * 1.01
    assert found.at_s == pytest.approx(best[1], abs=0.6)


def test_prewarm_is_never_in_the_past_and_needs_a_price() -> None:
    assert prewarm(3, 1, 15, 2, 1, 10).at_s == 0
    assert prewarm(100, 6, 15, 2, 1, 1).margin_s == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="nor both 0"):
        prewarm(1, 1, 1, 1, 0, 0)
