"""Start times and preemption rates of pools."""

from __future__ import annotations

import json

import numpy as np
import pytest

from placement.measurements.pool_times import PreemptionRate
from placement.measurements.registry import Measurements
from placement.pools import OWN, PoolKind

pytestmark = pytest.mark.pure
POOLS = (PoolKind("spot", {"market": "spot"}, preempt_per_hour=2.0), PoolKind(OWN))


def test_rate_is_the_prior_first_and_what_was_observed_in_the_end() -> None:
    rate = PreemptionRate(2.0)
    assert rate.per_hour == pytest.approx(2.0)
    rate.observe(3600.0, 0)
    assert 0 < rate.per_hour < 2.0, "an hour without a preemption"
    drawn = np.random.default_rng(0).poisson(6.0, 500)
    for count in drawn:
        rate.observe(3600.0, int(count))
    assert rate.per_hour == pytest.approx(drawn.mean(), rel=0.01)


def test_pool_without_prior_has_no_preemptions_until_one_is_observed() -> None:
    rate = PreemptionRate()
    rate.observe(1800.0, 0)
    assert rate.per_hour == 0.0
    rate.observe(1800.0, 1)
    assert rate.per_hour == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least 0"):
        PreemptionRate(-1.0)


def test_each_pool_has_its_own_start_and_its_state_survives() -> None:
    terms = Measurements()
    terms.pools.expect(POOLS)
    for _ in range(3):
        terms.pools.observe_start("spot", 40.0)
        terms.cold_start.observe(0.0, 8.0)
    terms.pools.rates["spot"].observe(7200.0, 9)
    assert terms.pools.start_s("spot", terms.cold_start) == pytest.approx(40.0)
    assert terms.pools.start_s(OWN, terms.cold_start) == pytest.approx(8.0), "that of any pool"
    again = Measurements()
    again.restore(json.loads(json.dumps(terms.state())))
    again.pools.expect(POOLS)
    assert again.pools.preempt_per_hour("spot") == terms.pools.preempt_per_hour("spot") > 2.0
    assert again.pools.start_s("spot", again.cold_start) == pytest.approx(40.0) and again.pools.preempt_per_hour(OWN) == 0.0
