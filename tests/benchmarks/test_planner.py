from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.common.results import Spread
from benchmarks.planner import SPEEDS, lengths_of, measure, per_n_log_n


def test_the_workload_has_the_published_share_of_variance_between_prompts() -> None:
    logs = np.log(lengths_of(80_000, 1)).reshape(-1, 8)
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / 8
    assert between / (between + within) == pytest.approx(0.65, abs=0.02)
    assert np.median(lengths_of(80_000, 1)) == pytest.approx(200, rel=0.02)


@pytest.mark.slow
def test_a_decision_is_measured_as_it_was_asked_for() -> None:
    name = next(iter(SPEEDS))
    known, drawn = measure(64, 8, 1, name, repeats=2), measure(64, 8, 4, name, repeats=2)
    assert (known.search_columns, drawn.search_columns) == (0, 4)
    for decision in (known, drawn):
        assert decision.cpu_ms.count == 2 and decision.cpu_ms.median > 0 and decision.peak_mb > 0
        assert 1 <= decision.most_actors <= 8 and decision.plans >= 1 and decision.over_bound >= 1 - 1e-9


def test_growth_is_one_for_n_log_n() -> None:
    small = replace(measure(16, 2, 1, next(iter(SPEEDS)), repeats=1), samples=1000, cpu_ms=Spread.of([2.0]))
    large = replace(small, samples=8000, cpu_ms=Spread.of([2.0 * 8 * np.log(8000) / np.log(1000)]))
    assert per_n_log_n(small, large) == pytest.approx(1)
