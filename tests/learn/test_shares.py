"""The share of each rank: only what it computes with, and together the whole batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batches import MicroBatch, PromptSharing, micro_batches
from rlhfless_ray.learn.shares import Cutter, Share, joined
from rlhfless_ray.recipe import Recipe

pytestmark = pytest.mark.pure
ALGORITHM = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}).algorithm


def make_batch(seed: int, groups: int, per_group: int = 4, longest: int = 40, masked: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    sequences = []
    for group in range(groups):
        prompt = tuple(rng.integers(0, 99, rng.integers(1, 12)).tolist())
        for _ in range(per_group):
            tokens = rng.integers(0, 99, rng.integers(1, longest))
            sequences.append((prompt, tokens, rng.random(len(tokens)), float(rng.normal()), group))
    masks = [rng.random(len(s[1])) < 0.7 for s in sequences] if masked else None
    return Batch.of(sequences, masks)


def global_rows(share: Share, cuts: list[MicroBatch]) -> list[list[list[int]]]:
    return [[share.indices[row].tolist() for row in rows] for rows in cuts]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 9), ranks=st.integers(1, 5), updates=st.integers(1, 3), masked=st.booleans())
def test_every_rank_computes_what_it_would_find_in_the_whole_batch(seed: int, groups: int, ranks: int, updates: int, masked: bool) -> None:
    batch = make_batch(seed, groups, masked=masked)
    algorithm = Recipe.parse({
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": {"updates_per_step": updates}
    }).algorithm  # fmt: skip
    cutter = Cutter(ranks, 160, PromptSharing(64), algorithm, 0, 0)
    shares = cutter.of_update(batch)
    assert len(shares) == ranks
    for rank, share in enumerate(shares):
        assert len(share) == len(batch) and (share.response_lengths == batch.response_lengths).all()
        for field in ("tokens", "advantages", "logprobs", "mask"):
            own, there = getattr(share.batch, field), getattr(batch.take(share.indices), field)
            assert (own is None and there is None) or (own == there).all()
        assert (batch.logprobs[share.tokens] == share.batch.logprobs).all()
        for step in share.steps:
            wanted = micro_batches(batch, step.indices, 160, PromptSharing(64), rank, ranks)
            assert global_rows(share, step.cuts) == [[row.tolist() for row in rows] for rows in wanted]
        every = micro_batches(batch, np.arange(len(batch)), 160, PromptSharing(64), rank, ranks)
        assert global_rows(share, share.passes) == ([[row.tolist() for row in rows] for rows in every] if share.needs_old else [])
    assert {share.needs_old for share in shares} == {len(shares[0].steps) > 1}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_get_no_token_twice(ranks: int) -> None:
    batch = make_batch(1, 64, 8, 400)
    size = len(pickle.dumps(batch))
    shares = Cutter(ranks, 4096, PromptSharing(512), ALGORITHM).of_update(batch)
    assert sorted(np.concatenate([share.indices for share in shares]).tolist()) == list(range(len(batch)))
    sent = [len(pickle.dumps(share)) for share in shares]
    assert sum(sent) < 1.05 * size + 4096 * ranks and max(sent) < 1.2 * size / ranks + 4096 + 16 * len(batch)


def test_one_rank_gets_the_batch_itself() -> None:
    batch = make_batch(2, 3)
    (share,) = Cutter(1, 100, None, ALGORITHM).of_update(batch)
    assert share.batch is batch


def test_values_of_all_ranks_lie_where_their_tokens_do() -> None:
    batch = make_batch(3, 5)
    shares = Cutter(3, 100, PromptSharing(64)).of_pass(batch)
    replies = []
    for share in shares:
        values = np.zeros(len(share.batch.logprobs), np.float32)
        for rows in share.passes:
            for row in rows:
                for i in row:
                    ends = np.cumsum(share.batch.response_lengths)
                    here = slice(ends[i] - share.batch.response_lengths[i], ends[i])
                    values[here] = share.batch.logprobs[here]
        replies.append(({"logprobs": values}, share.spans))
    assert (joined(replies)["logprobs"] == batch.logprobs).all()


def test_a_rank_without_work_gets_one_sequence_and_an_empty_batch_none() -> None:
    shares = Cutter(3, 1000, None, ALGORITHM).of_update(make_batch(4, 1, per_group=1))
    assert [len(share.batch) for share in shares] == [1, 1, 1]
    assert [sum(map(len, share.steps[0].cuts)) for share in shares] == [1, 0, 0]
    empty = Batch.of([])
    for share in (*Cutter(2, 10, None, ALGORITHM).of_update(empty), *Cutter(2, 10).of_pass(empty)):
        assert len(share) == 0 and not share.steps and not share.passes
    assert joined([({"values": np.zeros(0, np.float32)}, share.spans) for share in Cutter(2, 10).of_pass(empty)])["values"].shape == (0,)
