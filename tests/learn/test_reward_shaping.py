from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.reward_shaping import overlong_penalty, stop_properly, token_rewards


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 100), st.floats(0, 3))
@settings(max_examples=150, deadline=None)
def test_overlong_penalty_has_dapos_three_pieces(length: int, most: int, buffer: int, factor: float) -> None:
    """Equation 13 of DAPO, times a factor."""
    buffer = min(buffer, most)
    if length <= most - buffer:
        expected = 0.0
    elif length <= most:
        expected = ((most - buffer) - length) / buffer * factor
    else:
        expected = -factor
    assert overlong_penalty(np.array([length]), most, buffer, factor)[0] == pytest.approx(expected)


def test_stop_properly_scales_or_replaces() -> None:
    rewards, truncated = np.array([[1.0, 2.0], [-1.0, np.nan]]), np.array([[True, False], [True, True]])
    np.testing.assert_array_equal(stop_properly(rewards, truncated, 0.25), [[0.25, 2], [-0.25, np.nan]])
    np.testing.assert_array_equal(stop_properly(rewards, truncated, 0.0), [[0, 2], [0, np.nan]])
    np.testing.assert_array_equal(stop_properly(rewards, truncated, 1.0), rewards)
    np.testing.assert_array_equal(stop_properly(rewards, truncated, -0.5), [[-0.5, 2], [-0.5, np.nan]])


@given(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=6), st.floats(-0.5, 1), st.integers(0, 9))
def test_token_rewards_equal_the_loop_from_behind(masks: list[list[bool]], coefficient: float, seed: int) -> None:
    lengths = np.array([len(m) for m in masks])
    rng = np.random.default_rng(seed)
    kl, rewards = rng.normal(size=lengths.sum()), rng.normal(size=len(masks))
    flat = np.array([m for mask in masks for m in mask], bool)
    found = token_rewards(rewards, lengths, kl, coefficient, flat)
    at = 0
    for mask, reward in zip(masks, rewards, strict=True):
        expected = [-max(coefficient, 0) * kl[at + t] if m else 0.0 for t, m in enumerate(mask)]
        for t in reversed(range(len(mask))):
            if mask[t]:
                expected[t] += reward
                break
        np.testing.assert_allclose(found[at : at + len(mask)], expected, atol=1e-12)
        at += len(mask)


def test_without_kl_or_mask_the_reward_is_on_the_last_token() -> None:
    np.testing.assert_array_equal(token_rewards(np.array([1.0, 5.0, 2.0]), np.array([3, 0, 1])), [0, 0, 1, 2])
    missing = token_rewards(np.array([math.nan, 1.0]), np.array([2, 2]))
    np.testing.assert_array_equal(missing, [0, np.nan, 0, 1])
