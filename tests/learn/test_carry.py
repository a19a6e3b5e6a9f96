"""Samples that fill no optimizer step wait for the next rollout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.learn.batch import UNKNOWN_EXPERT, Batch, optimizer_steps
from rlhfless_ray.learn.carry import as_bytes, carried, joined, of_bytes
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.recipe import AlgorithmConfig, Recipe
from rlhfless_ray.types import UpdateStats

ALGORITHM = AlgorithmConfig(batch_samples=96, remainder="carry")


def rollout(number: int, samples: int, masked: bool = False) -> Batch:
    """Sample k of it has the one prompt token 1000 · number + k, and one to three tokens after it."""
    lengths = [1 + k % 3 for k in range(samples)]
    tokens = [np.full(n, 1000.0 * number + k, np.float32) for k, n in enumerate(lengths)]
    batch = Batch.of([((1000 * number + k,), np.arange(n), t, t, k // 2) for k, (n, t) in enumerate(zip(lengths, tokens, strict=True))])
    flat = np.concatenate(tokens or [np.zeros(0, np.float32)])
    mask = np.ones(len(flat), bool) if masked else None
    return replace(batch, old=flat, reference=2 * flat, values=3 * flat, returns=4 * flat, mask=mask)


def names(batch: Batch) -> np.ndarray:
    """Which sample each sequence is."""
    return batch.tokens[np.cumsum(batch.lengths) - batch.lengths]


def played(sizes: list[int], size: int, epochs: int, again: int | None = None) -> tuple[list[list[int]], Batch | None]:
    """Samples of each optimizer step; before rollout `again` what is left is written down and read."""
    steps, left = [], None
    for number, samples in enumerate(sizes):
        if number == again and left is not None:
            left = of_bytes(as_bytes(left))
        batch, left = carried(left, rollout(number, samples), size, epochs, np.random.default_rng([5, number]))
        section = ALGORITHM.model_copy(update={"batch_samples": size, "epochs": epochs})
        for part in optimizer_steps(batch, section, [0]) if len(batch) else []:
            steps.append(names(batch)[part].tolist())
            taken = batch.take(part)  # everything that is known of a sample goes with it
            of = np.repeat(names(taken), taken.response_lengths).astype(np.float32)
            for factor, name in enumerate(("old", "reference", "values", "returns"), 1):
                np.testing.assert_array_equal(getattr(taken, name), factor * of)
    return steps, left


def test_four_rollouts_of_256_make_ten_steps_of_96() -> None:
    """As DeepSpeed's accumulation boundaries do, which are counted over rollouts; with shorter steps there would be twelve."""
    steps, left = played([256] * 4, 96, 1)
    assert [len(step) for step in steps] == [96] * 10 and left is not None and len(left) == 64
    everything = [name for step in steps for name in step] + names(left).tolist()
    assert sorted(everything) == sorted(1000 * number + k for number in range(4) for k in range(256))
    assert [{name // 1000 for name in step} for step in steps[:4]] == [{0}, {0}, {0, 1}, {1}]
    assert sum(name < 1000 for name in steps[2]) == 64, "what was left is learned first"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_no_sample_is_lost_or_learned_too_often_and_a_checkpoint_changes_nothing(
    sizes: list[int], size: int, epochs: int, again: int
) -> None:
    steps, left = played(sizes, size, epochs)
    assert all(len(step) == size for step in steps)
    rest = [] if left is None else names(left).tolist()
    everything = [name for step in steps for name in step] + rest
    assert sorted(everything) == sorted([1000 * n + k for n, count in enumerate(sizes) for k in range(count)] * epochs)
    assert len(rest) < size
    resumed, also = played(sizes, size, epochs, again)
    assert resumed == steps and (also is None) == (left is None)


def test_masks_go_along() -> None:
    both = joined(rollout(0, 3), rollout(1, 2, masked=True))
    assert both.mask is not None and both.mask.sum() == both.response_lengths.sum() == 6 + 3
    assert of_bytes(as_bytes(both)).mask is not None and of_bytes(as_bytes(rollout(0, 3))).mask is None


def test_samples_of_other_settings_are_not_mixed() -> None:
    with pytest.raises(UserError, match=r"algorithm\.remainder: .* `reference`"):
        joined(replace(rollout(0, 2), reference=None), rollout(1, 2))


def test_dropped_samples_are_in_no_step() -> None:
    parts = optimizer_steps(rollout(0, 256), ALGORITHM.model_copy(update={"remainder": "drop", "epochs": 2}), [1])
    assert [len(part) for part in parts] == [96] * 4
    assert optimizer_steps(rollout(0, 5), ALGORITHM.model_copy(update={"remainder": "drop"}), [1]) == []


def stage_of(told: list[str], **more: Any) -> tuple[LearnStage, list[Batch]]:
    """A stage whose learner writes down what it is given."""
    algorithm = {"batch_samples": 5, "remainder": "carry", **more.pop("algorithm", {})}
    chosen = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": algorithm, **more})
    given: list[Batch] = []

    def start_update(batch: Batch, **_: Any) -> Pending[UpdateStats]:
        given.append(batch)
        return Pending(lambda: UpdateStats(applied=1))

    worker_group = SimpleNamespace(
        recovery=SimpleNamespace(restarts=0), start_update=start_update, by_rank=[SimpleNamespace(leases=[1])], ranks=1, slots=1
    )
    worker_group.working, worker_group.call_s = True, 0.1
    context = SimpleNamespace(
        recipe=chosen,
        record=SimpleNamespace(progress=SimpleNamespace(message=told.append)),
        autoscaler=SimpleNamespace(predictor=SimpleNamespace(observe_update=lambda *a: None, observe_passes=lambda *a: None)),
    )
    stage = LearnStage(context, worker_group)  # type: ignore[arg-type]
    stage.plan = SimpleNamespace(reason="")  # type: ignore[assignment]
    return stage, given


def learn(stage: LearnStage, numbers: list[int]) -> None:
    for number in numbers:
        stage.number = number
        stage.start_update(rollout(number, 8), []).result()


def test_a_resumed_run_learns_from_the_same_samples_in_the_same_steps() -> None:
    told: list[str] = []
    uncut, all_of_it = stage_of(told)
    learn(uncut, [1, 2, 3, 4])
    first, before = stage_of(told)
    assert first.files() == {}
    learn(first, [1, 2])
    again, after = stage_of(told)
    again.restore_files(first.files())
    learn(again, [3, 4])
    for found, wanted in zip(before + after, all_of_it, strict=True):
        assert found.steps is not None and wanted.steps is not None
        for name in ("tokens", "old", "returns", "logprobs"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        assert [s.tolist() for s in found.steps] == [s.tolist() for s in wanted.steps]
    assert [len(batch.steps or ()) for batch in all_of_it] == [1, 2, 1, 2] and told == []


def test_a_checkpoint_holds_what_finished_steps_left() -> None:
    """A step that fails in its update leaves what was there before: it is made again whole."""
    stage, _ = stage_of([])
    learn(stage, [1])
    before = stage.files()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("lost")

    stage.worker_group.start_update = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        learn(stage, [2])
    assert stage.files() == before and len(of_bytes(before["carried.npz"])) == 3


def test_samples_of_frozen_steps_are_not_carried_to_the_policy() -> None:
    stage, given = stage_of([], critic={"freeze_policy_steps": 2})
    learn(stage, [1, 2, 3])
    assert [set(names(batch) // 1000) for batch in given] == [{3}]


def test_samples_whose_experts_are_not_known_join_those_whose_are() -> None:
    """A checkpoint keeps the experts of carried samples, and not those of samples that no step has trained yet."""
    first, second = rollout(1, 3), rollout(2, 4)
    known = replace(first, experts=np.ones((int(first.lengths.sum()), 2, 1), np.uint8))
    experts = joined(known, second).experts
    assert experts is not None and (experts[: len(known.tokens)] == 1).all() and (experts[len(known.tokens) :] == UNKNOWN_EXPERT).all()
    assert joined(first, second).experts is None


def test_carried_samples_are_told_of_where_they_are_not_wanted_any_more() -> None:
    told: list[str] = []
    stage, _ = stage_of(told)
    learn(stage, [1])
    other, _ = stage_of(told, algorithm={"remainder": "short"})
    other.restore_files(stage.files())
    assert other.leftover is None and len(told) == 1 and "algorithm.remainder" in told[0]


def test_steps_of_the_whole_run_are_counted_for_the_schedule() -> None:
    def recipe(remainder: str, size: int) -> Recipe:
        return Recipe.parse({
            "prompts": {"task": "chain", "batch_prompts": 32}, "reward": {"function": "task"}, "run": {"steps": 4},
            "algorithm": {"batch_samples": size, "remainder": remainder},
        })  # fmt: skip

    def steps(remainder: str, size: int) -> int:
        return recipe(remainder, size).optimizer_steps

    assert [steps(name, 96) for name in ("short", "carry", "drop")] == [12, 10, 8] and steps("carry", 1000) == 1
    with pytest.raises(UserError, match=r"algorithm\.batch_samples: must not exceed .* unless algorithm\.remainder is carry"):
        steps("drop", 1000)
    assert recipe("carry", 1025).untrained_note.startswith("nothing will be trained: the run has 1024 samples, and an optimizer step needs")
    assert not recipe("carry", 1024).untrained_note and not recipe("drop", 96).untrained_note
