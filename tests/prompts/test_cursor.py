"""The cursor: every row once per epoch, and the same rows after a restart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.cursor import Cursor

SIZES = {"n_rows": st.integers(1, 40), "batch": st.integers(1, 60), "shuffle": st.booleans(), "seed": st.integers(-5, 2**40)}


@given(**SIZES, epochs=st.integers(1, 4))
def test_each_epoch_covers_each_row_once(n_rows: int, batch: int, shuffle: bool, seed: int, epochs: int) -> None:
    cursor = Cursor(n_rows, batch, shuffle, seed)
    rows: list[int] = []
    while len(rows) < n_rows * epochs:
        taken = cursor.next()
        assert len(taken) == batch
        rows += taken
        assert cursor.epoch == len(rows) // n_rows
    for epoch in range(epochs):
        part = rows[epoch * n_rows : (epoch + 1) * n_rows]
        assert sorted(part) == list(range(n_rows))
        assert shuffle or part == list(range(n_rows))


@given(**SIZES, before=st.integers(0, 12), after=st.integers(1, 12))
def test_restore_continues_the_same(n_rows: int, batch: int, shuffle: bool, seed: int, before: int, after: int) -> None:
    cursor = Cursor(n_rows, batch, shuffle, seed)
    for _ in range(before):
        cursor.next()
    state = json.loads(json.dumps(cursor.state()))
    expected = [cursor.next() for _ in range(after)]
    restored = Cursor(n_rows, batch, shuffle, seed)
    restored.next()  # whatever it did before
    restored.restore(state)
    assert [restored.next() for _ in range(after)] == expected
    assert (restored.epoch, restored.state()) == (cursor.epoch, cursor.state())


def test_epochs_and_seeds_differ() -> None:
    cursor = Cursor(50, 50, True, 0)
    first, second = cursor.next(), cursor.next()
    assert first != second and first != Cursor(50, 50, True, 1).next()


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (Cursor(11, 2, True, 0), "the number of training rows was 10 when the checkpoint was saved and is 11 now"),
        (Cursor(10, 2, False, 0), "prompts.shuffle was True"),
        (Cursor(10, 2, True, 0, checksum="a"), "the checksum of the training prompts was  when"),
        (Cursor(10, 2, True, 5), "run.seed was 0"),
    ],
)
def test_a_state_of_other_rows_is_refused(other: Cursor, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        other.restore(Cursor(10, 2, True, 0).state())


def test_the_batch_size_may_change_on_resume() -> None:
    cursor = Cursor(10, 4, True, 0)
    cursor.next()
    wider = Cursor(10, 6, True, 0)
    wider.restore(cursor.state())
    assert sorted(Cursor(10, 4, True, 0).next() + wider.next()) == list(range(10))


@given(n_rows=st.integers(1, 12), batch=st.integers(1, 9), epochs=st.integers(1, 3), shuffle=st.booleans())
@settings(deadline=None, max_examples=60)
def test_batches_that_end_with_their_epoch_hold_every_row_once(n_rows: int, batch: int, epochs: int, shuffle: bool) -> None:
    cursor = Cursor(n_rows, batch, shuffle, 0, stops_at_epoch_end=True)
    for epoch in range(epochs):
        batches = [cursor.next() for _ in range(cursor.batches_per_epoch)]
        assert sorted(row for rows in batches for row in rows) == list(range(n_rows))
        assert all(len(rows) == batch for rows in batches[:-1]) and cursor.epoch == epoch + 1
        other = Cursor(n_rows, batch, shuffle, 0, stops_at_epoch_end=True)
        other.restore(cursor.state())
        assert other._rows_taken == cursor._rows_taken
