"""Per-token advantages and returns against double sums, limits that are known, and a loop over padded columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.learn.advantage import discounted_returns, gae, spans

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda x: np.array(x, np.int64))
SHARE = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def drawn(lengths: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    total = int(lengths.sum())
    return rng.normal(size=total), rng.normal(size=total)


@given(LENGTHS, SHARE, SHARE, st.integers(0, 5))
def test_gae_equals_the_double_sum(lengths: np.ndarray, gamma: float, lambd: float, seed: int) -> None:
    """Equation 16 itself: A_t = Σ_l (γλ)^l δ_{t+l}, sequence by sequence."""
    rewards, values = drawn(lengths, seed)
    advantages, returns = gae(rewards, values, lengths, gamma, lambd)
    at = 0
    for length in lengths:
        r, v = rewards[at : at + length], [*values[at : at + length], 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            expected = sum((gamma * lambd) ** (s - t) * delta[s] for s in range(t, length))
            assert advantages[at + t] == pytest.approx(expected, abs=1e-12)
            assert returns[at + t] == pytest.approx(expected + v[t], abs=1e-12)
        at += length


@given(LENGTHS, SHARE, st.integers(0, 5))
def test_limits_of_lambda(lengths: np.ndarray, gamma: float, seed: int) -> None:
    """λ = 1: return-to-go minus value; λ = 0: the one-step error; a critic of zeros: the plain return."""
    rewards, values = drawn(lengths, seed)
    returns = discounted_returns(rewards, lengths, gamma)
    np.testing.assert_allclose(gae(rewards, values, lengths, gamma, 1.0)[0], returns - values, atol=1e-12)
    np.testing.assert_allclose(gae(rewards, np.zeros_like(values), lengths, gamma, 1.0)[0], returns, atol=1e-12)
    one_step = gae(rewards, values, lengths, gamma, 0.0)[0]
    for span in spans(lengths):
        following = np.append(values[span][1:], 0.0)[: span.stop - span.start]
        np.testing.assert_allclose(one_step[span], rewards[span] + gamma * following - values[span], atol=1e-12)


@given(LENGTHS, SHARE, st.integers(0, 5))
def test_returns_are_a_matrix_of_powers_times_rewards(lengths: np.ndarray, gamma: float, seed: int) -> None:
    rewards, _ = drawn(lengths, seed)
    found = discounted_returns(rewards, lengths, gamma)
    for span in spans(lengths):
        n = span.stop - span.start
        ahead = np.arange(n)[None, :] - np.arange(n)[:, None]
        powers = np.where(ahead >= 0, np.float64(gamma) ** np.maximum(ahead, 0), 0.0)
        np.testing.assert_allclose(found[span], powers @ rewards[span], atol=1e-12)


@pytest.mark.parametrize("lambd", [0.9, 1.0])
def test_a_sequence_does_not_feel_its_neighbours_in_any_bit(lambd: float) -> None:
    lengths = np.array([5, 0, 700, 1, 33])
    rewards, values = drawn(lengths)
    whole = gae(rewards, values, lengths, 0.99 if lambd < 1 else 1.0, lambd)
    for k, span in enumerate(spans(lengths)):
        alone = gae(rewards[span], values[span], lengths[k : k + 1], 0.99 if lambd < 1 else 1.0, lambd)
        for a, b in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(a[span], b)


def test_time_may_count_environment_tokens_or_leave_them_out() -> None:
    """Kept with reward and value 0 they decay what passes, as a loop over padded columns with a mask does."""
    gamma, lambd = 0.9, 0.8
    rewards, values = drawn(np.array([7]))
    mask = np.array([1, 1, 0, 0, 1, 1, 0], bool)
    running, expected = 0.0, np.zeros(7)
    for t in reversed(range(7)):
        after = values[t + 1] * mask[t + 1] if t < 6 else 0.0
        running = rewards[t] * mask[t] + gamma * after - values[t] * mask[t] + gamma * lambd * running
        expected[t] = running
    kept = gae(rewards * mask, values * mask, np.array([7]), gamma, lambd)[0]
    np.testing.assert_allclose(kept, expected, atol=1e-12)
    left_out = gae(rewards[mask], values[mask], np.array([4]), gamma, lambd)[0]
    assert abs(left_out[0] - kept[0]) > 1e-3
    undiscounted = [gae(r, v, np.array([len(r)]))[0] for r, v in ((rewards * mask, values * mask), (rewards[mask], values[mask]))]
    np.testing.assert_allclose(undiscounted[0][mask], undiscounted[1], atol=1e-12)


def test_types_and_shapes() -> None:
    lengths = np.array([2, 1])
    for given_type, wanted in ((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64), (np.int64, np.float64)):
        ones = np.ones(3, given_type)
        for out in (discounted_returns(ones, lengths, 0.5), *gae(ones, ones, lengths, 0.5, 0.5)):
            assert out.dtype == wanted and out.shape == (3,)
    nothing = np.zeros(0)
    assert discounted_returns(nothing, np.zeros(0, int)).shape == (0,)
    assert gae(nothing, nothing, np.array([0, 0]), 0.9, 0.9)[0].shape == (0,)


def test_long_float32_sums_are_made_in_float64() -> None:
    lengths = np.array([200_000])
    rewards = np.full(200_000, 0.1, np.float32)
    assert discounted_returns(rewards, lengths)[0] == pytest.approx(200_000 * float(np.float32(0.1)), rel=1e-7)


def test_rewards_of_whole_responses_come_to_the_same_bits_as_summed_backwards() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, size=50)
    rewards = np.zeros(int(lengths.sum()), np.float32)
    ends = np.cumsum(lengths)[lengths > 0] - 1
    rewards[ends] = rng.normal(size=len(ends))
    rewards[ends[3]] = np.nan
    summed = [np.cumsum(rewards[span][::-1], dtype=np.float64)[::-1] for span in spans(lengths)]
    found = discounted_returns(rewards, lengths)
    assert found.dtype == np.float32 and found.tobytes() == np.concatenate(summed).astype(np.float32).tobytes()
    rewards[0] = 0.5 if ends[0] > 0 else 0.0  # a token's own reward: the response is summed
    assert discounted_returns(rewards, lengths)[0] == pytest.approx(0.5 + float(rewards[ends[0]]))
