from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.batch import Batch, micro_batches, mini_batches

LENGTHS = st.lists(st.integers(1, 400), max_size=60).map(lambda x: np.array(x, np.int64))


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


def test_an_empty_batch_is_a_batch() -> None:
    batch = Batch.of([])
    assert len(batch) == 0 and batch.tokens.dtype == np.int64
    assert mini_batches(batch, 2) == []


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
@example(np.array([7], np.int64), 3, 4)
def test_micro_batches_are_a_partition_within_the_budget(lengths: np.ndarray, budget: int, ranks: int) -> None:
    dealt = micro_batches(lengths, budget, ranks)
    assert len(dealt) == ranks
    assert len({len(cuts) for cuts in dealt}) == 1, "collectives need the same number on every rank"
    everything = np.concatenate([cut for cuts in dealt for cut in cuts] or [np.empty(0, np.int64)])
    np.testing.assert_array_equal(np.sort(everything), np.arange(len(lengths)))
    for cut in (cut for cuts in dealt for cut in cuts):
        assert len(cut) <= 1 or int(lengths[cut].max()) * len(cut) <= budget


@given(st.lists(st.integers(50, 60), min_size=16, max_size=60), st.integers(2, 4))
@settings(deadline=None)
def test_no_rank_idles_where_there_is_work_for_all(lengths: list[int], ranks: int) -> None:
    """With a budget that would hold everything, the batch is still shared out, evenly for sequences of a size."""
    array = np.array(lengths)
    loads = [sum(int(array[cut].sum()) for cut in cuts) for cuts in micro_batches(array, 10**6, ranks)]
    assert min(loads) > 0.5 * max(loads)


def test_similar_lengths_share_a_micro_batch() -> None:
    rng = np.random.default_rng(0)
    lengths = np.round(rng.lognormal(4, 1, 300)).astype(np.int64)
    cuts = micro_batches(lengths, 4096, 1)[0]
    padded = sum(int(lengths[cut].max()) * len(cut) for cut in cuts)
    in_order = [np.arange(start, min(start + 10, 300)) for start in range(0, 300, 10)]
    assert padded < 1.3 * lengths.sum()
    assert padded < 0.5 * sum(int(lengths[cut].max()) * len(cut) for cut in in_order)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.integers(1, 6))
@settings(deadline=None)
def test_mini_batches_hold_whole_groups(groups: list[int], count: int) -> None:
    batch = batch_of([(1, 1, group) for group in groups])
    parts = mini_batches(batch, count)
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
