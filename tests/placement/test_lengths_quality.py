from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from placement.forecast.forecaster import LengthForecaster, forecast_quality
from placement.forecast.quality import LengthRanks, auc_longest
from placement.forecast.residuals import Shape


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=30))
@settings(deadline=None)
def test_point_errors_and_ranks_against_scipy(pairs: list[tuple[int, int]]) -> None:
    forecast, lengths = (np.array(x, float) for x in zip(*pairs, strict=True))
    found = forecast_quality(np.stack([forecast, forecast], axis=1), lengths)
    assert found.mae_tokens == pytest.approx(np.mean([abs(a - b) for a, b in pairs]))
    assert found.bias_tokens == pytest.approx(np.mean([a - b for a, b in pairs]))
    if len(set(forecast)) == 1 or len(set(lengths)) == 1:
        assert found.spearman is None
    else:
        assert found.spearman == pytest.approx(spearmanr(forecast, lengths).statistic)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=4, max_size=40), st.sampled_from([0.1, 0.3, 0.5]))
@settings(deadline=None)
def test_auc_against_counting_pairs(pairs: list[tuple[int, int]], share: float) -> None:
    forecast, lengths = (np.array(x, float) for x in zip(*pairs, strict=True))
    found = auc_longest(forecast, lengths, share)
    if len(set(lengths)) == 1:
        assert found is None
        return
    threshold = sorted(lengths)[-max(1, round(share * len(lengths)))]
    longest = lengths >= threshold
    if longest.all():
        longest = lengths > threshold
    wins = [(a > b) + (a == b) / 2 for a in forecast[longest] for b in forecast[~longest]]
    assert found == pytest.approx(np.mean(wins))


def test_the_true_distribution_is_calibrated_and_a_narrow_or_shifted_one_is_not() -> None:
    rng = np.random.default_rng(0)
    center = rng.normal(5, 0.5, 4000)
    lengths = np.exp(center + rng.normal(0, 0.4, 4000))
    good, narrow, shifted = (
        forecast_quality(np.exp(center[:, None] + m + rng.normal(0, sd, (4000, 64))), lengths) for m, sd in ((0, 0.4), (0, 0.2), (0.3, 0.4))
    )
    assert good.coverage_50 == pytest.approx(0.5, abs=0.02) and good.coverage_90 == pytest.approx(0.9, abs=0.015)
    assert good.pit_error < 0.03 and max(good.pit_deciles) < 0.12
    assert sum(good.pit_deciles) == pytest.approx(1)
    assert narrow.coverage_50 < 0.3 and narrow.pit_deciles[0] > 0.2 < narrow.pit_deciles[9]
    assert shifted.bias_tokens > 20 and shifted.pit_error > 0.2
    assert good.max_ratio == pytest.approx(1, abs=0.3)


def test_few_scenarios_are_not_called_overconfident() -> None:
    """With 4 draws the ranks are coarse; each gap between them has a fifth of the probability."""
    rng = np.random.default_rng(1)
    found = forecast_quality(rng.normal(100, 9, (20_000, 4)), rng.normal(100, 9, 20_000))
    np.testing.assert_allclose(found.pit_deciles, 0.1, atol=0.01)
    assert (found.coverage_50, found.coverage_90) == (pytest.approx(0.5, abs=0.01), pytest.approx(0.9, abs=0.01))


def test_lengths_at_the_limit_are_no_misses_where_that_was_forecast() -> None:
    rng = np.random.default_rng(2)
    draw = lambda *shape: np.minimum(np.exp(rng.normal(5, 0.5, shape)), 150)  # noqa: E731
    found = forecast_quality(draw(4000, 64), draw(4000))
    assert found.pit_error < 0.03
    assert found.coverage_90 == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("scenarios", "lengths"), [(np.ones(3), np.ones(3)), (np.ones((3, 2)), np.ones(2)), (np.ones((0, 2)), np.ones(0))])
def test_mistakes_are_named(scenarios: np.ndarray, lengths: np.ndarray) -> None:
    with pytest.raises(ValueError, match="scenarios"):
        forecast_quality(scenarios, lengths)


def two_peaks(rng: np.random.Generator, prompts: int, samples: int) -> list[np.ndarray]:
    """Draw short answers of exactly 7 tokens, and long ones: no smooth distribution of log length fits them."""
    return [np.where(rng.random(samples) < 0.4, 7, np.rint(np.exp(rng.normal(4.2, 0.25, samples)))) for _ in range(prompts)]


def coverage_after(steps: int, calibrated: bool) -> tuple[float, float]:
    """Return what the intervals cover in the last half of the steps."""
    rng, forecaster, found = np.random.default_rng(3), LengthForecaster(60.0, max_tokens=512), []
    for step in range(steps):
        prompts, lengths = rng.choice(500, 32, replace=False).tolist(), two_peaks(rng, 32, 8)
        scenarios = forecaster.scenarios(prompts, [20] * 32, 8, 64, step)
        quality = forecast_quality(scenarios, np.concatenate(lengths))
        found.append((quality.coverage_50, quality.coverage_90))
        if calibrated:
            forecaster.calibrate(LengthRanks.of(scenarios, np.concatenate(lengths)))
        forecaster.observe(prompts, [20] * 32, lengths)
    half, most = np.mean(found[steps // 2 :], axis=0)
    return float(half), float(most)


def test_intervals_are_calibrated_by_what_earlier_ones_missed() -> None:
    half, most = coverage_after(30, calibrated=True)
    alone, _ = coverage_after(30, calibrated=False)
    assert abs(half - 0.5) < 0.5 * abs(alone - 0.5), (half, alone)
    assert 0.86 < most < 0.97


def test_calibration_survives_json_and_old_states_have_none() -> None:
    rng, one, other = np.random.default_rng(0), LengthForecaster(60.0), LengthForecaster(60.0)
    lengths = two_peaks(rng, 16, 8)
    one.observe(range(16), [20] * 16, lengths)
    one.calibrate(LengthRanks.of(one.scenarios(range(16), [20] * 16, 8, 32, 0), np.concatenate(lengths)))
    state = json.loads(json.dumps(one.state()))
    other.restore(state)
    assert (other.scenarios(range(16), [20] * 16, 8, 8, 1) == one.scenarios(range(16), [20] * 16, 8, 8, 1)).all()
    del state["calibration"]
    other.restore(state)
    assert (np.diff(other.calibration) > 0).all() and other.calibration[-1] == 1
    assert (other.scenarios(range(16), [20] * 16, 8, 8, 1) != one.scenarios(range(16), [20] * 16, 8, 8, 1)).any()


def test_a_recalibrated_shape_has_the_shares_it_was_told() -> None:
    rng, levels = np.random.default_rng(1), np.linspace(0, 1, 11)
    shape = Shape(rng.normal(size=2000))
    assert np.allclose(shape.recalibrated(levels, levels).quantile(levels[1:-1]), shape.quantile(levels[1:-1]), atol=0.01)
    shares = np.cumsum([0.0, 0.2, 0.2, 0.05, 0.05, 0.05, 0.05, 0.1, 0.1, 0.1, 0.1])
    other = shape.recalibrated(levels, shares)
    below = 1 - np.exp(-other.hazard(shape.quantile(levels[1:-1])))
    assert np.allclose(below, shares[1:-1], atol=0.01)
    z = np.linspace(-2.5, 6, 60)
    assert np.allclose(other.inverse(other.hazard(z)), z, atol=0.02) and (np.diff(other.hazard(z)) > 0).all()
    grid = np.linspace(-6, 6, 20001)
    assert np.trapezoid(np.exp(other.log_density(grid)), grid) == pytest.approx(1, abs=0.02)
