"""What is begun while engines still work, and under which slot: with stages that only write down what is asked of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.learn.overlap import inexact, obstacle
from rlhfless_ray.learn.stage import LearnStage
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.tail import Tail
from rlhfless_ray.types import Completion, Prompt, Sample

COUNT = 2


class Scoring:
    """Scores what it was given when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []
        self.lease: list[Any] = []

    def begin(self, samples: int) -> None:
        self.total = samples

    def score_ahead(self, samples: list[Sample], leases: list[Any]) -> list[Any]:
        self.asked += samples
        self.lease, left = leases[:1], leases[1:]
        return left

    def answer(self) -> None:
        for sample in self.asked:
            sample.reward = 1.0

    def refs(self) -> list[Any]:
        return ["score"] if self.lease else []

    def done_ahead(self) -> list[Any]:
        if not self.lease or any(sample.reward is None for sample in self.asked):
            return []
        lease, self.lease = self.lease, []
        return lease


class Gang:
    ranks, slots = 1, 2

    def __init__(self) -> None:
        self.working, self.batches, self.done = False, [], False
        self.lease: list[Any] = []

    def fits(self, leases: list[Any]) -> bool:
        return self.working or len(leases) >= self.ranks

    def staff(self, leases: list[Any]) -> list[Any]:
        self.working, self.lease = True, leases[: self.slots]
        return leases[self.slots :]

    def accumulate(self, batch: Any) -> list[Any]:
        self.batches.append(batch)
        return ["gradients"]

    def pending(self, refs: list[Any]) -> list[Any]:
        return [] if self.done else refs

    def accumulated(self, refs: list[Any]) -> None:
        self.done = False

    def park(self) -> list[Any]:
        self.working, lease = False, self.lease
        return lease


def parts(resource: str = "cpu", **learner: Any) -> tuple[Tail, Scoring, Gang, LearnStage]:
    tree = {
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"samples_per_prompt": COUNT},
        "learner": {"micro_batch_tokens": 10, **learner},
    }
    predict = SimpleNamespace(predict=lambda slots, tokens: 0.01 * tokens)
    site: Any = SimpleNamespace(
        recipe=Recipe.parse(tree), autoscaler=SimpleNamespace(learner=predict), leases=SimpleNamespace(resource=resource)
    )
    scoring, gang = Scoring(), Gang()
    learning = LearnStage(site, gang)  # type: ignore[arg-type]
    return Tail(scoring, learning, prompts=3, count=COUNT), scoring, gang, learning  # type: ignore[arg-type]


def sample(key: int, tokens: int = 3) -> Sample:
    done = Completion(key, np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), "stop", 1)
    return Sample(Prompt(key // COUNT, "p", (7,)), key % COUNT, done, "text")


def test_complete_groups_are_scored_then_learned_and_the_rest_is_left_for_later() -> None:
    tail, scoring, gang, learning = parts()
    samples = [sample(key) for key in range(6)]
    tail.heard(samples[:3])
    tail.poll(1.0)
    assert not scoring.asked, "no slot yet"
    assert tail.wants_slot()
    tail.take(["slot"])
    tail.poll(1.0)
    assert scoring.asked == samples[:3] and scoring.total == 6 and tail.refs() == ["score"] and not tail.leases
    tail.heard(samples[3:4])
    scoring.answer()
    tail.poll(1.0)  # the slot comes back and goes to what has come since
    assert scoring.asked == samples[:4] and not gang.batches
    scoring.answer()
    tail.poll(0.05)
    assert not gang.batches, "they would not be done in the seconds that are left"
    tail.poll(1.0)
    [batch] = gang.batches
    assert batch.groups.tolist() == [0, 0], "one micro-batch at a time: the second group waits"
    assert tail.refs() == ["gradients"] and gang.lease == ["slot"]
    gang.done = True
    tail.poll(1.0)
    assert [b.groups.tolist() for b in gang.batches] == [[0, 0], [1, 1]]
    for one in samples[4:]:
        one.reward = 0.5
    assert learning.advantages(samples).groups.tolist() == [2, 2]
    assert all(one.advantage is not None for one in samples)
    assert tail.metrics() == {"overlap/scored": 4, "overlap/learned": 4, "overlap/obstacle": ""}
    gang.done = True
    assert learning.done_ahead(wait=True) == ["slot"] and tail.over() == []


def test_a_step_begins_with_nothing_learned() -> None:
    tail, _, _, learning = parts()
    learning.learned = {0, 1}
    Tail(tail.scoring, learning, 3, COUNT)
    one = [sample(key) for key in range(2)]
    for each in one:
        each.reward = 1.0
    assert len(learning.advantages(one)) == 2


def test_a_device_that_holds_gradients_is_kept() -> None:
    tail, scoring, gang, learning = parts("gpu")
    tail.heard([sample(key) for key in range(4)])
    tail.take(["a", "b"])
    tail.poll(1.0)
    scoring.answer()
    tail.poll(1.0)
    gang.done = True
    tail.poll(1.0)
    assert len(gang.batches) == 2 and gang.working, "the second part goes to the gang that never left"
    assert learning.done_ahead(wait=True) == []


@pytest.mark.parametrize(
    ("learner", "algorithm", "why"),
    [({"overlap": "off"}, {}, "off"), ({"zero_stage": 3}, {}, "zero_stage 3"), ({}, {"updates_per_step": 2}, "updates_per_step")],
)
def test_where_it_would_not_be_exact_nothing_is_learned_ahead_and_the_reason_is_told(learner, algorithm, why) -> None:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": learner, "algorithm": algorithm}
    recipe = Recipe.parse(tree)
    assert why in (obstacle(recipe) or "")
    if why != "off":
        assert inexact(recipe.algorithm.model_dump(), recipe.learner_section()) == obstacle(recipe)
        return
    tail, scoring, gang, _ = parts(overlap="off")
    tail.heard([sample(key) for key in range(2)])
    tail.take(["slot"])
    tail.poll(1.0)
    scoring.answer()
    tail.poll(1.0)
    assert scoring.asked and not gang.batches and tail.leases == ["slot"] and not tail.wants_slot()
    assert why in tail.metrics()["overlap/obstacle"]
