"""Group advantages against a loop per group that reads like the paper's formula."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.learn.advantage import EPSILON, batch_centred, group_advantages, leave_one_out
from rlhfless_ray.learn.preference_pairs import pair_advantages

REWARD = st.one_of(st.just(math.nan), st.floats(-100, 100, allow_nan=False))


@st.composite
def reward_groups(draw: st.DrawFn) -> np.ndarray:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    cells = draw(st.lists(REWARD, min_size=rows * columns, max_size=rows * columns))
    return np.array(cells).reshape(rows, columns)


def by_hand(rewards: np.ndarray, normalize_std: bool) -> np.ndarray:
    out = np.full(rewards.shape, np.nan)
    for i, group in enumerate(rewards.tolist()):
        known = [r for r in group if not math.isnan(r)]
        for j, r in enumerate(group):
            if math.isnan(r):
                continue
            if len(known) < 2:
                out[i, j] = 0.0
                continue
            out[i, j] = r - statistics.fmean(known)
            if normalize_std:
                out[i, j] /= statistics.stdev(known) + EPSILON
    return out


@given(reward_groups(), st.booleans())
def test_equals_the_loop_over_groups(rewards: np.ndarray, normalize_std: bool) -> None:
    found = group_advantages(rewards, normalize_std)
    # the difference of nearly equal rewards is known to rounding only, and divided by as little as 1e-6
    np.testing.assert_allclose(found, by_hand(rewards, normalize_std), rtol=1e-6, atol=1e-7)


def test_equals_torch_without_gaps() -> None:
    rewards = np.random.default_rng(0).normal(size=(6, 8))
    t = torch.from_numpy(rewards)
    expected = (t - t.mean(1, keepdim=True)) / (t.std(1, keepdim=True) + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards), expected.numpy(), rtol=1e-12)


def test_a_sample_without_reward_leaves_its_group_alone() -> None:
    with_gap = group_advantages(np.array([[1.0, np.nan, 0.0, 0.0]]))
    without = group_advantages(np.array([[1.0, 0.0, 0.0]]))
    assert np.isnan(with_gap[0, 1])
    np.testing.assert_array_equal(with_gap[0, [0, 2, 3]], without[0])


def test_nothing_to_compare_with_is_advantage_zero() -> None:
    found = group_advantages(np.array([[3.0, np.nan, np.nan], [2.0, 2.0, 2.0], [np.nan, np.nan, np.nan]]))
    assert found[0, 0] == 0.0 and np.isnan(found[0, 1:]).all()
    assert (found[1] == 0.0).all()
    assert np.isnan(found[2]).all()
    large = np.full((1, 6), -1e7 - 0.3)  # the mean of six is rounded by 2e-9, which is more than the epsilon of `group_norm`
    assert (group_advantages(large, epsilon=1e-9) == 0.0).all()


@pytest.mark.parametrize("normalize_std", [True, False])
def test_integer_and_boolean_rewards_work(normalize_std: bool) -> None:
    rewards = np.array([[0, 1, 1, 0]])
    expected = by_hand(rewards.astype(float), normalize_std)
    np.testing.assert_allclose(group_advantages(rewards, normalize_std), expected, rtol=1e-9)
    np.testing.assert_allclose(group_advantages(rewards.astype(bool), normalize_std), expected, rtol=1e-9)


@given(reward_groups())
def test_leave_one_out_compares_with_the_others(rewards: np.ndarray) -> None:
    found = leave_one_out(rewards)
    for row, out in zip(rewards.tolist(), found.tolist(), strict=True):
        for j, r in enumerate(row):
            others = [x for k, x in enumerate(row) if k != j and not math.isnan(x)]
            if math.isnan(r):
                assert math.isnan(out[j])
            else:
                assert out[j] == pytest.approx(r - statistics.fmean(others) if others else 0.0, abs=1e-9)


def test_leave_one_out_is_the_centred_reward_scaled() -> None:
    rewards = np.random.default_rng(1).normal(size=(5, 4))
    np.testing.assert_allclose(leave_one_out(rewards), group_advantages(rewards, normalize_std=False) * 4 / 3, rtol=1e-12)


@given(reward_groups())
def test_batch_centred_takes_the_mean_of_all_known_rewards(rewards: np.ndarray) -> None:
    found = batch_centred(rewards)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(rewards))
    if np.isfinite(rewards).any():
        np.testing.assert_allclose(found, rewards - float(np.nanmean(rewards)), atol=1e-9)


def test_epsilon_is_the_callers() -> None:
    rewards = np.array([[0.0, 1e-4]])
    std = 1e-4 / math.sqrt(2)
    np.testing.assert_allclose(group_advantages(rewards, epsilon=1e-9)[0, 1], 0.5e-4 / (std + 1e-9))
    np.testing.assert_allclose(group_advantages(rewards, epsilon=1e-4)[0, 1], 0.5e-4 / (std + 1e-4))


def test_rewards_that_differ_by_rounding_only_are_equal() -> None:
    """Sums of parts in another order: their differences would be advantages of ±1 where rewards are large, and a pair of DPO everywhere."""
    sums = np.array([[0.1 + 0.2, 0.3], [1e7 + 0.1 + 0.2, 1e7 + 0.3 + 4e-9], [0.3, 0.3 + 1e-6]])
    assert sums[0, 0] != sums[0, 1] and sums[1, 0] != sums[1, 1]
    advantages = group_advantages(sums, epsilon=1e-9)
    assert (advantages[:2] == 0).all() and advantages[2] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)
    factors = pair_advantages(sums, np.ones(6, int), None, 0.1)
    assert (factors[:4] == 0).all() and factors[4] < 0 < factors[5]
