"""Corrections of predictions: sums come out right by size, intervals hold their share, and outliers move nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from placement.measurements.correction import FAR_IN_A_ROW, Correction
from placement.measurements.registry import Measurements


def drawn(correction: Correction, count: int, seed: int, factor: float = 1.25, spread: float = 0.15, slope: float = 0.0) -> None:
    """Observe measurements that are `factor` times the prediction (at size 1), with log-normal noise."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size = float(np.exp(rng.normal(0, 1)))
        correction.observe(size, size * factor * size**slope * float(np.exp(rng.normal(0, spread))))


def test_before_any_record_a_prediction_stands() -> None:
    correction = Correction()
    assert correction.correct(3.0) == 3.0 and correction.accuracy() is None
    low, high = correction.interval(3.0, 0.9)
    assert low < 3.0 < high


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8])
def test_corrected_sums_are_right_and_intervals_hold_their_share(factor: float) -> None:
    records, bias, half, most = 0, [], [], []
    for seed in range(12):
        correction = Correction()
        drawn(correction, 100, seed, factor)
        found = correction.accuracy(60)
        assert found is not None and found.records == 60
        bias.append(found.bias)
        half.append(found.coverage_50)
        most.append(found.coverage_90)
        records += found.records
    assert records == 720
    assert abs(np.mean(bias)) < 0.03, "for any factor"
    assert 0.45 < np.mean(half) < 0.6 and 0.86 < np.mean(most) < 0.97


def test_an_error_that_grows_with_the_size_is_corrected_by_size() -> None:
    correction = Correction()
    drawn(correction, 128, 0, factor=1.0, spread=0.02, slope=0.3)
    for size in (0.5, 1.0, 2.0):
        assert correction.factor(size) == pytest.approx(size**0.3, rel=0.12)
    assert correction.factor(2.0) > 1.2 * correction.factor(0.5)


def test_one_stall_moves_the_factor_little() -> None:
    correction = Correction()
    drawn(correction, 40, 1, factor=1.0, spread=0.05)
    before = correction.factor(1.0)
    correction.observe(1.0, 50.0)
    assert correction.factor(1.0) == pytest.approx(before, rel=0.1)


def test_a_change_of_the_machine_is_followed() -> None:
    correction = Correction()
    drawn(correction, 60, 2, factor=1.0, spread=0.05)
    drawn(correction, 40, 3, factor=2.0, spread=0.05)
    assert correction.factor(1.0) == pytest.approx(2.0, rel=0.1)


def test_what_is_no_measurement_is_ignored() -> None:
    correction = Correction()
    for predicted, measured in ((0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf")), (-1.0, 2.0)):
        correction.observe(predicted, measured)
    assert correction.accuracy() is None and correction.factor(1.0) == 1.0


def test_state_survives_json() -> None:
    correction, copy = Correction(), Correction()
    drawn(correction, 30, 4)
    copy.restore(json.loads(json.dumps(correction.state())))
    assert copy.interval(1.7, 0.9) == correction.interval(1.7, 0.9) and copy.accuracy() == correction.accuracy()
    empty = Correction()
    empty.restore(json.loads(json.dumps(Correction().state())))
    assert empty.accuracy() is None and empty.correct(2.0) == 2.0


def test_deciles_are_even_where_intervals_are_calibrated() -> None:
    counts = []
    for seed in range(12):
        correction = Correction()
        drawn(correction, 128, seed, factor=1.4)
        found = correction.accuracy()
        assert found is not None and sum(found.deciles) == pytest.approx(1)
        counts.append(found.deciles)
    np.testing.assert_allclose(np.mean(counts, 0), 0.1, atol=0.04)


def test_what_a_fit_missed_is_judged_without_a_correction() -> None:
    missed = Correction(is_applied=False)
    for _ in range(20):
        missed.observe(1.0, 2.0)
    found = missed.accuracy()
    assert found is not None and found.bias == pytest.approx(-0.5), "the prediction that was used is the fit's"


def test_states_of_runs_before_there_were_levels_keep_their_corrections() -> None:
    correction, copy = Correction(), Correction()
    drawn(correction, 30, 5)
    state = correction.state()
    state["made"] = [[row[0], row[1], 1.0, 1.0] for row in state["made"]]
    copy.restore(state)
    assert copy.factor(1.0) == correction.factor(1.0) and copy.accuracy() is None


def test_forecasts_that_stay_far_off_are_named_once() -> None:
    terms, rng = Measurements(), np.random.default_rng(6)
    for _ in range(40):
        terms.rollout.observe(1.0, float(np.exp(rng.normal(0, 0.05))))
    assert terms.take_far_off() == []
    growing = [2.0 * 1.5**k for k in range(2 * FAR_IN_A_ROW)]  # no correction can follow it
    said = [terms.take_far_off() for measured in growing for _ in [terms.rollout.observe(1.0, measured)]]
    assert [len(sentences) for sentences in said] == [0] * (FAR_IN_A_ROW - 1) + [1] + [0] * FAR_IN_A_ROW, "once, at the tenth"
    assert "rollout time: the last 10 forecasts were off by more than 2 times their 90 % interval" in said[FAR_IN_A_ROW - 1][0]


def test_a_new_level_that_the_correction_finds_is_not_far_off() -> None:
    terms, rng = Measurements(), np.random.default_rng(7)
    for level in (1.0, 3.0):
        for _ in range(60):
            terms.rollout.observe(1.0, level * float(np.exp(rng.normal(0, 0.05))))
    assert terms.take_far_off() == []


def test_ten_responses_in_a_row_outside_twice_their_interval_are_told_once() -> None:
    terms, rng = Measurements(), np.random.default_rng(8)
    forecast = rng.normal(100, 10, (12, 400))  # 90 % from 84 to 116
    terms.observe_lengths(forecast, np.full(12, 125.0))
    assert terms.take_far_off() == [], "outside the interval, but not twice as far"
    terms.observe_lengths(forecast, np.r_[np.full(9, 300.0), 100.0, 300.0, 300.0])
    assert terms.take_far_off() == [], "nine in a row"
    terms.observe_lengths(forecast, np.full(12, 300.0))
    assert len(terms.take_far_off()) == 1 and terms.take_far_off() == []


def test_every_predicted_quantity_shows_its_accuracy() -> None:
    terms = Measurements()
    other = Measurements().score
    terms.include(lambda: {"update on 1 slot": other})
    for _ in range(8):
        terms.step.observe(2.0, 2.2)
        terms.score.observe(10.0, 0.3)
        other.observe(0.0, 1.0)
        terms.settle()
        other.settle()
    found = terms.accuracies()
    assert set(found) == {"step", "score", "update on 1 slot"}
    assert found["step"].records == 8 and found["score"].records == 7, "the seed of a fit is not judged"
