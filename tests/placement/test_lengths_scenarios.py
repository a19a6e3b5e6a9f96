from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp, norm

from placement.forecast.residuals import Shape
from placement.forecast.scenarios import LengthForecast, Scenarios

NORMAL = Shape(norm.ppf((np.arange(4000) + 0.5) / 4000))


def revise(scenarios: np.ndarray, generated: np.ndarray, finished_lengths: np.ndarray | None = None) -> np.ndarray:
    return Scenarios.from_matrix(scenarios).revise(generated, finished_lengths)


def forecast(
    prompts: int, samples: int, seed: int = 0, sd: float = 0.7, spread: float = 0.45, drift: float = 0.2, **more
) -> LengthForecast:
    center = np.random.default_rng(seed).normal(5, 0.4, prompts)
    n = prompts * samples
    return LengthForecast(
        np.repeat(center, samples),
        np.full(n, spread),
        np.repeat(np.arange(prompts), samples),
        np.full(prompts, sd),
        drift,
        NORMAL,
        more.pop("shape", NORMAL),
        **more,
    )


# ---- the shape of residuals --------------------------------------------------------------------------------------


def test_the_shape_of_normal_residuals_is_normal() -> None:
    z = np.linspace(-2.5, 1.8, 40)
    np.testing.assert_allclose(np.exp(-NORMAL.hazard(z)), norm.sf(z), atol=0.006)
    np.testing.assert_allclose(np.exp(NORMAL.log_density(z)), norm.pdf(z), atol=0.01)
    levels = np.linspace(0.01, 0.96, 30)
    np.testing.assert_allclose(NORMAL.quantile(levels), norm.ppf(levels), atol=0.04)


@given(st.integers(0, 1000), st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_a_shape_is_a_distribution(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(rng.gamma(rng.uniform(0.3, 5), 1, count) - 1)
    z = np.linspace(-9, 30, 3000)
    hazard = shape.hazard(z)
    assert (np.diff(hazard) >= -1e-4).all(), "survival falls"
    levels = np.linspace(0.02, 14, 500)
    np.testing.assert_allclose(shape.hazard(shape.inverse(levels)), levels, atol=0.05)  # not the reverse: there may be gaps
    assert (np.diff(shape.inverse(np.linspace(0.001, 40, 500))) >= 0).all()


def test_what_outlives_everything_seen_goes_on_in_proportion() -> None:
    """Beyond the data the hazard is constant: Hill's index, here of residuals with an exponential tail of mean one half."""
    shape = Shape(np.random.default_rng(0).exponential(0.5, 100_000))
    assert shape.tail == pytest.approx(0.5, rel=0.06)
    for z in (4.0, 8.0, 20.0):
        assert shape.hazard(np.array([z + 1.0]))[0] - shape.hazard(np.array([z]))[0] == pytest.approx(1 / shape.tail, rel=0.02)


# ---- draws -------------------------------------------------------------------------------------------------------


def test_row_means_are_those_of_the_distribution_also_with_few_scenarios() -> None:
    predicted = forecast(40, 8)
    expected = np.exp(predicted.center + (0.7**2 + 0.45**2 + 0.2**2) / 2)  # of a lognormal
    np.testing.assert_allclose(predicted.mean_tokens(), expected, rtol=0.05)
    many = np.mean([predicted.draw(64, seed).lengths.mean(1) for seed in range(60)], axis=0)
    np.testing.assert_allclose(many, expected, rtol=0.06)
    few = predicted.draw(64, 0).lengths.mean(1) / expected - 1
    plain = np.exp(np.random.default_rng(0).normal(0, np.sqrt(0.7**2 + 0.45**2 + 0.2**2), (320, 64))).mean(1)
    assert few.std() < 0.5 * (plain / plain.mean()).std(), "stratified rows are far steadier than independent draws"


def test_quantiles_are_those_of_many_draws() -> None:
    predicted = forecast(3, 2, max_tokens=700)
    levels = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    drawn = np.quantile(predicted.draw(40_000, 1).lengths, levels, axis=1).T
    np.testing.assert_allclose(predicted.quantiles(levels), drawn, rtol=0.03)


def test_a_seed_is_a_draw() -> None:
    predicted = forecast(5, 4)
    np.testing.assert_array_equal(predicted.draw(16, 3).lengths, predicted.draw(16, 3).lengths)
    assert (predicted.draw(16, 3).lengths != predicted.draw(16, 4).lengths).mean() > 0.9


# ---- revision: against brute force -------------------------------------------------------------------------------


def by_rejection(predicted: LengthForecast, generated: np.ndarray, ended: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent draws of the same model, each with the weight that what is known gives it: survivors must have survived,
    and for the ended ones the density of their length. Returns lengths (n, draws) and weights (draws,)."""
    rng = np.random.default_rng(11)
    prompts = len(predicted.prompt_sd)
    shared = rng.normal(0, 1, (prompts, draws)) * predicted.prompt_sd[:, None] + rng.normal(0, predicted.drift_sd, draws)
    location = predicted.center[:, None] + shared[predicted.group]
    log = location + rng.normal(0, 1, location.shape) * predicted.spread[:, None]
    done = ~np.isnan(ended)
    running = (log > np.log(np.maximum(generated, 1e-9))[:, None]) | done[:, None]
    weight = running.all(0).astype(float)
    z = (np.log(ended[done])[:, None] - location[done]) / predicted.spread[done][:, None]
    return np.exp(log), weight * np.exp(-0.5 * (z**2).sum(0))


@pytest.mark.parametrize(
    ("generated", "ended"),
    [
        ([150, 0], [np.nan, np.nan]),
        ([150, 150], [np.nan, np.nan]),
        ([200, 90], [np.nan, 90]),
        ([60, 500], [np.nan, 500]),
        ([400, 400], [np.nan, np.nan]),
    ],
)
def test_conditioning_against_rejection_sampling(generated: list[float], ended: list[float]) -> None:
    """One prompt of two responses, and a drift: survival and a sibling's length, as importance weights say it."""
    predicted = LengthForecast(np.full(2, 5.0), np.full(2, 0.45), np.zeros(2, int), np.array([0.7]), 0.2, NORMAL, NORMAL)
    so_far, done = np.array(generated, float), np.array(ended, float)
    found = predicted.draw(4000, 0).revise(so_far, done)
    lengths, weight = by_rejection(predicted, so_far, done, 400_000)
    for row in np.flatnonzero(np.isnan(done)):
        assert (found[row] > so_far[row]).all()
        order = np.argsort(lengths[row])
        cumulative = np.cumsum(weight[order]) / weight.sum()
        expected = lengths[row][order][np.searchsorted(cumulative, [0.1, 0.25, 0.5, 0.75, 0.9])]
        np.testing.assert_allclose(np.quantile(found[row], [0.1, 0.25, 0.5, 0.75, 0.9]), expected, rtol=0.06)


def test_survival_alone_is_exact() -> None:
    """Where only the own effect is uncertain, revised draws are those of the distribution beyond what was generated."""
    alone = LengthForecast(np.full(1, 5.0), np.full(1, 0.5), np.zeros(1, int), np.zeros(1), 0.0, NORMAL, NORMAL)
    many = alone.draw(60_000, 1).lengths[0]
    found = alone.draw(20_000, 2).revise(np.array([220.0]))[0]
    assert ks_2samp(found, many[many > 220]).statistic < 0.02


def test_the_drift_is_learnt_from_the_batch() -> None:
    """Every response comes 30 % longer than forecast: prompts of which nothing is known yet are revised too."""
    predicted = forecast(60, 4, sd=0.1, drift=0.3)
    drawn = predicted.draw(64, 0)
    truth = np.exp(predicted.center + 0.262 + np.random.default_rng(5).normal(0, np.hypot(0.1, 0.45), 240))
    ended = np.where(predicted.group < 40, truth, np.nan)
    found = drawn.revise(np.where(predicted.group < 40, truth, 0.0), ended)
    shift = np.log(found[160:]).mean() - np.log(drawn.lengths[160:]).mean()
    assert shift == pytest.approx(0.262, abs=0.08)
    assert np.log(found[160:]).mean(0).std() < 0.3 * np.log(drawn.lengths[160:]).mean(0).std(), "and is surer"


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 5), st.floats(0, 1200), st.sampled_from([np.inf, 600.0]))
@settings(max_examples=40, deadline=None)
def test_revised_scenarios_keep_what_is_known(seed: int, prompts: int, samples: int, until: float, cap: float) -> None:
    predicted = forecast(prompts, samples, seed, max_tokens=cap)
    truth = predicted.draw(1, seed + 1).lengths[:, 0].astype(float)
    drawn = predicted.draw(8, seed)
    ended = np.where(truth <= until, truth, np.nan)
    so_far = np.minimum(truth, until)
    for found, most in ((drawn.revise(so_far, ended), max(cap, truth.max())), (revise(drawn.lengths, so_far, ended), np.inf)):
        assert found.shape == (prompts * samples, 8) and np.isfinite(found).all()
        done = ~np.isnan(ended)
        np.testing.assert_allclose(found[done], np.broadcast_to(truth[done, None], found[done].shape), rtol=1e-6)
        assert (found[~done] > so_far[~done, None]).all()
        assert found.max() <= most


def test_nothing_known_changes_nothing() -> None:
    drawn = forecast(5, 3).draw(16, 0)
    np.testing.assert_array_equal(drawn.revise(np.zeros(15)), drawn.lengths)
    np.testing.assert_array_equal(revise(drawn.lengths, np.zeros(15)), drawn.lengths)


@given(st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_tokens_do_not_jump_while_little_happens(seed: int) -> None:
    """Revisions use one draw: a single token more hardly moves them."""
    drawn = forecast(30, 8, seed).draw(32, seed)
    one, two = drawn.revise(np.full(240, 100.0)), drawn.revise(np.full(240, 101.0))
    assert np.abs(np.log(two / one)).max() < 0.1


# ---- draws that come as a matrix ---------------------------------------------------------------------------------


def test_the_parts_of_a_matrix_are_found_again() -> None:
    predicted = forecast(640, 1)
    parts = Scenarios.from_matrix(predicted.draw(256, 0).lengths).forecast
    assert np.mean(parts.spread) == pytest.approx(np.hypot(0.7, 0.45), rel=0.05)
    assert parts.drift_sd == pytest.approx(0.2, rel=0.1)
    assert Scenarios.from_matrix(forecast(640, 1, drift=0.0).draw(256, 0).lengths).forecast.drift_sd < 0.1


def test_a_matrix_is_revised_as_the_draw_it_came_from() -> None:
    predicted = forecast(800, 1)
    drawn = predicted.draw(64, 0)
    truth = predicted.draw(1, 9).lengths[:, 0].astype(float)
    for until in (80.0, 200.0, 500.0):
        ended, so_far = np.where(truth <= until, truth, np.nan), np.minimum(truth, until)
        live = np.isnan(ended)
        a, b = drawn.revise(so_far, ended)[live].mean(1), revise(drawn.lengths, so_far, ended)[live].mean(1)
        assert np.corrcoef(a, b)[0, 1] > 0.95
        assert a.mean() == pytest.approx(b.mean(), rel=0.08)


def test_a_single_column_and_known_lengths_still_end_some_time() -> None:
    known = np.tile([[100.0], [300.0]], (1, 4))
    for scenarios in (known, known[:, :1]):
        found = revise(scenarios, np.array([250.0, 250.0]))
        assert (found[0] > 250).all() and found[0].max() < 1000
        assert found[1].mean() == pytest.approx(300, rel=0.6)


@pytest.mark.parametrize(
    ("scenarios", "generated", "said"),
    [
        (np.ones(3), np.zeros(3), "shape"),
        (np.ones((0, 4)), np.zeros(0), "shape"),
        (np.array([[1.0, np.inf]]), np.zeros(1), "finite"),
        (np.array([[1.0, 0.0]]), np.zeros(1), "positive"),
        (np.ones((2, 4)), np.zeros(3), "shape"),
    ],
)
def test_mistakes_are_named(scenarios: np.ndarray, generated: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        revise(scenarios, generated)
