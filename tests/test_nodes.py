"""Two nodes that both have cores: engines spread, the learner stays where its state is, a lost node is done without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.experimental.locations import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.common.fault_injection import pid_of
from rlhfless_ray import Recipe, Runtime, SupervisedRecipe, run_supervised
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.cluster_nodes import ClusterNodes, node_slots
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.node_pools import NodePools
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.rank_actors import RankActor, parts_in, read_source
from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.rank_state import read_state
from rlhfless_ray.learn.recovery import Recovery
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.recipe.engine_pools import engine_pools
from rlhfless_ray.report.metrics import read_jsonl
from rlhfless_ray.rollout.weight_traffic import WeightTraffic
from rlhfless_ray.runtime.worker_pools import prices
from rlhfless_ray.supervise.rank_recorder import DRIVER, RankRecorder
from rlhfless_ray.weights.checksum import checksum, digests
from rlhfless_ray.weights.model_folder import DividedFiles
from rlhfless_ray.weights.remote_folder import divide_folder
from rlhfless_ray.weights.shards import save_slices, shard_name
from rlhfless_ray.weights.tensor_file import load_tensors, save_tensors
from rlhfless_ray.weights.tensor_slice import HeldSlices, TensorSlice, whole_slices
from tests.conftest import samples, small_recipe, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture(scope="module")
def nodes(no_ray: None) -> Iterator[Any]:
    """A head, where the driver is, and a second node, with a core each."""
    with two_nodes(1, 1, 256) as cluster:
        yield cluster


def leases_of(deadline_s: float = 60.0) -> LeaseManager:
    return LeaseManager("cpu", Ledger("cpu", 1.0), deadline_s, f"nodes{time.time_ns()}")


def test_a_preferred_node_that_others_hold_is_waited_for_shortly_and_then_any_node_will_do(nodes):
    here, there = node_slots("cpu")
    ours, theirs = leases_of(), leases_of()
    theirs.collect(theirs.ask(1, [here]), "rollout", 60.0, need=1)
    start = time.monotonic()
    [lease] = ours.take(1, "rollout", ours.ask_preferred(1, [here]))
    assert lease.slot.node == there and time.monotonic() - start < 45  # the deadline is 60 s
    ours.release_all()
    theirs.release_all()


class Seen:
    """Notes on which nodes the engines of each rollout are."""

    def __init__(self, run: Runtime) -> None:
        self.engines: list[tuple[str, ...]] = []
        self.run, self.resize = run, run.parts.stages.rollout.pool.resize
        run.parts.stages.rollout.pool.resize = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **more: Any) -> Any:
        left = self.resize(*args, **more)
        self.engines.append(tuple(sorted(i.slot.node for i in self.run.parts.stages.rollout.pool.working)))
        return left


def assert_same(run: Runtime, uninterrupted: Any, steps: int) -> None:
    for number in range(1, steps + 1):
        assert [s["response"] for s in samples(run.folder.path, number)] == [s["response"] for s in samples(uninterrupted, number)]


def test_a_run_uses_both_nodes_and_makes_the_same_samples(nodes, tmp_path, uninterrupted):
    """Without keep-alive every engine is started anew each step, and the learner's state alone stays."""
    both = tuple(sorted(node_slots("cpu")))
    with Runtime(Recipe.parse(small_recipe(tmp_path, rollout__min_actors=2, run__steps=2, functions__keep_alive_s=0.0))) as run:
        seen = Seen(run)
        for term in (run.autoscaler.terms.transfer, run.autoscaler.terms.transfer_away):  # as they are on a machine with nothing else to do
            term.observe = lambda *_: None  # type: ignore[method-assign]
        [home] = {instance.slot.node for instance in run.parts.stages.learn.worker_group.by_rank}
        for step in run:
            assert {instance.slot.node for instance in run.parts.stages.learn.worker_group.by_rank} == {home}
            assert step.plan.actors == 2
            assert step.metrics["weights/pulled_mb"] == step.metrics["weights/least_mb"] > 0.1, "one copy for the node without the learner"
            assert step.metrics["rollout/longest_at_home"] == 1, "the longest share is where the weights and the learner's slots are"
    assert seen.engines.count(both) >= 2, seen.engines  # each step; evaluations take what they get at once
    assert_same(run, uninterrupted, 2)


def test_a_node_that_is_lost_with_an_engine_at_work_costs_no_sample(nodes, tmp_path, uninterrupted):
    """The engine is stopped as the rollout begins, so that it has work however late the driver looks; then its node goes. The pool is
    fixed, so that every engine has a share."""
    both, stopped = tuple(sorted(node_slots("cpu"))), []
    tree = small_recipe(tmp_path, rollout__max_actors=2, functions__elastic=False, rollout__silence_s=300, functions__lease_deadline_s=300)
    with Runtime(Recipe.parse(tree)) as run:
        stage, pool = run.parts.stages.rollout, run.parts.stages.rollout.pool
        resize, tell = pool.resize, stage._on_progress
        assert tuple(sorted(i.slot.node for i in pool.parked)) == both  # as many as there are cores
        [node] = nodes.worker_nodes

        def stop(*args: Any, **more: Any) -> Any:
            left = resize(*args, **more)
            for engine in pool.working:
                if run.parts.session.step.number > 1 and not stopped and len(pool.working) == 2 and engine.slot.node == node.node_id:
                    stopped.append(pid_of(engine))
                    os.kill(stopped[0], signal.SIGSTOP)
            return left

        def lose(done: int, total: int) -> None:
            tell(done, total)
            if stopped and nodes.worker_nodes:
                nodes.remove_node(node, allow_graceful=False)
                os.kill(stopped[0], signal.SIGKILL)  # of itself a stopped process does not see that its node is gone

        pool.resize, stage._on_progress = stop, lose  # type: ignore[method-assign]
        for step in run:
            last = step
            if stopped:
                break
    assert last.metrics["rollout/orphans"] > 0 and last.metrics["faults/preempted"] > 0 and last.metrics["faults/bugs"] == 0
    assert_same(run, uninterrupted, last.number)
    nodes.add_node(num_cpus=1, object_store_memory=256 * 2**20)
    nodes.wait_for_nodes(timeout=120)


def test_a_supervised_stage_records_the_memory_of_ranks_on_another_node(nodes, tmp_path, monkeypatch):
    told, nodes_of = [], {}
    on_memory, on_began = RankRecorder._on_memory, RankRecorder._on_began
    monkeypatch.setattr(RankRecorder, "_on_memory", lambda recorder, content: (told.append(content), on_memory(recorder, content)))
    monkeypatch.setattr(
        RankRecorder, "_on_began", lambda recorder, content: (nodes_of.update({content[0]: content[1]}), on_began(recorder, content))
    )
    tree = {
        "task": "sft",
        "run": {"root": str(tmp_path), "steps": 40, "min_ranks": 2},
        "data": {"task": "chain", "rows": 640, "batch_rows": 16},
        "learner": {"ranks": 2},
        "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},
    }
    folder = run_supervised(SupervisedRecipe.parse(tree))
    [away] = {node.node_id for node in nodes.worker_nodes}
    of_ranks = [(rank, peaks) for rank, peaks in told if rank != DRIVER]
    assert {nodes_of[rank] for rank, _ in of_ranks} == {away}
    theirs = max(peaks.get("learner", 0.0) for _, peaks in of_ranks)
    recorded = [row["memory/learner_peak_mb"] for row in read_jsonl(folder.path / "metrics.jsonl")[0] if "memory/learner_peak_mb" in row]
    assert 50 < round(theirs, 1) <= max(recorded)


def test_nodes_of_ranks_pull_nothing_of_a_version_that_each_rank_holds_whole(nodes, tmp_path):
    """Before, each rank published some layers, and every node pulled the others."""
    layers = {f"layer.{number}": np.full(2**18, number, np.float32) for number in range(4)}

    class Rank:
        def weights(self, place: int, count: int) -> Any:
            own = whole_slices({name: array for number, (name, array) in enumerate(layers.items()) if number % count == place})
            return own, (digests(own), [])

    def load(*shards: Any) -> int:
        return checksum(HeldSlices.of(*shards))

    here, there = sorted(node_slots("cpu"), key=lambda node: node != ray.get_runtime_context().get_node_id())
    on = {node: {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in (here, there)}
    pool: Any = SimpleNamespace(ledger=Ledger("cpu", 1.0), leases=SimpleNamespace(resource="cpu"))
    recipe = Recipe.parse(small_recipe(tmp_path, learner__ranks=3))
    group = WorkerGroup(pool, learner_settings(recipe), recipe.learner, SlotBroker(pool.leases))
    actors = [ray.remote(Rank).options(**on[node]).remote() for node in (here, there, there)]
    group.by_rank = [
        SimpleNamespace(actor=actor, slot=Slot(node, 0), leases=[])  # type: ignore[misc]
        for actor, node in zip(actors, (here, there, there), strict=True)
    ]

    def traffic_of(*receivers: str) -> tuple[float, float]:
        version = group.weights.publish(1)
        loaded = [ray.remote(load).options(**on[node]).remote(*version.shards_for(node)) for node in receivers]
        assert ray.get(loaded, timeout=60) == [version.checksum] * len(receivers)
        traffic = WeightTraffic()
        traffic.loaded(1, receivers)
        found = traffic.metrics(version, {instance.slot.node for instance in group.by_rank})
        return found["weights/pulled_mb"], found["weights/least_mb"]

    group.weights.holds_all = True
    assert traffic_of(here, there) == (0.0, 0.0)
    del group.by_rank[1:]
    pulled, least = traffic_of(here, there)
    assert pulled == least > 4.1, "the node without a rank pulls each layer once"


def test_a_restored_rank_pulls_its_own_part_of_the_optimizer_state(nodes):
    """Before, a rank pulled the moments of all ranks, on whatever node it was."""

    class Rank(RankActor):
        def __init__(self, number: int) -> None:
            parts = {TensorSlice("exp_avg.w", (2**19,), number * 2**18, (number + 1) * 2**18): torch.full((2**18,), float(number))}
            files = {f"model-{number}.safetensors": save_tensors({f"w.{number}": torch.zeros(4)})}
            files[shard_name("optimizer", number, 2)] = save_slices(parts)
            files |= {} if number else {"learner.json": b'{"optimizer_steps": 1, "rng": "00"}'}
            self.number, self.rank = number, SimpleNamespace(trainer=SimpleNamespace(state_files=lambda: files))

        def restore(self, source: Any) -> tuple[list[str], float]:
            state = read_state(read_source(source), parts_in(source))
            own = state["moments"].read(TensorSlice("exp_avg.w", (2**19,), self.number * 2**18, (self.number + 1) * 2**18))
            return sorted(state["weights"]), float(own.mean())

    here, there = sorted(node_slots("cpu"), key=lambda node: node != ray.get_runtime_context().get_node_id())
    on = {node: {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in (here, there)}
    first = [ray.remote(Rank).options(**on[node]).remote(number) for number, node in enumerate((here, there))]
    recovery = Recovery(1)
    recovery.take([actor.keep.options(num_returns=3).remote() for actor in first], [here, there])
    recovery.settle(60.0)
    kept: Any = recovery.complete
    del first  # their own objects go with the references
    again = ray.remote(Rank).options(**on[there]).remote(1)
    assert ray.get(again.restore.remote(kept), timeout=60) == (["w.0", "w.1"], 1.0)
    (_, of_first), (_, of_second) = (one.references for one in kept)
    places, end_s = {}, time.monotonic() + 30
    while there not in places.get(of_second, {}).get("node_ids", ()) and time.monotonic() < end_s:  # Ray's records lag behind
        places = get_local_object_locations([of_first, of_second])
    assert {*places[of_second]["node_ids"]} == {here, there} and {*places[of_first]["node_ids"]} == {here}


def test_a_rank_of_zero_3_pulls_its_own_part_of_the_model(nodes):
    """Before, every node pulled all weights where its ranks do not see the driver's folders."""

    class Rank:
        def own(self, folder: DividedFiles) -> tuple[bytes, float]:
            with replace(folder, rank=1).folder() as path:
                tensors = load_tensors((path / "model.safetensors").read_bytes())
                return (path / "config.json").read_bytes(), float(tensors["w"].sum())

    here, there = sorted(node_slots("cpu"), key=lambda node: node != ray.get_runtime_context().get_node_id())
    weights = save_tensors({"w": torch.cat([torch.full((2**18,), 2.0), torch.ones(2**18)])})
    folder: Any = divide_folder({"config.json": b"{}", "model.safetensors": weights}, 2)
    (parts,) = folder.fetch.args
    rank = ray.remote(Rank).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote()
    assert ray.get(rank.own.remote(ray.put(folder)), timeout=60) == (b"{}", 2.0**18)
    places, end_s = {}, time.monotonic() + 30
    while there not in places.get(parts[1], {}).get("node_ids", ()) and time.monotonic() < end_s:
        places = get_local_object_locations(parts)
    assert [{*places[part]["node_ids"]} for part in parts] == [{here}, {here, there}]


def worker_class() -> type:
    """A function without content. Local, so that Ray ships it by value."""

    class Worker:
        def open(self, threads: int) -> dict[str, Any]:
            return {"memory_mb": 1.0, "spans": []}

        def ping(self) -> str:
            return "here"

    return Worker


def test_what_was_on_a_lost_node_is_replaced_elsewhere_or_dropped(nodes):
    passing = nodes.add_node(num_cpus=2, object_store_memory=128 * 2**20)
    nodes.wait_for_nodes(timeout=120)
    leases = leases_of()
    pool = WorkerPool("work", lambda slot: start_actor(worker_class(), slot, "cpu", {}), leases, 1e9)
    try:
        for lease in leases.collect(leases.ask(2, [passing.node_id] * 2), "work", 60.0, need=2):
            pool.assign_leases([lease])
        assert ray.get([i.actor.ping.remote() for i in pool.working], timeout=60) == ["here", "here"]
        leases.release(pool.park(pool.working[0]))
        nodes.remove_node(passing)
        deadline = time.monotonic() + 60
        while passing.node_id in node_slots("cpu") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert passing.node_id not in node_slots("cpu")
        assert pool.end_expired() == 1 and not pool.parked
        new = pool.replace(pool.working[0])
        assert new.slot.node in node_slots("cpu") and pool.working == [new] and len(leases.held) == 1
        assert ray.get(new.actor.ping.remote(), timeout=60) == "here"
    finally:
        pool.close()
        leases.release_all()


def test_engines_of_cheap_nodes_work_there_only_at_their_price(nodes):
    """Leases that others leave behind elsewhere are not for them, and what they cost is the node's price."""
    spot = nodes.add_node(num_cpus=1, object_store_memory=128 * 2**20, labels={"market": "spot"})
    nodes.wait_for_nodes(timeout=120)
    labels = {"market": "spot"}
    lists = ClusterNodes("cpu")
    assert lists.slots(labels) == {spot.node_id: 1} and spot.node_id in lists.slots({})
    tree = {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "rollout": {"nodes": labels},
        "price": {"cpu_slot_per_hour": 10.0, "rollout_slot_per_hour": 2.0},
    }
    recipe = Recipe.parse(tree)
    ledger = Ledger("cpu", prices(recipe, NodePools(lists, engine_pools(recipe.rollout, recipe.price, "cpu"))))
    leases = LeaseManager("cpu", ledger, 60.0, f"nodes{time.time_ns()}", nodes=lists)
    start = lambda slot: start_actor(worker_class(), slot, "cpu", {})  # noqa: E731
    pool = WorkerPool("rollout", start, leases, 1e9, labels=lambda: labels)
    other = next(node for node in node_slots("cpu") if node != spot.node_id)
    try:
        [elsewhere] = leases.collect(leases.ask(1, [other]), "learn", 60.0, need=1)
        assert pool.resize(2, [elsewhere], wait_s=0.1) == [elsewhere]
        assert [instance.slot.node for instance in pool.working] == [spot.node_id]
        time.sleep(0.2)
        leases.release_all()
        rate = {row.kind: 3600 * row.money / row.seconds for row in leases.ledger.rows}
        assert rate == {"learn": pytest.approx(10.0, rel=1e-3), "rollout": pytest.approx(2.0, rel=1e-3)}
    finally:
        pool.close()
        leases.release_all()
        nodes.remove_node(spot)
