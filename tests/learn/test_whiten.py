from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.learn.whiten import whiten


@given(st.integers(0, 1000), st.integers(1, 40))
def test_mean_and_variance_are_those_of_what_the_mask_names(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(3, 2, size), rng.random(size) < 0.7
    mask[0] = True
    out = whiten(x, mask)
    np.testing.assert_allclose(out[mask], (x[mask] - x[mask].mean()) / np.sqrt(max(x[mask].var(), 1e-8)), atol=1e-9)
    assert not out[~mask].any()


def test_whitened_has_mean_zero_and_variance_one_over_the_mask() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.gamma(2, 3, 500), rng.random(500) < 0.5
    out = whiten(x, mask)
    assert out[mask].mean() == pytest.approx(0, abs=1e-12)
    assert out[mask].var() == pytest.approx(1, abs=1e-12)
    only_centred = whiten(x, mask, divide=False)
    np.testing.assert_allclose(only_centred, np.where(mask, x - x[mask].mean(), 0))


def test_equal_advantages_become_zero_and_the_floor_bounds_small_ones() -> None:
    # a third is not exact: its mean and squares are rounded, and 0/0 would make noise of that
    assert np.abs(whiten(np.full(1000, 1 / 3))).max() < 1e-9
    x = np.array([1e-6, -1e-6])
    np.testing.assert_allclose(whiten(x), x * 1e4)  # 1/sqrt(1e-8), not 1/1e-6


def test_a_large_offset_costs_no_accuracy() -> None:
    x = np.random.default_rng(0).normal(size=10_000) + 1000
    np.testing.assert_allclose(whiten(x), (x - x.mean()) / x.std(), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(whiten(np.array([1e12, 1e12 + 1])), [-1, 1])


def test_nothing_and_what_is_not_finite() -> None:
    assert whiten(np.zeros(0)).shape == (0,)
    x = np.array([1.0, np.nan, 3.0], np.float32)
    out = whiten(x)
    np.testing.assert_allclose(out, [-1, np.nan, 1])
    assert out.dtype == np.float32
