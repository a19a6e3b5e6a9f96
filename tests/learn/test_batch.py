from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.batch import Batch, lags_of, optimizer_steps
from rlhfless_ray.recipe import AlgorithmConfig
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId


def batch_of(sizes: list[tuple[int, int, int]]) -> Batch:
    """From (prompt length, response length, group); tokens count up so that each can be recognised."""
    sequences, at = [], 0
    for k, (prompt, response, group) in enumerate(sizes):
        ids = np.arange(at, at + prompt + response)
        at += prompt + response
        answer = ids[prompt:].astype(np.int32)
        sequences.append((tuple(ids[:prompt]), answer, -answer.astype(np.float32), k / 2, group))
    return Batch.of(sequences)


def test_layout() -> None:
    batch = batch_of([(2, 3, 0), (1, 1, 0), (4, 2, 1)])
    np.testing.assert_array_equal(batch.tokens, np.arange(13))
    np.testing.assert_array_equal(batch.lengths, [5, 2, 6])
    np.testing.assert_array_equal(batch.prompt_lengths, [2, 1, 4])
    np.testing.assert_array_equal(batch.response_lengths, [3, 1, 2])
    np.testing.assert_array_equal(batch.logprobs, [-2, -3, -4, -6, -11, -12])
    np.testing.assert_array_equal(batch.advantages, np.float32([0, 0, 0, 0.5, 1, 1]))
    assert len(batch) == 3
    kinds = (batch.tokens, batch.lengths, batch.groups, batch.logprobs, batch.advantages)
    assert [a.dtype for a in kinds] == [np.int64, np.int64, np.int64, np.float32, np.float32]


def test_the_lag_of_every_token_the_policy_wrote() -> None:
    def sample(versions: tuple[tuple[int, int], ...], mask: list[bool] | None = None) -> Sample:
        length = sum(tokens for _, tokens in versions)
        completion = Completion(0, np.zeros(length, np.int32), np.zeros(length, np.float32), "stop", versions[-1][0], versions)
        return Sample(Prompt(0, (1,), "p"), SampleId(0, 1, 0), completion, action_mask=None if mask is None else np.array(mask))

    found = lags_of([sample(((3, 2), (5, 1))), sample(((4, 2), (5, 2)), [True, False, False, True])], newest=5)
    assert found.tolist() == [2, 2, 0, 1, 0] and found.dtype == np.int8
    assert lags_of([], newest=5).tolist() == []


def test_an_empty_batch_is_a_batch() -> None:
    batch = Batch.of([])
    assert len(batch) == 0 and batch.tokens.dtype == np.int64
    assert optimizer_steps(batch, AlgorithmConfig(updates_per_step=2), [0]) == []


@given(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.integers(1, 6))
@settings(deadline=None)
def test_optimizer_steps_hold_whole_groups(groups: list[int], count: int) -> None:
    batch = batch_of([(1, 1, group) for group in groups])
    parts = optimizer_steps(batch, AlgorithmConfig(updates_per_step=count), [0])
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(groups)))
    assert len(parts) == min(count, len(set(groups)))
    owners = [set(batch.groups[part]) for part in parts]
    assert sum(len(owner) for owner in owners) == len(set(groups))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1


def test_a_part_of_a_batch_holds_its_sequences_whole() -> None:
    rows = [((i, i), np.arange(i + 1), np.full(i + 1, -0.1 * i, np.float32), np.arange(i + 1) / 2, i // 2) for i in range(5)]

    def of(some: list[Any]) -> Batch:
        batch = Batch.of(some)
        return replace(batch, old=2 * batch.advantages, returns=3 * batch.advantages, kl_coefficient=0.3)

    batch, part = of(rows), of([rows[i] for i in (3, 1)])
    np.testing.assert_array_equal(part.advantages, [0, 0.5, 1, 1.5, 0, 0.5])
    taken = batch.take(np.array([3, 1]))
    for name in Batch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(taken, name), getattr(part, name))
    assert len(batch.take(np.empty(0, np.int64))) == 0


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5))
@settings(deadline=None)
def test_shuffled_optimizer_steps_hold_every_sample_once_an_epoch(n: int, size: int, epochs: int, seed: int) -> None:
    batch = batch_of([(1, 1, i // 3) for i in range(n)])
    algorithm = AlgorithmConfig(epochs=epochs, batch_samples=size)
    parts = optimizer_steps(batch, algorithm, [seed, 7])
    per_epoch = -(-n // size)
    assert len(parts) == epochs * per_epoch and max(map(len, parts)) <= size
    for start in range(0, len(parts), per_epoch):
        np.testing.assert_array_equal(np.sort(np.concatenate(parts[start : start + per_epoch])), np.arange(n))
    again = optimizer_steps(batch, algorithm, [seed, 7])
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
