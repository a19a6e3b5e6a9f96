"""Batches of rows: nothing is lost, pairs stay together, and the order is that of the seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.micro_batches import PromptSharing
from rlhfless_ray.prompts.cursor import check_unchanged
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import TITLES, Example, Examples, RowOrder, cut_rows


def pairs(rng: np.random.Generator, count: int, same_context: bool) -> Examples:
    rows = []
    for _ in range(count):
        context = rng.integers(9, size=rng.integers(1, 30)).tolist()
        others = [context, context if same_context else rng.integers(9, size=len(context)).tolist()]
        rows.append([Example([*c, *rng.integers(9, size=rng.integers(1, 20)).tolist()], len(c)) for c in others])
    return Examples.of(rows, np.arange(count))


@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 2**40))
def test_every_epoch_has_every_row_once(rows: int, batch: int, epochs: int, shuffles: bool, drops: bool, seed: int) -> None:
    order = RowOrder(rows, batch, epochs, seed, shuffles, drops)
    steps = [order.step(number) for number in range(order.steps)]
    assert all(len(step) == batch for step in steps) if drops else all(len(step) for step in steps)
    for epoch in range(epochs):
        trained = np.concatenate([np.empty(0, int), *steps[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]])
        assert len(set(trained)) == len(trained) == (rows // batch * batch if drops else rows)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 4), st.booleans())
def test_rows_that_are_carried_begin_the_next_epoch(rows: int, batch: int, epochs: int, shuffles: bool) -> None:
    order = RowOrder(rows, batch, epochs, 3, shuffles, carries=True)
    steps = [order.step(number) for number in range(order.steps)]
    assert order.steps == epochs * rows // batch and all(len(step) == batch for step in steps)
    trained = np.concatenate([np.empty(0, int), *steps])
    whole = RowOrder(rows, rows, epochs, 3, shuffles)
    assert trained.tolist() == np.concatenate([whole.step(epoch) for epoch in range(epochs)])[: len(trained)].tolist()


def test_the_schedule_may_count_whole_batches_only() -> None:
    order = RowOrder(rows=190, batch_rows=100, epochs=10, seed=0, carries=True)
    assert (order.steps, order.schedule_steps) == (19, 19)
    assert replace(order, whole_batches=True).schedule_steps == 10
    assert replace(order, whole_batches=True, most_steps=19).schedule_steps == 10, "the recipe in a run's folder names its steps"
    assert replace(order, whole_batches=True, most_steps=7).schedule_steps == 7


@given(st.integers(0, 2**30), st.integers(1, 12), st.integers(1, 3), st.booleans())
def test_pairs_stay_together_and_every_token_is_trained_once(seed: int, count: int, ranks: int, same_context: bool) -> None:
    import torch

    examples = pairs(np.random.default_rng(seed), count, same_context)
    batch = examples.batch(np.random.default_rng(seed).permutation(count))
    seen: list[int] = []
    for rank in range(ranks):
        for cut in cut_rows(batch, np.arange(2 * count).reshape(-1, 2), 200, PromptSharing(width=64), rank, ranks).micro_batches:
            if not cut:
                continue
            sequences = np.concatenate(cut)
            assert sorted(sequences) == sorted(np.concatenate([np.unique(sequences // 2) * 2, np.unique(sequences // 2) * 2 + 1]))
            tensors = padded(batch, cut, torch.device("cpu"))
            seen += tensors["flat"].tolist()
            assert same_context or "segments" not in tensors
    assert sorted(seen) == list(range(int(batch.response_lengths.sum())))


@pytest.mark.parametrize(
    ("learner", "ranks", "most"),
    [
        ({}, 1, 512),
        ({"zero_stage": 3}, 1, 512),
        ({"micro_batch_tokens": 1024}, 1, 1024),
        ({"micro_batch_tokens": 300}, 1, 300),
        ({"zero_stage": 1}, 2, 512),
        ({"zero_stage": 2}, 2, 8192),
        ({"tensor_parallel": 2}, 2, 8192),
    ],
)
def test_packed_micro_batches_are_small_where_nobody_chose_their_size(learner: dict[str, Any], ranks: int, most: int) -> None:
    """On cores, and not of ranks that meet in every micro-batch."""
    from rlhfless_ray.supervise.supervised_rank import SupervisedRank

    lengths = np.clip(np.random.default_rng(0).lognormal(4.0, 1.0, 64), 8, 300).astype(np.int64)
    examples = Examples.of([[Example([1] * length, 5)] for length in lengths.tolist()], [0.0] * 64)
    tree = {"task": "sft", "data": {"task": "chain"}, "learner": {"ranks": ranks, **learner}}
    work = SupervisedRank(SupervisedRecipe.parse(tree), 1, ranks=ranks)
    work.sharing = PromptSharing(width=896)
    assert work._packed_tokens() == most
    if ranks == 1:
        cut = work._cut(examples.batch(np.arange(64)), examples, packs=True)
        assert cut.is_packed
        sizes = [int(lengths[np.concatenate(rows)].sum()) for rows in cut.micro_batches]
        assert most * 0.8 < max(sizes) <= most


def test_a_shared_context_is_computed_once() -> None:
    context = list(range(60))
    examples = Examples.of([[Example([*context, 1, 2], 60), Example([*context, 3], 60)]] * 4, [0.0] * 4)
    (cut,) = cut_rows(examples.batch(np.arange(4)), np.arange(8).reshape(-1, 2), 4096, PromptSharing(width=64)).micro_batches
    assert sorted(len(row) for row in cut) == [2, 2, 2, 2]


def test_batch_has_the_rows_asked_for() -> None:
    examples = pairs(np.random.default_rng(1), 5, True)
    batch = examples.batch(np.array([3, 1]))
    starts = np.cumsum(examples.lengths) - examples.lengths
    expected = [examples.tokens[starts[i] : starts[i] + examples.lengths[i]] for i in (6, 7, 2, 3)]
    assert np.array_equal(batch.tokens, np.concatenate(expected))
    assert batch.groups.tolist() == [0, 0, 1, 1]


def test_other_labels_are_other_rows() -> None:
    """A resume refuses them. Checkpoints from before know no labels."""
    rows = [[Example([1, 2], 1)], [Example([1, 3], 1)]]
    saved, now = (RowOrder(2, 1, 1, 0, labels=Examples.of(rows, extras).label_checksum) for extras in ([1.0, 0.0], [0.0, 1.0]))
    with pytest.raises(UserError, match="the checksum of the training rows' labels and margins was"):
        check_unchanged(saved.state(), now, TITLES)
    check_unchanged({name: value for name, value in saved.state().items() if name != "labels"}, now, TITLES)
