"""What three seeds are judged by."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.three_seeds import ResponseLengths, Seed, r_squared, targets


def seed(number: int, sampled: tuple[float, float], greedy: tuple[float, float], rewards: list[float]) -> Seed:
    lengths = ResponseLengths(p50=20.0, p99=90.0, r2=0.4)
    before, after = ({"sampled": sampled[i], "greedy": greedy[i]} for i in (0, 1))
    return Seed(number, 100.0, 90.0, 5000.0, before, after, rewards, lengths, lengths, None)


RISING, FLAT = list(np.linspace(0.4, 0.7, 60)), [0.7] * 30 + [0.7, 0.69] * 15


def test_means_and_the_least_seed_are_both_judged() -> None:
    seeds = [seed(0, (0.4, 0.7), (0.5, 0.7), RISING), seed(1, (0.4, 0.48), (0.5, 0.6), RISING)]
    found = {target.name: target for target in targets(seeds)}
    assert found["mean rise, sampled"].value == pytest.approx(19) and not found["mean rise, sampled"].met
    assert found["least rise of a seed, sampled"].value == pytest.approx(8)
    assert not found["least rise of a seed, sampled"].met
    assert found["mean rise, greedy"].value == pytest.approx(15) and found["mean rise, greedy"].met
    assert found["least rise of a seed, greedy"].value == pytest.approx(10) and found["least rise of a seed, greedy"].met


def test_a_curve_rises_or_has_arrived() -> None:
    assert seed(0, (0.4, 0.7), (0.5, 0.7), RISING).still_rises
    assert not seed(0, (0.4, 0.7), (0.5, 0.7), FLAT).still_rises
    assert seed(0, (0.4, 0.9), (0.5, 0.96), FLAT).still_rises


def test_slope_is_in_points_per_hundred_steps() -> None:
    slope, error = seed(0, (0, 1), (0, 1), [0.002 * i for i in range(90)]).slope
    assert slope == pytest.approx(20.0) and error == pytest.approx(0.0, abs=1e-9)


def test_r_squared_against_least_squares() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    y = 2 * x + rng.normal(size=200)
    fitted = np.polyval(np.polyfit(x, y, 1), x)
    assert r_squared(x, y) == pytest.approx(1 - ((y - fitted) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    assert r_squared(x, np.ones(200)) == 0.0
