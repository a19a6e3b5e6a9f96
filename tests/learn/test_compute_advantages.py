"""From a step's rewards to advantages per token, against loops; and which of them a part of the groups can have by itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.call_schedule import Option, Problem
from placement.calls import StepGraph, in_turn, part, with_passes_first
from placement.execution_plan import ExecutionPlan, plan_at
from placement.layouts import Layout
from placement.scaling.phase_delay import Delay
from rlhfless_ray.autoscaler.call_planner import CallToPlan
from rlhfless_ray.common.estimators import ESTIMATORS
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.learn.estimators import BASELINES
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.algorithm_sections import AdvantageConfig
from rlhfless_ray.types import Completion, CriticStats, Prompt, SampleId, Scored, UpdateStats

MOST = 10
COMPARES = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")  # the responses to one prompt with each other
WHITENS = ("gae", "reinforce", "reinforce_baseline")


def recipe(**changes: Any) -> Recipe:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task", **changes.get("reward", {})}}
    rollout = {"samples_per_prompt": 3, "max_tokens": MOST}
    reference = {"path": "teacher"} if "on_policy_distill" in str(changes) else {}
    sections = {"algorithm": changes.get("algorithm", {}), "learner": changes.get("learner", {}), "reference": reference}
    return Recipe.parse({**tree, "rollout": rollout, **sections})


def with_estimator(name: str) -> dict[str, Any]:
    compares = ESTIMATORS[name].teacher or ESTIMATORS[name].pairs
    kl = {"kl": {"coefficient": 1.0, "place": "reward", "estimator": "k1", "limit": None}} if compares else {}
    return {"advantage": {"estimator": name}, **kl, **({"importance_cap": 0} if ESTIMATORS[name].pairs else {})}


def by_hand(
    chosen: Recipe, rewards: list[list[float]], lengths: list[int], truncated: list[bool], kl: list[list[float]], beta: float
) -> list[list[float]]:
    """Advantages of the samples that have a reward, token by token."""
    name, section, count = chosen.algorithm.advantage.estimator, chosen.reward, 3
    flat = [r for group in rewards for r in group]
    for i, length in enumerate(lengths):
        over = length - (MOST - (section.overlong_buffer_tokens or 0))
        if section.overlong_buffer_tokens and over > 0:
            flat[i] -= section.overlong_penalty * over / section.overlong_buffer_tokens
        if section.stop_properly_penalty is not None and truncated[i]:
            flat[i] = flat[i] * section.stop_properly_penalty if section.stop_properly_penalty >= 0 else section.stop_properly_penalty
    known = [i for i, row in enumerate(r for group in rewards for r in group) if not np.isnan(row)]
    found = []
    for i in known:
        group = [flat[j] for j in known if j // count == i // count]
        others = [flat[j] for j in known if j // count == i // count and j != i]
        alone = len(group) == 1 and name in COMPARES
        value = {
            "reinforce": lambda i=i: flat[i],
            "rloo": lambda i=i, o=others: flat[i] - np.mean(o),
            "reinforce_baseline": lambda i=i, g=group: flat[i] - np.mean(g),
            "dr_grpo": lambda i=i, g=group: flat[i] - np.mean(g),
            "group_norm": lambda i=i, g=group: (flat[i] - np.mean(g)) / (np.std(g, ddof=1) + 1e-9),
            "flash_reinforce": lambda i=i: flat[i] - np.mean([flat[j] for j in known]),
        }[name]
        shaped = 0.0 if alone else float(value())
        if section.clip_range is not None:
            shaped = min(max(shaped, section.clip_range[0]), section.clip_range[1])
        tokens = [-beta * k for k in kl[i]]
        tokens[-1] += shaped
        for t in reversed(range(len(tokens) - 1)):
            tokens[t] += chosen.algorithm.advantage.gamma * tokens[t + 1]
        found.append(tokens)
    if name in WHITENS:
        every = [a for tokens in found for a in tokens]
        scale = np.std(every) if chosen.algorithm.advantage.normalize_std else 1.0
        found = [[(a - np.mean(every)) / scale for a in tokens] for tokens in found]
    return found


CASES = [
    *({"algorithm": {"advantage": {"estimator": name}}} for name in COMPARES),
    {"algorithm": {"advantage": {"estimator": "flash_reinforce"}}},
    {"algorithm": {"advantage": {"estimator": "reinforce", "gamma": 0.9}}},
    {"algorithm": {"advantage": {"estimator": "reinforce_baseline", "normalize_std": False}}, "reward": {"clip_range": (-0.3, 0.4)}},
    {"algorithm": {"advantage": {"estimator": "rloo"}}, "reward": {"overlong_buffer_tokens": 6, "overlong_penalty": 0.7}},
    {"algorithm": {"advantage": {"estimator": "reinforce"}}, "reward": {"stop_properly_penalty": 0.25}},
    {"reward": {"stop_properly_penalty": -0.5, "overlong_buffer_tokens": 4}},
]


class Looking:
    """The gangs of learner and reference in one, whose log-probabilities differ by these KLs."""

    working = False
    slots, by_rank = 1, ()
    recovery, call_s = SimpleNamespace(restarts=0), 0.1

    def __init__(self, kl: list[list[float]]) -> None:
        self.kl = np.concatenate(kl).astype(np.float32)

    def assign_leases(self, leases: list[Any]) -> list[Any]:
        return leases

    def compute(self, what: str, batch: Any, *names: tuple[str, ...]) -> dict[str, np.ndarray]:
        assert len(self.kl) == len(batch.logprobs) and (what, names) in (("logprobs", (("old",),)), ("reference", ()))
        return {"old": -self.kl} if what == "logprobs" else {"reference": -2 * self.kl}

    def start_compute(self, what: str, batch: Any, *names: Any) -> Any:
        found = self.compute(what, batch, *names)
        return Pending(lambda: found)


@pytest.mark.parametrize("in_reward", [False, True])
@pytest.mark.parametrize("changes", CASES)
def test_the_stage_makes_the_advantages_of_the_recipe(changes: dict[str, Any], in_reward: bool) -> None:
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(4, 3)).round(1)
    rewards[0, 1] = rewards[2, 0] = rewards[2, 2] = np.nan
    lengths, truncated = rng.integers(1, MOST + 1, 12).tolist(), (rng.random(12) < 0.4).tolist()
    kl = [rng.random(length).round(2).tolist() if in_reward else [0.0] * length for length in lengths]
    tree = {**changes, "algorithm": {**changes.get("algorithm", {})}}
    if in_reward:
        tree["algorithm"]["kl"] = {"coefficient": 0.3, "place": "reward", "estimator": "k1"}
    chosen = recipe(**tree)
    samples = []
    for i, length in enumerate(lengths):
        done = Completion(i, np.arange(length, dtype=np.int32), np.zeros(length, np.float32), "length" if truncated[i] else "stop", 1)
        reward = float(rewards.flat[i])
        samples.append(Scored(Prompt(i // 3, "p", (7, 8)), SampleId(i // 3, 1, i % 3), done, reward=None if np.isnan(reward) else reward))
    scored = [i for i, s in enumerate(samples) if s.reward is not None]
    leases: Any = SimpleNamespace(release=lambda leases: None)
    context = SimpleNamespace(recipe=chosen, broker=SlotBroker(leases), leases=leases)
    worker_group = Looking([kl[i] for i in scored])
    stage = LearnStage(context, worker_group, None, worker_group if in_reward else None)  # type: ignore[arg-type]
    batch, trained = stage.advantages(samples)
    expected = by_hand(chosen, rewards.tolist(), lengths, truncated, kl, 0.3)
    assert batch.response_lengths.tolist() == [lengths[i] for i in scored]
    np.testing.assert_allclose(batch.advantages, np.concatenate(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([trained[i].advantage for i in scored], [np.mean(tokens) for tokens in expected], rtol=1e-5, atol=1e-6)
    assert all(s.advantage is None for i, s in enumerate(trained) if i not in scored)
    if in_reward:
        np.testing.assert_array_equal(batch.old, -np.concatenate([kl[i] for i in scored]).astype(np.float32))
        assert stage.kl == pytest.approx(np.mean([np.mean(kl[i]) for i in scored]), rel=1e-5)


def test_the_recipe_knows_the_estimators_as_they_are() -> None:
    assert set(AdvantageConfig.model_fields["estimator"].annotation.__args__) == set(ESTIMATORS)
    for name, estimator in ESTIMATORS.items():
        assert recipe(algorithm=with_estimator(name)).algorithm.has_critic == estimator.critic
    assert {*COMPARES, "online_dpo"} == {name for name, e in ESTIMATORS.items() if e.least_samples > 1}
    assert set(WHITENS) == {name for name, e in ESTIMATORS.items() if e.whitens}
    assert {"gae", "reinforce"} == {name for name, e in ESTIMATORS.items() if e.discounts}
    assert set(BASELINES) == set(ESTIMATORS)


class Working:
    """A gang that notes whose turn it is, and under which leases."""

    def __init__(self, name: str, log: list[str], ranks: int) -> None:
        self.name, self.log, self.ranks, self.slots = name, log, ranks, ranks
        self.recovery, self.call_s, self.deadline_s = SimpleNamespace(restarts=0), 0.1, 5.0
        self.scheduler = SimpleNamespace(lease_free=lambda by_rank, have: [])
        self.working, self.held = False, []
        self.by_rank: list[Any] = []

    def assign_leases(self, leases: list[str]) -> list[str]:
        self.held, spare = leases[: self.slots], leases[self.slots :]
        self.working, self.by_rank = True, [SimpleNamespace(leases=[lease]) for lease in self.held]
        self.log.append(f"{self.name} on {' '.join(self.held)}")
        return spare

    def park(self) -> list[str]:
        self.working, self.by_rank, held = False, [], self.held
        return held

    def start_snapshot(self) -> None:
        assert not self.working

    def compute(self, what: str, batch: Any, *names: Any) -> dict[str, np.ndarray]:
        assert self.working
        tokens = len(batch.logprobs)
        if what == "values":
            return {"values": np.arange(tokens, dtype=np.float32) / 10}
        return {what if what == "reference" else "old": np.full(tokens, 1.0 if what == "reference" else 0.0, np.float32)}

    def start_compute(self, what: str, batch: Any, *names: Any) -> Any:
        found = self.compute(what, batch, *names)
        return Pending(lambda: found)

    def fits(self, leases: list[str]) -> bool:
        return len(leases) >= self.ranks

    def start_update(self, batch: Any, publishes: bool = False) -> Any:
        assert self.working
        self.log.append(f"{self.name} learns")
        kind = CriticStats if self.name == "critic" else UpdateStats
        return Pending(lambda: kind(applied=1))


@pytest.mark.parametrize("together", [False, True])
def test_with_a_critic_the_gangs_take_turns_under_the_same_leases_or_work_at_once(together: bool) -> None:
    log: list[str] = []
    gae = {"estimator": "gae", "gamma": 0.9, "lambd": 0.8}
    chosen = recipe(algorithm={"advantage": gae, "kl": {"coefficient": 0.2, "place": "reward", "estimator": "k2"}})
    chosen = chosen.model_copy(update={"critic": chosen.critic.model_copy(update={"freeze_policy_steps": 1})})
    learner, critic, reference = Working("learner", log, 2), Working("critic", log, 1), Working("reference", log, 1)
    released: list[str] = []
    nodes = SimpleNamespace(slots=lambda labels: {"here": 3})
    held = ["a", "b", "c"]

    def release(leases: list[str]) -> None:
        released.extend(leases)
        held[:] = [lease for lease in held if lease not in leases]

    leases: Any = SimpleNamespace(release=release, resource="cpu", nodes=nodes, held=held)
    broker = SlotBroker(leases)
    rooms: list[int] = []

    def plan(graph: StepGraph, calls: Mapping[str, CallToPlan], decision: Any, room: int) -> ExecutionPlan:
        rooms.append(room)
        order = with_passes_first(part(graph, calls))
        options = {name: [Option(Layout(call.ranks), 1.0)] for name, call in calls.items()}
        return replace(plan_at(Problem(order if together else in_turn(order), options, 1, room), 1.0), reason="as told")

    broker.put(["a", "b", "c"])  # type: ignore[list-item]
    context: Any = SimpleNamespace(
        recipe=chosen,
        broker=broker,
        phases=SimpleNamespace(phase=lambda name: nullcontext()),
        leases=broker.leases,
        record=SimpleNamespace(progress=SimpleNamespace(message=print)),
        autoscaler=SimpleNamespace(
            size_learner=lambda samples, is_beside_rollout: SimpleNamespace(actors=1, reason=""),
            learner_delay=Delay(0.0, 1, ""),
            predictor=SimpleNamespace(
                observe_update=lambda *a: log.append("measured"), observe_passes=lambda samples, seconds: log.append("all before it too")
            ),
            calls=SimpleNamespace(
                plan=plan,
                search=lambda *of: None,
                price_ranks=lambda *of: None,
                observe=lambda plan, tokens, took, wall_s: log.append("each call too"),
            ),
            criteria=SimpleNamespace(bids=None),
        ),
    )

    stage = LearnStage(context, learner, critic, reference)  # type: ignore[arg-type]
    samples = []
    for i in range(6):
        done = Completion(i, np.arange(2, dtype=np.int32), np.zeros(2, np.float32), "stop", 1)
        samples.append(Scored(Prompt(i // 3, "p", (7,)), SampleId(i // 3, 1, i % 3), done, reward=float(i) if i != 1 else None))
    for number in (1, 2):
        stage.number = number
        with stage.phase(samples):
            batch, trained = stage.advantages(samples)
            update = stage.start_update(batch, samples)
            log.append("meanwhile")
            stats, told = update.result()
        assert stats.applied == (number == 2) and told["critic/applied"] == 1
    # the KL, then the values; of what reference and critic do not need, the lease that the learner will
    turns = ["reference on a", "learner on b a", "critic on b", "critic learns", "learner on a b"]
    if together:  # the critic has to wait for the reference's lease, because the learner has the others
        turns = ["reference on a", "learner on b c", "critic on a", "critic learns"]
    first = [*turns, *(["learner on b c"] if together else []), "meanwhile"]
    second = [*turns, "learner learns", "meanwhile", "measured", "each call too"]
    assert log == [*first, "all before it too", *second, "all before it too"]
    assert sorted(released + list(broker.free)) == ["a", "b", "c"] and released == ([] if together else ["c"])
    assert rooms == [3, 3] and told["pool/learn_reason"] == "as told" and told["learn/call_s/critic_update"] == pytest.approx(0.1)
    assert [s.earned for s in trained] == [pytest.approx(r - 2 * 0.2 * 0.5) if r != 1 else None for r in range(6)]
    by_hand = []
    for reward, k in zip([0, 2, 3, 4, 5], range(5), strict=True):  # five samples of two tokens; one has no reward
        first, last = 0.2 * k, 0.2 * k + 0.1
        at_last = (reward - 0.1) - last
        by_hand.append([-0.1 + 0.9 * last - first + 0.9 * 0.8 * at_last, at_last])
    returns = [[a + v for a, v in zip(row, (0.2 * k, 0.2 * k + 0.1), strict=True)] for k, row in enumerate(by_hand)]
    np.testing.assert_allclose(batch.returns, np.concatenate(returns), rtol=1e-5, atol=1e-6)
    flat = np.concatenate(by_hand)
    np.testing.assert_allclose(batch.advantages, (flat - flat.mean()) / flat.std(), rtol=1e-5, atol=1e-6)


PARTS = [*map(with_estimator, ESTIMATORS), {"kl": {"coefficient": 0.1, "place": "reward"}}]


def test_an_adapted_coefficient_goes_on_where_it_was() -> None:
    chosen = recipe(algorithm={"kl": {"coefficient": 0.1, "target": 0.02, "horizon": 100}})
    stats = UpdateStats(kl=0.03, applied=1)
    recovery = SimpleNamespace(restarts=0)
    worker_group = SimpleNamespace(
        recovery=recovery,
        start_update=lambda *_, **__: Pending(lambda: stats),
        by_rank=[SimpleNamespace(leases=[1])],
        ranks=1,
        slots=1,
        working=True,
        call_s=0.1,
    )
    context = SimpleNamespace(
        recipe=chosen,
        record=SimpleNamespace(progress=SimpleNamespace(message=print)),
        autoscaler=SimpleNamespace(predictor=SimpleNamespace(observe_update=lambda *a: None)),
    )
    stage = LearnStage(context, worker_group)  # type: ignore[arg-type]
    stage.plan = SimpleNamespace(reason="")  # type: ignore[assignment]
    _, told = stage.start_update(None, [None] * 12).result()  # type: ignore[arg-type, list-item]
    assert told["learn/kl_coefficient"] == 0.1
    assert stage.controller.coefficient == pytest.approx(0.1 * (1 + 0.2 * 12 / 100))
    again = LearnStage(context, worker_group)  # type: ignore[arg-type]
    again.restore(stage.state())
    assert again.controller == stage.controller
    fixed = LearnStage(SimpleNamespace(recipe=recipe(algorithm={"kl": {"coefficient": 0.4}})), WorkerGroup.__new__(WorkerGroup))  # type: ignore[arg-type]
    fixed.restore(stage.state())
    assert fixed.controller.coefficient == 0.4
