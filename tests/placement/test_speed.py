from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.speed.decode_speed import Speed, SpeedFit


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.floats(0, 0.1), st.floats(0, 0.01))
@settings(deadline=None)
def test_rollout_time_is_the_sum_of_its_steps(lengths: list[int], base: float, per_seq: float) -> None:
    steps = range(max(lengths))
    by_hand = sum(base + per_seq * sum(length > step for length in lengths) for step in steps)
    assert Speed(base, per_seq).rollout_s(np.array(lengths)) == pytest.approx(by_hand, abs=1e-12)


def test_nothing_takes_no_time() -> None:
    assert Speed(1.0, 1.0).rollout_s(np.empty(0)) == 0.0


def records(rng: np.random.Generator, base: float, per_seq: float, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Timings around the truth, 1 % of them hiccups of twenty times as long."""
    running = rng.integers(1, 129, count)
    seconds = (base + per_seq * running) * rng.normal(1, 0.03, count)
    seconds[rng.choice(count, count // 100, replace=False)] *= 20
    return running, seconds


@pytest.mark.parametrize(("base", "per_seq"), [(0.0085, 30e-6), (0.002, 2e-4)])
def test_recovers_the_truth_from_noise_and_outliers(base: float, per_seq: float) -> None:
    rng = np.random.default_rng(1)
    fit = SpeedFit(Speed(1.0, 1.0))
    for _ in range(10):
        fit.observe(*records(rng, base, per_seq))
    assert fit.speed.base_s == pytest.approx(base, rel=0.1)
    assert fit.speed.per_seq_s == pytest.approx(per_seq, rel=0.1)


def test_follows_a_machine_that_slows_down() -> None:
    rng = np.random.default_rng(2)
    fit = SpeedFit(Speed(1.0, 1.0))
    for base in [0.01] * 10 + [0.03] * 15:
        fit.observe(*records(rng, base, 1e-4))
    assert fit.speed.base_s == pytest.approx(0.03, rel=0.15)


def test_a_step_without_context_takes_time_whatever_the_records_say() -> None:
    """Their times grow faster than the context, so a fit gives all of them to it. The planner has no use for such a speed."""
    rng, fit = np.random.default_rng(3), SpeedFit(Speed(0.003, 5e-5, 1e-8))
    for _ in range(3):
        running, context = rng.integers(1, 9, 40), rng.integers(100, 4000, 40)
        fit.observe(running, 1e-9 * context.astype(float) ** 2, context)
        assert fit.speed.step_s(1) > 1e-5


def test_few_records_change_nothing() -> None:
    fit = SpeedFit(Speed(0.01, 1e-4))
    fit.observe(np.arange(1, 8), np.ones(7))
    assert fit.speed == Speed(0.01, 1e-4)


def test_steps_that_are_all_alike() -> None:
    """One load only: the split into base and slope is unknown, the time at that load is not."""
    fit = SpeedFit(Speed(1.0, 1.0))
    fit.observe(np.full(50, 8), np.full(50, 0.02))
    assert fit.speed.base_s + 8 * fit.speed.per_seq_s == pytest.approx(0.02)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 1.0)), min_size=8, max_size=60))
@settings(max_examples=60, deadline=None)
def test_never_negative(pairs: list[tuple[int, float]]) -> None:
    running, seconds = (np.array(x) for x in zip(*pairs, strict=True))
    fit = SpeedFit(Speed(0.01, 1e-4))
    fit.observe(running, seconds)
    assert fit.speed.base_s >= 0 and fit.speed.per_seq_s >= 0
    assert fit.speed.base_s + fit.speed.per_seq_s > 0


def test_state_survives_json() -> None:
    rng = np.random.default_rng(3)
    fit, copy = SpeedFit(Speed(1.0, 1.0)), SpeedFit(Speed(2.0, 2.0))
    fit.observe(*records(rng, 0.01, 1e-4))
    copy.restore(json.loads(json.dumps(fit.state())))
    assert copy.speed == fit.speed
    more = records(rng, 0.02, 1e-4)
    fit.observe(*more)
    copy.observe(*more)
    assert copy.speed == fit.speed
