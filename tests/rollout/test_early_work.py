"""What is begun while engines still work, and under which slot: with stages that only write down what is asked of them."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from placement.measurements.registry import Measurements
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.events import RolloutProgress
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.types import UNFINISHED, Completion, Group, Prompt, Sample, SampleId, Scored, UpdateStats
from tests.run_files import with_reward

COUNT = 2


class Scoring:
    """Scores its samples when the test asks for it."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []
        self.scored: dict[SampleId, Scored] = {}
        self.lease: list[Any] = []

    def begin(self, samples: int) -> None:
        self.total = samples

    def fits(self, leases: list[Any]) -> bool:
        return True

    def score_ahead(self, samples: list[Sample], leases: list[Any]) -> list[Any]:
        self.asked += samples
        self.lease, left = leases[:1], leases[1:]
        return left

    def answer(self) -> None:
        self.scored |= {sample.id: with_reward(sample, 1.0) for sample in self.asked}

    def refs(self) -> list[Any]:
        return ["score"] if self.lease else []

    def done_ahead(self) -> list[Any]:
        if not self.lease or any(sample.id not in self.scored for sample in self.asked):
            return []
        lease, self.lease = self.lease, []
        return lease


class Gang:
    """Its result for a token of a requested pass follows from the sampler's log-probability of it."""

    ranks, slots = 1, 2
    SAYS: ClassVar = {"old": -1, "reference": 3, "values": 2}

    def __init__(self) -> None:
        self.working, self.done = False, False
        self.lease: list[Any] = []
        self.by_rank: list[Any] = []
        self.cutter = Cutter()
        self.passes: list[tuple[str, list[int]]] = []  # of which groups, in their order
        self.dies = False
        self.update = Pending(UpdateStats)
        self.call_s = 1.0
        self.recovery = SimpleNamespace(restarts=0)

    def fits(self, leases: list[Any]) -> bool:
        return self.working or len(leases) >= self.ranks

    def assign_leases(self, leases: list[Any]) -> list[Any]:
        self.working, self.lease = True, leases[: self.slots]
        return leases[self.slots :]

    def pending(self, refs: list[Any]) -> list[Any]:
        return [] if self.done else refs

    def ask(self, what: str, batch: Any, *names: Any) -> list[Any]:
        self.answer = self.compute(what, batch, *names)
        return [what]

    def have_failed(self, refs: list[Any]) -> bool:
        return bool(refs) and self.done and self.dies

    def start_update(self, batch: Any, publishes: bool) -> Pending[UpdateStats]:
        return self.update

    def wait_for_values(self, refs: list[Any], what: str) -> Any:
        self.done = False
        return None if self.dies else (self.answer, 0.01)

    def compute(self, what: str, batch: Any, *names: Any) -> dict[str, np.ndarray]:
        assert self.working
        self.passes.append((what, rows_of(batch)))
        return {name: np.float32(self.SAYS[name]) * batch.logprobs for name in (names[0] if names else (what,))}

    def start_compute(self, what: str, batch: Any, *names: Any) -> Any:
        found = self.compute(what, batch, *names)
        return Pending(lambda: found)

    def park(self) -> list[Any]:
        self.working, lease, self.lease = False, self.lease, []
        return lease


def parts(
    resource: str = "cpu",
    algorithm: dict[str, Any] | None = None,
    critic: Gang | None = None,
    reference: Gang | None = None,
    lora: int = 0,
    lag: int = 0,
    partial: str = "off",
    **learner: Any,
) -> tuple[EarlyWork, Scoring, Gang, LearnStage]:
    tree = {
        "prompts": {"task": "chain", "batch_prompts": 3},
        "reward": {"function": "task"},
        "rollout": {"samples_per_prompt": COUNT, "max_lag_steps": lag, "partial": partial},
        "learner": {"micro_batch_tokens": 10, **learner},
        "algorithm": algorithm or {},
        "lora": {"rank": lora},
    }
    predict = SimpleNamespace(predict=lambda slots, tokens: 0.01 * tokens)
    leases: Any = SimpleNamespace(resource=resource, release=lambda leases: None, without_lost=lambda leases: leases)
    broker = SlotBroker(leases)
    autoscaler = SimpleNamespace(learner=predict, terms=Measurements(), predictor=SimpleNamespace(), criteria=SimpleNamespace())
    context: Any = SimpleNamespace(recipe=Recipe.parse(tree), autoscaler=autoscaler, broker=broker, leases=leases)
    scoring, worker_group = Scoring(), Gang()
    learning = LearnStage(context, worker_group, critic, reference)  # type: ignore[arg-type]
    return early_work(scoring, learning, groups=3), scoring, worker_group, learning  # type: ignore[arg-type]


def early_work(scoring: Any, learning: Any, groups: int, **more: Any) -> EarlyWork:
    """Beside a rollout that cuts no response."""
    batch = RolloutBatch([Group(Prompt(g, "p", (7,)), 1) for g in range(groups)], 1, groups, max_lag=0, count=COUNT, cuts=False)
    return EarlyWork(scoring, learning, learning.context.broker, batch, **more)


def rows_of(batch: Batch) -> list[int]:
    """The rows of a batch's sequences, which their log-probabilities tell, see `sample`."""
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    return [int(-batch.logprobs[start] // 10) // COUNT for start in starts]


def sample(key: int, tokens: int = 3, begun: int = 1) -> Sample:
    logprobs = -np.arange(1, tokens + 1, dtype=np.float32) - 10 * key
    done = Completion(key, np.arange(tokens, dtype=np.int32), logprobs, "stop", 1)
    return Sample(Prompt(key // COUNT, "p", (7,)), SampleId(key // COUNT, begun, key % COUNT), done, "text")


def test_samples_are_scored_as_they_end_and_the_rest_is_left_for_later() -> None:
    tail, scoring, worker_group, learning = parts()
    samples = [sample(key) for key in range(6)]
    tail.add_samples(samples[:3])
    tail.poll(1.0)
    assert not scoring.asked, "no slot yet"
    assert tail.wants_slot()
    tail.broker.put(["slot"])
    tail.poll(1.0)
    assert scoring.asked == samples[:3] and scoring.total == 6 and tail.refs() == ["score"] and not tail.broker.free
    tail.add_samples(samples[3:4])
    scoring.answer()
    tail.poll(1.0)  # the slot comes back and goes to what has come since
    assert scoring.asked == samples[:4] and tail.report() == {"overlap/scored": 4}
    batch, trained = learning.advantages([with_reward(one, 0.5) for one in samples])
    assert rows_of(batch) == [0, 0, 1, 1, 2, 2] and not worker_group.working
    assert [one.id for one in trained] == [one.id for one in samples] and all(one.advantage is not None for one in trained)


def test_a_slot_of_a_drained_node_is_not_used() -> None:
    tail, scoring, _, _ = parts()
    samples = [sample(0)]
    tail.add_samples(samples)
    tail.broker.leases.without_lost = lambda leases: [lease for lease in leases if lease != "drained"]  # type: ignore[method-assign]
    tail.broker.put(["drained"])
    tail.poll(1.0)
    assert not scoring.asked and tail.broker.free == () and tail.wants_slot()
    tail.broker.put(["slot"])
    tail.poll(1.0)
    assert scoring.asked == samples and scoring.lease == ["slot"]


PPO = {"advantage": {"estimator": "gae"}, "kl": {"coefficient": 0.1, "place": "reward"}}


def ended(tail: EarlyWork, keys: range) -> list[Scored]:
    samples = [with_reward(sample(key), 1.0 + key) for key in keys]
    tail.add_samples([*samples])
    tail.unscored = []  # whoever scores them is not looked at here
    tail.scoring.scored |= {one.id: one for one in samples}  # type: ignore[misc, operator]
    return samples


def test_what_has_ended_is_passed_over_by_each_gang_in_turn_and_the_rest_in_the_learn_phase() -> None:
    critic, reference = Gang(), Gang()
    tail, _, learner, learning = parts(algorithm=PPO, critic=critic, reference=reference)
    samples = ended(tail, range(3))
    assert tail.wants_slot()
    tail.broker.put(["slot"])
    tail.poll(0.05)
    assert not reference.passes, "they would not be done in the seconds that are left"
    tail.poll(1.0)  # one micro-batch has two of them, with a prompt token each
    assert reference.passes == [("reference", [0, 0])] and tail.refs() == ["reference"] and not tail.broker.free and not learner.passes
    reference.done = True
    tail.poll(1.0)
    assert learner.passes == [("logprobs", [0, 0])] and tail.refs() == ["logprobs"] and not tail.broker.free and not critic.passes
    learner.done = True
    tail.poll(1.0)  # the third waits for others to come: half a micro-batch, or a fourth of the step
    assert not reference.passes[1:] and not learner.passes[1:] and critic.passes == [("values", [0, 0])]
    critic.done = True
    tail.poll(1.0)
    assert tail.broker.free == ("slot",) and not tail.refs()
    samples += ended(tail, range(3, 5))
    samples.append(with_reward(sample(5), 0.5))
    tail.poll(0.09)
    assert len(reference.passes) == 2, "what a pass took was measured: it is done in time"
    assert tail.broker.free == () and learning.passes.pending() == ["reference"]
    assert learning.passes.collect(wait=True) == ["slot"]
    metrics = tail.report()
    assert metrics["overlap/reference"] == 4 and metrics["overlap/logprobs"] == 2 and metrics["overlap/values"] == 2
    batch, _ = learning.advantages(samples)
    assert reference.passes[1:] == [("reference", [1, 1]), ("reference", [2, 2])]
    assert learner.passes[1:] == [("logprobs", [1, 1, 2, 2])]
    assert critic.passes[1:] == [("values", [1, 1, 2, 2])]
    whole = np.concatenate([one.completion.logprobs for one in samples])
    assert batch.old is not None and batch.values is not None
    np.testing.assert_array_equal(batch.old, -whole)
    np.testing.assert_array_equal(batch.values, 2 * whole)
    kl = np.minimum(np.expm1(np.minimum(-4 * -whole, 10)) - 4 * whole, 10)  # k3 of old - reference = -4 times what was drawn
    assert learning.kl == pytest.approx(float(kl.mean()))
    np.testing.assert_array_equal(batch.reference, 3 * whole)  # for statistics: the KL is in the reward
    alone, _, _, other = parts(algorithm=PPO, critic=critic, reference=reference, overlap="off")
    again, _ = other.advantages(samples)
    for name in ("advantages", "returns", "old", "values"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
    assert "off" in alone.report()["overlap/passes_obstacle"]


def test_ranks_that_share_their_sequences_do_not_wait_for_more_tokens() -> None:
    tail, _, worker_group, learning = parts(algorithm={"updates_per_step": 2})
    learning.passes.begin(samples=100)
    worker_group.ranks = worker_group.slots = 4  # with sequence_parallel 4: one share
    ended(tail, range(2))
    tail.broker.put(["a", "b", "c", "d"])
    tail.poll(1.0)
    assert worker_group.working and len(worker_group.lease) == 4


def test_a_short_sample_before_a_long_one_waits_for_nothing() -> None:
    reference = Gang()
    tail, *_ = parts(algorithm={"kl": {"coefficient": 0.1}}, reference=reference)
    ended(tail, range(2))
    tail.add_samples([sample(2, tokens=2), sample(3, tokens=30)])
    tail.unscored = []
    tail.broker.put(["slot"])
    tail.poll(1.0)
    reference.done = True
    tail.poll(1.0)
    assert reference.passes[:2] == [("reference", [0, 0]), ("reference", [1])], "two that fit together, then the short one by itself"


def test_a_gang_that_dies_in_the_tail_is_asked_again_in_the_learn_phase() -> None:
    tail, _, worker_group, learning = parts(algorithm={"updates_per_step": 2, "kl": {"coefficient": 0.1}}, lora=2)
    samples = ended(tail, range(4))
    tail.broker.put(["slot"])
    worker_group.dies = worker_group.done = True
    tail.poll(1.0)
    assert tail.refs() == [] and learning.passes.collect() == ["slot"] and tail.report()["overlap/logprobs"] == 0
    batch, _ = learning.advantages(samples)
    assert batch.old is None and batch.reference is None, "nothing was passed over ahead: the update does so itself"
    worker_group.dies = False
    tail.poll(1.0)
    tail.broker.put(["slot"])
    tail.poll(1.0)
    worker_group.done = True
    tail.poll(1.0)
    batch, _ = learning.advantages(samples)
    whole = np.concatenate([one.completion.logprobs for one in samples])
    assert batch.old is not None and batch.reference is not None
    np.testing.assert_array_equal(batch.old, -whole)
    np.testing.assert_array_equal(batch.reference, 3 * whole)


@pytest.mark.parametrize(
    ("algorithm", "learner", "wanted"),
    [
        ({}, {}, ()),
        ({"kl": {"coefficient": 0.1}}, {"lora": 2}, ("reference",)),
        ({"kl": {"coefficient": 0.1}}, {}, ()),
        ({"updates_per_step": 2}, {}, ("old",)),
        ({"batch_samples": 6}, {}, ()),  # the step has no more samples than that: one update
        ({"batch_samples": 5}, {}, ("old",)),
        ({"epochs": 2, "kl": {"coefficient": 0.1}}, {}, ("old",)),
        ({"epochs": 2, "kl": {"coefficient": 0.1}}, {"lora": 2}, ("old", "reference")),
        ({"advantage": {"estimator": "reinforce"}, "kl": {"coefficient": 0.1}}, {}, ()),
        ({"advantage": {"estimator": "reinforce"}, "kl": {"coefficient": 0.1}}, {"lora": 2}, ("reference",)),
        (PPO, {}, ("old",)),
        (PPO, {"lora": 2}, ("old", "reference")),
        ({"kl": {"coefficient": 0.1}}, {"zero_stage": 3}, ()),
        ({"kl": {"coefficient": 0.1}}, {"zero_stage": 3, "lora": 2}, ("reference",)),
    ],
)
def test_the_passes_that_an_update_begins_with(algorithm: dict[str, Any], learner: dict[str, Any], wanted: tuple[str, ...]) -> None:
    """Of the learner; the reference's own is there wherever there is a KL, unless adapters alone are trained."""
    critic, reference = (Gang() if algorithm is PPO else None), (Gang() if "kl" in algorithm and "lora" not in learner else None)
    tail, _, _, learning = parts(algorithm=algorithm, critic=critic, reference=reference, **learner)
    assert learning.context.recipe.has_reference == (reference is not None)
    assert (learning.passes.reference is None) == (reference is None)
    assert (learning.passes.logprobs.names if learning.passes.logprobs else ()) == wanted
    assert not tail.wants_slot()
    if wanted or reference is not None:
        ended(tail, range(1))
        assert tail.wants_slot()


def test_groups_that_may_be_dropped_are_not_passed_over_ahead() -> None:
    tail, *_ = parts(algorithm={"updates_per_step": 2, "filter_range": [0.1, 0.9]})
    ended(tail, range(4))
    assert not tail.wants_slot() and "filter_range" in tail.report()["overlap/passes_obstacle"]


def test_the_proximal_policys_passes_begin_when_the_update_beside_the_rollout_has_ended() -> None:
    """They take the learner's own slots, and never an engine's. Other worker groups wait for the learn phase."""
    critic, reference, ended_updates = Gang(), Gang(), list[str]()
    _, _, learner, learning = parts(algorithm=PPO, critic=critic, reference=reference, lag=1)
    learner.assign_leases(["learner's"])
    ready = False

    def result() -> UpdateStats:
        ended_updates.append("result")
        return UpdateStats()

    learning.update = Pending(result, lambda: ready)
    tail = early_work(Scoring(), learning, groups=3, beside_update=True)
    samples = [sample(key) for key in range(6)]
    tail.poll(1.0)
    tail.add_samples(samples[:4])
    tail.broker.put(["engine's"])
    tail.poll(1.0)
    assert not tail.wants_slot() and learner.passes == [] == ended_updates
    ready = True
    tail.poll(0.0)
    assert learner.passes == [] and tail.refs() == [], "engines end before the pass would"
    tail.poll(1.0)
    assert learner.passes == [("logprobs", [0, 0])] and tail.refs() == ["logprobs"] and ended_updates == ["result"]
    learner.done = True
    tail.poll(0.0)
    tail.finish()
    assert learner.working and tail.broker.free == ("engine's",) and critic.passes == reference.passes == []
    assert tail.report()["overlap/logprobs"] == 2 and tail.report()["overlap/passes_obstacle"] == ""
    batch, _ = learning.advantages([with_reward(one, 1.0) for one in samples])
    assert learner.passes[1:] == [("logprobs", [1, 1, 2, 2])]
    np.testing.assert_array_equal(batch.old, -np.concatenate([one.completion.logprobs for one in samples]))


@pytest.mark.parametrize("lost_in", ["update", "pass"])
def test_a_learner_lost_beside_the_rollout_is_replaced_after_it(lost_in: str) -> None:
    """Engines may hold every other slot. New ranks would wait for one, and meanwhile no engine could report or give one up."""
    _, _, learner, learning = parts(algorithm={"epochs": 2}, lag=1)
    log: list[str] = []

    def replaced(group: Any) -> None:
        log.append("the learner is replaced")
        group.working = True

    def result() -> UpdateStats:
        if lost_in == "update":
            replaced(learner)
        log.append("updated")
        return UpdateStats(applied=1)

    def lost(refs: list[Any], what: str) -> None:
        log.append("the loss is handled")
        learning.context.broker.put(learner.park())

    learning.worker_groups.turn = replaced  # type: ignore[method-assign]
    learning.plan = SimpleNamespace(reason="")  # type: ignore[assignment]
    learning.context.autoscaler.predictor.observe_passes = learning.context.autoscaler.predictor.observe_update = lambda *_: None
    learning.context.record = SimpleNamespace(progress=SimpleNamespace(message=log.append))  # type: ignore[misc, assignment]
    learner.assign_leases(["learner's"])
    learner.by_rank = [SimpleNamespace(leases=learner.lease)]
    learner.wait_for_values = lost  # type: ignore[method-assign]
    learner.update = Pending(result, lambda: True, lambda: lost_in == "update")
    samples = [sample(0), sample(1)]
    update = learning.start_update(None, samples)  # type: ignore[arg-type]
    tail = early_work(Scoring(), learning, groups=1, beside_update=True)
    tail.add_samples(samples)
    tail.poll(1.0)
    learner.done, learner.dies = True, lost_in == "pass"
    tail.add_samples([sample(2), sample(3)])
    tail.poll(1.0)
    tail.finish()
    before = [] if lost_in == "update" else ["updated"]
    assert log == before and learner.passes == [("logprobs", [0, 0])] * len(before) and learner.lease == ["learner's"] and tail.refs() == []
    stats, _ = update.result()
    after = ["the learner is replaced", "updated"] if lost_in == "update" else ["the loss is handled", "the learner is replaced"]
    assert log == before + after and stats.applied == 1 and update.result()[0] is stats and log == before + after
    assert learner.working and not learning.passes.logprobs.known


@pytest.mark.parametrize(("leases", "fit"), [(1, 0), (4, 1)])
def test_before_the_first_pass_its_seconds_are_those_of_an_update_under_the_same_leases(leases: int, fit: int) -> None:
    _, _, learner, learning = parts(algorithm={"epochs": 2}, lag=1)
    learning.context.autoscaler.learner.predict = lambda slots, tokens: 2.0 / slots
    learner.by_rank = [SimpleNamespace(leases=["learner's"] * leases)]
    learner.assign_leases(["learner's"] * leases)
    tail = early_work(Scoring(), learning, groups=1, beside_update=True)
    tail.add_samples([sample(0), sample(1)])
    tail.poll(1.0)
    assert len(learner.passes) == fit


def test_partial_rollouts_work_on_the_groups_that_are_certain_to_be_trained() -> None:
    """Two of three groups: the first is due now, so the second complete group of the others has to wait for the next step."""
    _, scoring, learner, learning = parts(algorithm={"updates_per_step": 2}, lag=1, partial="continue")
    earlier = [replace(sample(key), completion=replace(sample(key).completion, version=0)) for key in (0, 1)]
    earlier[1] = replace(earlier[1], completion=replace(earlier[1].completion, finish_reason=UNFINISHED))
    groups = [Group(earlier[0].prompt, 1, 0, tuple(earlier)), *(Group(Prompt(g, "p", (7,)), 2) for g in (1, 2))]
    batch, slots = RolloutBatch(groups, step=2, quota=2, max_lag=1, count=COUNT), [["slot"], ["slot"]]
    learning.number, learning.lease_free_slots = 2, lambda _: slots.pop() if slots else []  # type: ignore[method-assign]
    tail = EarlyWork(scoring, learning, learning.context.broker, batch)  # type: ignore[arg-type]
    finished, asked = [0], list[int]()
    for key in (4, 5, 2, 3, 1):
        finished.append(key)
        tail.add_samples([sample(key, begun=1 if key < COUNT else 2)])
        batch.is_enough(finished)
        tail.poll(1.0)
        asked = [one.completion.key for one in scoring.asked]
        assert asked == {4: [], 5: [4, 5], 2: [4, 5], 3: [4, 5], 1: [4, 5]}[key]
    for _ in range(2):
        scoring.answer()
        tail.poll(1.0)
    assert batch.chosen == [0, 2] and [one.completion.key for one in scoring.asked] == [4, 5, 0, 1]
    assert learner.passes == [("logprobs", [2, 2])]


def test_free_slots_are_asked_for_only_if_the_learner_has_work_for_them() -> None:
    _, scoring, _, learning = parts(algorithm={"updates_per_step": 2}, lag=1, partial="continue", micro_batch_tokens=100)
    asked: list[bool] = []
    learning.lease_free_slots = lambda _: asked.append(True) or []  # type: ignore[method-assign, func-returns-value]
    batch = RolloutBatch([Group(Prompt(g, "p", (7,)), 1) for g in range(3)], step=1, quota=3, max_lag=1, count=COUNT)
    tail = EarlyWork(scoring, learning, learning.context.broker, batch)  # type: ignore[arg-type]
    for key in range(6):
        tail.add_samples([sample(key, tokens=12)])
        batch.is_enough(range(key + 1))
        tail.poll(2.0)
        tail.poll(0.0)
    assert asked == [True], "once: after a group it has a fourth of the samples, and the answer was that there are none"


def test_free_slots_that_do_not_fit_are_not_taken_again_at_once() -> None:
    _, scoring, learner, learning = parts(algorithm={"updates_per_step": 2}, lag=1, partial="continue")
    asked: list[bool] = []
    scoring.fits = learner.fits = lambda leases: len(leases) > 1  # type: ignore[method-assign]
    learning.lease_free_slots = lambda _: asked.append(True) or ["slot"]  # type: ignore[method-assign, func-returns-value]
    batch = RolloutBatch([Group(Prompt(0, "p", (7,)), 1)], step=1, quota=1, max_lag=1, count=COUNT)
    tail = EarlyWork(scoring, learning, learning.context.broker, batch)  # type: ignore[arg-type]
    tail.add_samples([sample(0), sample(1)])
    batch.is_enough(range(2))
    for taken in (["slot"], [], []):
        tail.poll(1.0)
        assert tail.broker.take() == taken, "the rollout releases what is free"
    tail.ask_at_s = 0.0
    tail.poll(1.0)
    assert len(asked) == 2 and not learner.passes


def test_free_slots_are_leased_for_the_worker_group_that_has_work() -> None:
    reference = Gang()
    _, _, learner, learning = parts(algorithm={"kl": {"coefficient": 0.1}}, reference=reference)
    for gang, nodes in ((learner, ["a"]), (reference, ["b", "c"])):
        gang.by_rank = [SimpleNamespace(slot=SimpleNamespace(node=node), leases=[]) for node in nodes]
        gang.pool = SimpleNamespace(kind="")  # type: ignore[attr-defined]
    context, full = learning.context, list[str]()
    context.autoscaler.criteria.bids = None
    context.leases.with_room = lambda nodes: [node for node in nodes if node not in full]  # type: ignore[method-assign]
    context.leases.ask = lambda count, nodes: nodes  # type: ignore[method-assign, assignment, return-value]
    context.leases.collect = lambda asked, kind, wait_s: asked  # type: ignore[method-assign, assignment, return-value]
    learning.passes.add_samples([sample(0), sample(1)])
    assert learning.passes.with_work(1.0) == [reference]
    assert learning.lease_free_slots([reference, learner]) == ["b", "c"]
    full.append("c")
    assert learning.lease_free_slots([reference, learner]) == ["a"] and learning.lease_free_slots([reference]) == []


def test_looks_take_a_small_share_of_the_drivers_time() -> None:
    """A forecast visits every response, and a driver of many engines reads one report after another."""
    tail, looks = parts()[0], list[float]()

    def tail_s() -> float:
        time.sleep(0.02)
        looks.append(1.0)
        return 1.0

    tail.rollout = SimpleNamespace(source=SimpleNamespace(has_work=lambda: True), tail_s=tail_s)  # type: ignore[assignment]
    end_s, events = time.monotonic() + 0.1, 0
    while time.monotonic() < end_s:
        tail.on_event(RolloutProgress(0, 6))
        events += 1
    assert len(looks) <= 3 and events > 20
