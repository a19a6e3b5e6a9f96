"""Dynamic sampling: groups that pass fill the batch, in their order, whatever the rounds; nothing is lost over a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.learn.overlap_rules import passes_obstacle
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId, Scored
from tests.run_files import step_requests, with_reward

COUNT = 2


def recipe(batch: int = 4, **algorithm: Any) -> Recipe:
    return Recipe.parse({
        "prompts": {"task": "chain", "batch_prompts": batch}, "reward": {"function": "task"}, "rollout": {"samples_per_prompt": COUNT},
        "algorithm": {"filter_range": [0.0, 1.0], **algorithm},
    })  # fmt: skip


def prompts(rows: int) -> list[Prompt]:
    return [Prompt(i, f"p{i}", (1, i)) for i in range(rows)]


def answers(rows: list[int], mean: Callable[[int], float | None], version: int = 0) -> list[Scored]:
    """Two samples for each row, their rewards around its mean; None: they could not be scored."""
    found = []
    for place, row in enumerate(rows):
        for n in range(COUNT):
            tokens = np.arange(row % 3 + 1, dtype=np.int32)
            completion = Completion(place * COUNT + n, tokens, np.full(len(tokens), -0.1 / 3, np.float32) * (row + 1), "stop", version)
            middle = mean(row)
            reward = None if middle is None else middle + (0.1 if 0 < middle < 1 else 0.0) * (-1) ** n
            found.append(with_reward(Sample(Prompt(row, f"p{row}", (1, row)), SampleId(row, 1, n), completion), reward))
    return found


def run(dynamic_sampling: DynamicSampling, mean: Callable[[int], float | None]) -> tuple[list[int], int]:
    """One step: rows of its groups, and how many rounds it took."""
    first = answers(dynamic_sampling.cursor.next(dynamic_sampling.missing), mean)
    filled = dynamic_sampling.fill(first, lambda: answers(dynamic_sampling.draw(), mean))
    assert [s.id.number for s in filled] == [0, 1] * (len(filled) // COUNT)
    return [s.prompt.index for s in filled[::COUNT]], dynamic_sampling.rounds


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=12, max_size=40), st.integers(1, 6), st.sampled_from([1.0, 1.5, 1.99]))
def test_steps_are_the_passing_prompts_in_their_order(means: list[float | None], batch: int, draw: float) -> None:
    """Whatever is drawn ahead: concatenated, the steps are the stream of rows with the others left out."""
    if not any(m == 0.5 for m in means):
        means[0] = 0.5
    made = recipe(batch, filter_draw=draw, filter_patience=10**6)
    dynamic_sampling = DynamicSampling(made, Cursor(len(means), batch, True, 5))
    found = [row for _ in range(4) for row in run(dynamic_sampling, lambda row: means[row])[0]]
    stream = Cursor(len(means), 1, True, 5)
    wanted: list[int] = []
    while len(wanted) < len(found):
        wanted += [row for row in stream.next() if means[row] == 0.5]
    assert found == wanted and len(found) == 4 * batch
    assert len(dynamic_sampling.ready) < batch
    if draw == 1:
        assert not dynamic_sampling.ready, "nothing is left over, so nothing is older than the weights"


def test_bounds_are_outside_and_a_score_goes_before_the_reward() -> None:
    dynamic_sampling = DynamicSampling(recipe(2, filter_range=[0.25, 0.75]), Cursor(8, 2, False, 0))
    mean = [0.25, 0.75, 0.3, 0.7, 0.5, 0.5, 0.5, 0.5]
    assert run(dynamic_sampling, lambda row: mean[row]) == ([2, 3], 2)
    assert dynamic_sampling.metrics() | {} == {
        "filter/pass_percent": 50.0,
        "filter/prompts": 4,
        "filter/dropped_prompts": 2,
        "filter/rounds": 2,
        "filter/left_over": 0,
        "filter/taken_over": 0,
        "filter/dropped_tokens": 2 * (1 + 2),
        "filter/dropped_score_mean": 0.5,
    }
    scored = answers([4, 5], lambda row: 0.5)
    scored[:COUNT] = [replace(sample, score=1.0) for sample in scored[:COUNT]]
    filled = dynamic_sampling.fill(scored, lambda: answers(dynamic_sampling.draw(), lambda row: 0.5))
    assert [s.prompt.index for s in filled] == [5, 5, 4, 4], "the cursor's next row takes the place of the one that was dropped"


@pytest.mark.parametrize("draw", [1.0, 1.9])
def test_an_episode_ends_with_the_groups_it_has(draw: float) -> None:
    dynamic_sampling = DynamicSampling(recipe(4, filter_draw=draw), Cursor(10, 4, False, 0, stops_at_epoch_end=True))
    found = run(dynamic_sampling, lambda row: 0.5 if row % 2 else 1.0)[0]
    assert found == [1, 3, 5, 7]
    if dynamic_sampling.cursor.epoch < 1:
        assert run(dynamic_sampling, lambda row: 0.5 if row % 2 else 1.0)[0] == [9]
    else:
        assert [group[0].prompt.index for group in dynamic_sampling.ready] == [9]
    none_there = DynamicSampling(recipe(2), Cursor(3, 2, False, 0, stops_at_epoch_end=True))
    none_there.cursor.next(2)
    assert run(none_there, lambda row: 0.5 if row == 0 else 0.0)[0][0] == 0, "one group at least, of the next epoch"


def test_what_is_left_over_outlives_the_process() -> None:
    dynamic_sampling = DynamicSampling(recipe(4, filter_draw=1.9), Cursor(40, 4, True, 1))
    mean = [0.0 if row % 3 else 0.5 for row in range(40)]
    while not dynamic_sampling.ready:
        run(dynamic_sampling, lambda row: mean[row])
    of_agent = replace(dynamic_sampling.ready[0][0], action_mask=np.array([True, False]), turns=(("policy", "a"), ("agent", "b")))
    dynamic_sampling.ready[0][0] = of_agent
    content, cursor = json.dumps(dynamic_sampling.state()), dynamic_sampling.cursor.state()
    resumed = DynamicSampling(recipe(4, filter_draw=1.9), Cursor(40, 4, True, 1))
    resumed.restore(json.loads(content), prompts(40))
    resumed.cursor.restore(cursor)
    for before, after in zip(dynamic_sampling.ready, resumed.ready, strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.prompt == other.prompt and one.reward == other.reward
            np.testing.assert_array_equal(one.completion.logprobs, other.completion.logprobs)
            assert one.completion.logprobs.dtype == other.completion.logprobs.dtype
            assert one.completion.versions == other.completion.versions
            assert one.turns == other.turns
            assert (one.action_mask is None) == (other.action_mask is None)
    np.testing.assert_array_equal(resumed.ready[0][0].action_mask, [True, False])
    assert [run(dynamic_sampling, lambda row: mean[row]) for _ in range(5)] == [run(resumed, lambda row: mean[row]) for _ in range(5)]
    assert dynamic_sampling.missing == 4 - len(dynamic_sampling.ready)
    for count in (1, 4):  # groups of two prompts would compare their rewards
        other = DynamicSampling(recipe(4).with_settings({"rollout.samples_per_prompt": count}), Cursor(40, 4, True, 1))
        other.restore(json.loads(content), prompts(40))
        assert other.ready == []


def test_a_run_in_which_nothing_passes_ends_with_what_was_seen() -> None:
    dynamic_sampling = DynamicSampling(recipe(4, filter_patience=3), Cursor(40, 4, True, 1))
    with pytest.raises(RunError, match=r"^algorithm\.filter_range: of 12 prompts in a row .* 0 and 1; their means are from 0 to 1;"):
        run(dynamic_sampling, lambda row: float(row % 2))
    assert len(dynamic_sampling.dropped) == 12 * COUNT


def test_a_row_that_is_asked_again_in_a_step_gets_other_samples() -> None:
    rows = prompts(3)
    once = step_requests(recipe(), 7, [*rows, rows[1]])
    first, again = step_requests(recipe(), 7, rows), step_requests(recipe(), 7, rows, [rows[1]])
    assert [r.seed for r in (*first, *again)] == [r.seed for r in once]
    assert len({r.seed for r in once}) == len(once)


def test_settings() -> None:
    assert "filter_range" in (passes_obstacle(recipe()) or "")
    for changes, said in (
        ({"filter_range": [1.0, 0.0]}, "the first must be smaller"),
        ({"filter_range": None, "filter_draw": 1.5}, "filter_patience need it"),
        ({"filter_draw": 2.0}, "filter_draw"),
    ):
        with pytest.raises(UserError, match=said):
            recipe(**changes)
    off = DynamicSampling(Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}), Cursor(4, 2, False, 0))
    some = answers([0, 1], lambda row: 0.0)
    assert off.fill(some, list) is some and off.metrics() == {}
