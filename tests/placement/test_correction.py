"""Corrections of predictions: sums come out right by size, intervals hold their share, and outliers move nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from placement.measurements.correction import Correction


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
