from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from placement.lengths import LengthForecaster, forecast_error


def visit(forecaster: LengthForecaster, prompt: int, size: int, lengths: list[float]) -> None:
    forecaster.observe([prompt], [size], [np.array(lengths)])


def test_nothing_seen_is_the_default() -> None:
    found = LengthForecaster(128.0).forecast([3, 9], [5, 500])
    np.testing.assert_array_equal(found, [128.0, 128.0])
    assert len(LengthForecaster(128.0).forecast([], [])) == 0


def test_history_is_an_exponential_mean_of_group_means() -> None:
    forecaster = LengthForecaster(100.0, weight=0.25)
    groups = [[10.0, 30.0], [40.0], [0.0, 8.0]]
    expected = None
    for group in groups:
        visit(forecaster, 7, 12, group)
        mean = sum(group) / len(group)
        expected = mean if expected is None else 0.75 * expected + 0.25 * mean
        assert forecaster.forecast([7], [999])[0] == pytest.approx(expected)


def test_a_new_prompt_is_forecast_by_the_line_through_the_others() -> None:
    rng = np.random.default_rng(0)
    forecaster = LengthForecaster(100.0)
    sizes, x, y = rng.integers(5, 60, (6, 30)), [], []
    for step in range(6):
        means = 20 + 3.0 * sizes[step] + rng.normal(0, 5, 30)
        forecaster.observe(list(range(30 * step, 30 * step + 30)), sizes[step].tolist(), [np.array([m, m]) for m in means])
        x.append(sizes[step])
        y.append(means)
    weights = np.concatenate([np.full(30, math.sqrt(forecaster.fade ** (5 - step))) for step in range(6)])
    slope, base = np.polyfit(np.concatenate(x), np.concatenate(y), 1, w=weights)
    found = forecaster.forecast([10_000, 10_001], [10, 50])
    np.testing.assert_allclose(found, base + slope * np.array([10, 50]), rtol=1e-6)
    seen = np.concatenate(y)
    assert forecaster.forecast([10_002], [10_000])[0] == pytest.approx(seen.max()), "never beyond what was seen"
    assert forecaster.forecast([10_003], [-10_000])[0] == pytest.approx(seen.min())


def test_prompts_of_one_size_give_their_mean() -> None:
    forecaster = LengthForecaster(100.0)
    forecaster.observe([0, 1], [8, 8], [np.array([10.0]), np.array([30.0])])
    assert forecaster.forecast([5], [80])[0] == pytest.approx(20.0)


VISIT = st.tuples(st.integers(0, 9), st.integers(1, 50), st.lists(st.integers(1, 300), min_size=1, max_size=4))


@given(st.lists(VISIT, max_size=12))
@settings(max_examples=60, deadline=None)
def test_state_survives_json(visits: list[tuple[int, int, list[int]]]) -> None:
    forecaster = LengthForecaster(64.0)
    for prompt, size, lengths in visits:
        visit(forecaster, prompt, size, lengths)
    copy = LengthForecaster(64.0)
    copy.restore(json.loads(json.dumps(forecaster.state())))
    asked = (list(range(12)), list(range(1, 61, 5)))
    np.testing.assert_array_equal(copy.forecast(*asked), forecaster.forecast(*asked))
    for both in (copy, forecaster):
        visit(both, 3, 7, [11.0])
    np.testing.assert_array_equal(copy.forecast(*asked), forecaster.forecast(*asked))
    assert (forecaster.forecast(*asked) > 0).all()


def test_an_empty_step_teaches_nothing() -> None:
    forecaster = LengthForecaster(64.0)
    forecaster.observe([], [], [])
    assert forecaster.forecast([1], [1])[0] == 64.0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=30))
@settings(deadline=None)
def test_forecast_error_against_scipy(pairs: list[tuple[int, int]]) -> None:
    forecast, lengths = (np.array(x, float) for x in zip(*pairs, strict=True))
    found = forecast_error(forecast, lengths)
    assert found.mae_tokens == pytest.approx(np.mean([abs(a - b) for a, b in pairs]))
    assert found.bias_tokens == pytest.approx(np.mean([a - b for a, b in pairs]))
    if len(set(forecast)) == 1 or len(set(lengths)) == 1:
        assert found.spearman is None
    else:
        assert found.spearman == pytest.approx(spearmanr(forecast, lengths).statistic)
