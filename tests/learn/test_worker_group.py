"""Which leases the learner's ranks take: those of the nodes and devices that hold their state, and no others."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import Instance, State
from rlhfless_ray.functions.lease import Lease, LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.pool_messages import SlotRequest
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.rank_settings import RankLayout, learner_settings
from rlhfless_ray.learn.recovery import LearnerLost, Recovery
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.worker_pools import PoolMaker
from rlhfless_ray.types import WeightVersion
from rlhfless_ray.weights.model_folder import INDEX, read_files, split_files, stored_weights
from rlhfless_ray.weights.remote_folder import Delivery, FilesInStore, StoredFiles
from rlhfless_ray.weights.tensor_file import save_tensors, write_file


class Nodes(ClusterNodes):
    """The nodes of a cluster that has these."""

    def __init__(self, resource: str, names: Iterable[str]) -> None:
        super().__init__(resource)
        self.names, self.notices = names, set

    def slots(self, labels: dict[str, str]) -> dict[str, int]:
        return dict.fromkeys(self.names, 4)

    def find_lost(self, nodes: list[str]) -> list[str]:
        return [node for node in nodes if node not in self.names]

    def confirm_lost(self, node: str) -> bool:
        return node not in self.names


class Cluster(LeaseManager):
    """Leases of a cluster that grants at once what it has: {node: free devices}."""

    def __init__(self, resource: str, free: dict[str, list[int]], deadline_s: float = 5.0) -> None:
        super().__init__(resource, Ledger(resource, 1.0), deadline_s, "test")
        self.free = free
        self.log: list[str] = []
        self.nodes = Nodes(resource, free)

    def lease(self, node: str, device: int) -> Lease:
        self.counter += 1
        lease = Lease(f"test-{self.counter}", Slot(node, device))
        self.held[lease.id] = lease
        return lease

    def ask(self, count: int, nodes: list[str] | None = None, labels: dict[str, str] | None = None) -> list[Any]:
        return [nodes[i] if nodes and i < len(nodes) else None for i in range(count)]

    def ask_again(self, slots: list[Slot]) -> list[Any]:
        return list(slots)

    def collect(self, requests: list[Any], kind: str, wait_s: float, need: int = 0, have: Any = None) -> list[Lease]:
        got = []
        for request in requests:
            node, device = (request.node, request.device) if isinstance(request, Slot) else (request, None)
            found = next((n for n in self.free if self.free[n] and node in (None, n) and (device is None or device in self.free[n])), None)
            self.log.append(f"{node or 'any'} → {found}")
            if found is not None:
                free = self.free[found]
                got.append(self.lease(found, free.pop(0 if device is None else free.index(device))))
        return got

    def without_lost(self, leases: list[Lease]) -> list[Lease]:
        return leases

    def with_room(self, nodes: list[str]) -> list[str]:
        return nodes

    def release(self, leases: list[Lease]) -> None:
        for lease in leases:
            del self.held[lease.id]
            self.free[lease.slot.node].append(lease.slot.device)

    def availability(self) -> str:
        return f"free: {self.free}"


def gang_on(cluster: Cluster, *slots: Slot, threads: int = 1, exact: bool = False) -> WorkerGroup:
    """A gang whose ranks are parked on these slots, with their state."""
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "learner": {"ranks": len(slots), "max_slots_per_rank": threads}}
    pool = WorkerPool("learn", lambda slot: pytest.fail("a rank is started anew"), cluster, 1e9, on_device=True)
    recipe = Recipe.parse(tree)
    worker_group = WorkerGroup(pool, learner_settings(recipe), recipe.learner, SlotBroker(cluster), exact=exact)
    worker_group.wait_for = lambda refs, what, deadline_s=None: [ref() for ref in refs]  # type: ignore[method-assign]
    for slot in slots:
        actor = SimpleNamespace(unpark=SimpleNamespace(remote=lambda: lambda: cluster.log.append("unpark") or []))
        worker_group.by_rank.append(Instance("learn", slot, actor, state=State.PARKED, opened="done"))
    worker_group.pool.parked = list(worker_group.by_rank)
    return worker_group


def nodes_of(worker_group: WorkerGroup) -> list[list[str]]:
    return [[lease.slot.node for lease in instance.leases] for instance in worker_group.by_rank]


def test_the_rank_takes_the_spare_lease_of_its_own_node_wherever_it_stands_in_the_row():
    cluster = Cluster("cpu", {"here": [], "there": []})
    spare = [cluster.lease("there", 0), cluster.lease("here", 1)]
    worker_group = gang_on(cluster, Slot("here", 0))
    assert worker_group.assign_leases(spare) == spare[:1]
    assert worker_group.by_rank[0].leases == spare[1:] and cluster.log == []


def test_what_the_run_holds_without_using_it_is_taken_before_anything_is_asked_for():
    """As when a learner is lost between two steps: a cluster that is all the run's own would wait for itself."""
    cluster = Cluster("cpu", {"here": [], "there": []})
    spare = [cluster.lease("here", 0), cluster.lease("there", 0), cluster.lease("here", 1)]
    worker_group = gang_on(cluster, Slot("here", 0), Slot("here", 1))
    worker_group.broker.put(spare[:1])
    worker_group.broker.lend_idle(lambda: [spare.pop() for _ in range(2)])
    [left] = worker_group.assign_leases([])
    assert nodes_of(worker_group) == [["here"], ["here"]] and left.slot.node == "there" and cluster.log == []
    assert len(spare) == 1 and not worker_group.broker.free and worker_group.broker.reclaim() == [], "idle engines are parked once"


def test_what_was_asked_for_ahead_is_not_waited_for():
    """As when it is lost after it has published: engines' next leases were asked for meanwhile, and granted the last slot."""
    cluster = Cluster("cpu", {"here": []})
    cluster.pending = {"ahead": SlotRequest("ahead")}

    def withdraw(requests: list[SlotRequest]) -> None:
        for request in requests:
            del cluster.pending[request.id]
            cluster.free["here"].append(0)

    cluster.withdraw = withdraw  # type: ignore[method-assign]
    worker_group = gang_on(cluster, Slot("here", 0))
    assert (
        worker_group.assign_leases([]) == []
        and nodes_of(worker_group) == [["here"]]
        and cluster.log == ["here → here"]
        and not cluster.pending
    )


def test_without_one_it_lets_the_others_go_and_asks_at_its_own_node():
    cluster = Cluster("cpu", {"here": [0], "there": []})
    worker_group = gang_on(cluster, Slot("here", 0))
    assert worker_group.assign_leases([cluster.lease("there", 0)]) == []
    assert nodes_of(worker_group) == [["here"]] and cluster.log == ["here → here"] and cluster.free["there"] == [0]


def test_processes_ended_for_their_memory_are_started_anew_and_loaded_and_that_is_no_fault(monkeypatch):
    monkeypatch.setattr("rlhfless_ray.functions.worker_pool.ray.kill", lambda actor, no_restart: None)
    cluster = Cluster("cpu", {"here": []})
    worker_group = gang_on(cluster, Slot("here", 0))
    built: list[Any] = []

    def call(answer: Any) -> Any:
        return SimpleNamespace(remote=lambda *given: lambda: built.append(given) or answer)

    opened, loaded = {"memory_mb": 500.0, "spans": []}, {"memory_mb": 700.0, "spans": [], "cutter": Cutter()}
    worker_group.pool.start = lambda slot: SimpleNamespace(open=call(opened), sees=call(True), rendezvous=call(("", 0)), build=call(loaded))
    worker_group.files = StoredFiles(Path("/"), {})
    worker_group.pool.end(worker_group.by_rank[0])
    lease = cluster.lease("here", 1)
    assert not worker_group.fits([lease]), "a start would hold up the rollout"
    assert worker_group.assign_leases([lease]) == [] and nodes_of(worker_group) == [["here"]]
    assert worker_group.by_rank[0].state is State.READY and worker_group.by_rank[0].memory_mb == 700.0
    assert built == [(1,), (False,), ("/", {}), (("/", {}, ""), ("", 0), 1, None, worker_group.settings)]
    assert worker_group.recovery.restarts == 0


def test_ranks_on_two_nodes_get_one_lease_each_and_threads_never_mix_nodes():
    cluster = Cluster("cpu", {"a": [7], "b": []})
    worker_group = gang_on(cluster, Slot("a", 0), Slot("b", 0), threads=2)
    spare = [cluster.lease("b", 0), cluster.lease("b", 1), cluster.lease("b", 2), cluster.lease("a", 0), cluster.lease("c", 0)]
    left = worker_group.assign_leases(spare)
    assert sorted(nodes_of(worker_group)) == [["a", "a"], ["b", "b"]]
    assert [lease.slot for lease in left] == [Slot("b", 2), Slot("c", 0)]
    assert cluster.log == ["a → a"]


def test_on_gpu_it_takes_no_device_but_its_own():
    """It held every free device of the node before, for which other runs waited."""
    cluster = Cluster("gpu", {"here": [0, 1, 3]})
    worker_group = gang_on(cluster, Slot("here", 1), Slot("here", 2))
    left = worker_group.assign_leases([cluster.lease("here", 4), cluster.lease("here", 2)])
    assert [[lease.slot.device for lease in instance.leases] for instance in worker_group.by_rank] == [[1], [2]] and not left
    assert cluster.free == {"here": [0, 3, 4]}, "what it cannot use goes back before it waits"


def test_a_device_that_never_comes_is_named_after_the_deadline_and_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("rlhfless_ray.functions.lease.random.uniform", lambda a, b: 0.05)
    cluster = Cluster("gpu", {"here": [0, 1]}, deadline_s=0.2)
    worker_group = gang_on(cluster, Slot("here", 2))
    start = time.monotonic()
    with pytest.raises(RunError, match=r"needs 1 × .* on the nodes and devices that hold its state and did not get them within"):
        worker_group.assign_leases([])
    assert time.monotonic() - start < 60 and not cluster.held and sorted(cluster.free["here"]) == [0, 1]


def test_a_users_mistake_that_a_rank_finds_stays_one(monkeypatch):
    def get(refs, deadline_s, what):
        raise RayTaskError("build", "a traceback", UserError("lora.target_modules: the model has no such layers")).as_instanceof_cause()

    monkeypatch.setattr("rlhfless_ray.learn.rank_replies.get", get)
    worker_group = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    with pytest.raises(UserError) as caught:
        WorkerGroup.wait_for(worker_group, [], "loading the policy", 1.0)
    assert str(caught.value) == "lora.target_modules: the model has no such layers"


def test_a_port_that_is_taken_before_the_ranks_meet_there_makes_them_start_anew(monkeypatch):
    """Between its choice and its use anybody may take it. Ranks that wait there cannot be asked again: new ones are."""

    def get(refs, deadline_s, what):
        error = OSError(errno.EADDRINUSE, "Address already in use")  # as `process_group.listening_socket` raises it
        raise RayTaskError("build", "a traceback", error).as_instanceof_cause()

    monkeypatch.setattr("rlhfless_ray.learn.rank_replies.get", get)
    worker_group = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    with pytest.raises(
        LearnerLost, match=r"^loading the policy failed: another program has taken the rendezvous port of its processes$"
    ) as lost:
        WorkerGroup.wait_for(worker_group, [], "loading the policy", 1.0)
    assert lost.value.cause is FailureCause.DIED


def test_an_update_is_asked_at_once_and_again_when_a_rank_was_lost(monkeypatch):
    """Whoever has the handle only sees that it takes longer. What the lost ranks worked under is free until new ones take it."""
    cluster = Cluster("cpu", {"here": []})
    worker_group = gang_on(cluster, Slot("here", 0))
    lease = cluster.lease("here", 0)
    worker_group.assign_leases([lease])
    asked: list[str] = []
    monkeypatch.setattr(worker_group, "ask", lambda what, batch: asked.append(what) or [lambda: cluster.log.append("reply")])
    monkeypatch.setattr(worker_group.pool, "end", lambda instance: worker_group.pool.working.clear())
    monkeypatch.setattr(worker_group.pool, "cause", lambda *instances: FailureCause.NODE_LOST)
    free: list[Any] = []

    def assign(spare: list[Lease]) -> list[Lease]:
        free.append(spare)
        worker_group.by_rank = [Instance("learn", Slot("here", 0), None)]
        return []

    monkeypatch.setattr(worker_group, "assign_leases", assign)
    stats = SimpleNamespace(applied=1, skipped_last=0)
    replies: list[Any] = [LearnerLost("gone"), LearnerLost("gone again"), [(stats, [])]]

    def all_of(refs: list[Any], what: str) -> list[Any]:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(worker_group, "wait_for", all_of)
    update = worker_group.start_update(None)  # type: ignore[arg-type]
    assert asked == ["update"] and len(replies) == 3, "nobody waits yet"
    monkeypatch.setattr(worker_group, "pending", lambda refs: refs)
    assert not update.is_ready() and not update.has_failed()
    monkeypatch.setattr(worker_group, "pending", lambda refs: [])
    monkeypatch.setattr("rlhfless_ray.learn.rank_calls.has_raised", lambda ref: True)
    assert update.is_ready() and update.has_failed()
    assert asked == ["update"] and not free and worker_group.recovery.restarts == 0, "a query replaces no rank"
    assert update.result() is update.result() is stats
    assert asked == ["update"] * 3 and free == [[lease], []] and worker_group.recovery.restarts == 2
    assert len(worker_group.recovery.since) == 1, "recorded once"


def test_free_leases_of_a_lost_node_are_not_given_to_new_ranks(monkeypatch):
    cluster = Cluster("cpu", {"here": []})
    worker_group = gang_on(cluster, Slot("here", 0))
    monkeypatch.setattr(cluster, "without_lost", lambda leases: [lease for lease in leases if lease.slot.node in cluster.free])
    worker_group.broker.put([cluster.lease("lost", 0), cluster.lease("here", 0), cluster.lease("here", 1)])
    worker_group.assign_free_leases()
    assert nodes_of(worker_group) == [["here"]] and [lease.slot for lease in worker_group.broker.free] == [Slot("here", 1)]


def test_a_kept_state_that_was_lost_is_asked_of_the_ranks(monkeypatch, tmp_path):
    """They have it still."""
    worker_group = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    worker_group.recovery.complete = [FilesInStore("kept")]

    def get(ref, deadline_s, what):
        assert ref == ["kept"]
        raise ObjectLostError("00", "", "")

    monkeypatch.setattr("rlhfless_ray.learn.group_files.get", get)
    delivery = Delivery(files={"model.safetensors": b"w"})
    worker_group.by_rank[0].actor.save = SimpleNamespace(remote=lambda *_: lambda: delivery)
    assert worker_group.recovery.has_now and worker_group.storage.ask_save(tmp_path) == []
    assert worker_group.storage.save(tmp_path, 1.0).keys() == {"model.safetensors"}
    assert (tmp_path / "model.safetensors").read_bytes() == b"w"


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_whose_weights_differ_end_the_run_with_the_setting_that_keeps_them_equal(stage: int) -> None:
    worker_group = gang_on(Cluster("cpu", {"here": [0], "there": [0]}), Slot("here", 0), Slot("there", 0))
    worker_group.set_layout(RankLayout(2, stage))
    worker_group.weights.holds_all = True
    for rank, instance in enumerate(worker_group.by_rank):
        reply = [None, lambda rank=rank: ({"embed": 7, "norm": rank}, [])]
        instance.actor.weights = SimpleNamespace(options=lambda num_returns, reply=reply: SimpleNamespace(remote=lambda *share: reply))
    cure = (
        "norm. To go on, continue"
        if stage
        else "norm. At learner.zero_stage 0 .* round differently. To go on, set learner.zero_stage=1 and"
    )
    with pytest.raises(RunError, match=f"hold different weights: {cure} .*--resume"):
        worker_group.weights.publish(1)


def test_the_driver_writes_the_index_of_what_several_ranks_wrote(tmp_path: Path) -> None:
    worker_group = gang_on(Cluster("cpu", {"here": [0, 1]}), Slot("here", 0), Slot("here", 1))
    for rank, instance in enumerate(worker_group.by_rank):
        delivery = Delivery(files=split_files({f"layer.{rank}": torch.zeros(4)}, rank=rank, ranks=2))
        instance.actor.save_model = SimpleNamespace(remote=lambda *_, delivery=delivery: lambda: (delivery, []))
    sums = worker_group.storage.save_model(tmp_path)
    assert sorted(sums) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    assert dict(stored_weights(read_files(tmp_path))).keys() == {"layer.0", "layer.1"}


def test_the_files_of_the_model_stay_with_their_ranks() -> None:
    worker_group = gang_on(Cluster("cpu", {"here": [0, 1]}), Slot("here", 0), Slot("here", 1))
    for rank, instance in enumerate(worker_group.by_rank):
        call = SimpleNamespace(remote=lambda rank=rank: (f"files of {rank}", lambda: []))
        instance.actor.model = SimpleNamespace(options=lambda num_returns, call=call: call)
    assert worker_group.storage.model() == ["files of 0", "files of 1"]


def test_parked_ranks_that_are_lost_while_they_write_the_model_are_parked_again(monkeypatch, tmp_path):
    """The rollout of the next step may need every slot."""
    cluster = Cluster("cpu", {"here": [0]})
    worker_group = gang_on(cluster, Slot("here", 0))
    replies: list[Any] = [LearnerLost("gone"), (Delivery(files={"model.safetensors": b"w"}), [])]

    def save_model(folder: str, trained: bool) -> Any:
        if isinstance(reply := replies.pop(0), Exception):
            raise reply
        return reply

    def handle_loss(lost: LearnerLost) -> None:
        worker_group.recovery.restarts += 1

    actor = worker_group.by_rank[0].actor
    actor.save_model = SimpleNamespace(remote=lambda *arguments: partial(save_model, *arguments))
    actor.park = SimpleNamespace(remote=lambda: "parked")
    monkeypatch.setattr(worker_group, "handle_loss", handle_loss)
    assert worker_group.storage.save_model(tmp_path, trained=True).keys() == {"model.safetensors"}
    assert worker_group.recovery.restarts == 1
    assert not worker_group.working and [lease.slot for lease in worker_group.broker.free] == [Slot("here", 0)]


LOST = RayTaskError("keep", "a traceback", ObjectLostError("00", "", ""))
RAISED = RayTaskError("keep", "a traceback", ValueError("the object store is full"))


@pytest.mark.parametrize(("error", "said"), [(RAISED, ["a snapshot of the learner's state failed: the object store is full"]), (LOST, [])])
def test_a_snapshot_that_fails_is_reported_unless_a_rank_was_lost(monkeypatch, error, said):
    """Otherwise the batches since the last one would be kept forever, and nobody would know why."""

    def get(refs):
        raise error

    monkeypatch.setattr("rlhfless_ray.learn.recovery.ray", SimpleNamespace(wait=lambda refs, **_: (refs, []), get=get))
    told: list[str] = []
    recovery = Recovery(1, told.append)
    recovery.complete, recovery.since, recovery.pending = ["before"], [None], (1, ["cost"], ["files"])  # type: ignore[list-item]
    recovery.settle()
    assert recovery.complete == ["before"] and recovery.updates == 1 and told == said


def test_a_run_without_snapshots_keeps_no_batches_and_ends_with_its_learner():
    worker_group = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}
    tree["checkpoint"] = {"memory_every_steps": 0, "resumable": False, "path": "somewhere"}
    maker = PoolMaker(Recipe.parse(tree), SlotBroker(worker_group.pool.leases), {}, pytest.fail)
    recovery = worker_group.recovery = maker.worker_group("learn", object, learner_settings).recovery
    assert not recovery.is_final, "at first the model's folder is the state"
    for _ in range(2):
        recovery.record(None)  # type: ignore[arg-type]
    assert recovery.since == [] and not recovery.has_now
    with pytest.raises(RunError, match=r"^it died; there is no copy of the learner's state: set checkpoint\.memory_every_steps"):
        worker_group.handle_loss(LearnerLost("it died", FailureCause.DIED))


@pytest.mark.parametrize(("error", "published"), [(RAISED, 0), (LOST, 2)])
def test_weights_that_cannot_be_copied_are_not_published_again_for_ever(monkeypatch, error, published):
    def get(ref, deadline_s, what):
        raise error

    monkeypatch.setattr("rlhfless_ray.learn.group_weights.get", get)
    worker_group = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    worker_group.pool.faults.limit = worker_group.pool.faults.remaining = 2
    weights, versions = WeightVersion(7, ("weights",), 1, ("a",), ("copy",)), list[int]()
    monkeypatch.setattr(worker_group.weights, "publish", lambda version: versions.append(version) or weights)
    with pytest.raises(RunError, match="could not be copied.* full" if error is RAISED else "max_replacements = 2 is used up"):
        worker_group.weights.wait_for_copy(weights)
    assert versions == [7] * published


@pytest.mark.parametrize(("loopback", "sees"), [(True, True), (False, True), (False, False)])
def test_the_driver_reads_a_shared_base_only_for_other_machines(monkeypatch, tmp_path, loopback, sees):
    """And once for engines and ranks together."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    worker_group = gang_on(Cluster("cpu", {"here": []}), Slot("here", 0))
    worker_group.weights.shares_base = True
    put: list[Any] = []
    monkeypatch.setattr("rlhfless_ray.learn.group_files.ray.put", lambda one: put.append(one) or "ref")
    loaded = {"memory_mb": 700.0, "spans": [], "cutter": Cutter()}
    answers = {"sees": sees, "rendezvous": ("", 0), "build": loaded}
    calls = {name: SimpleNamespace(remote=lambda *given, answer=answer: lambda: answer) for name, answer in answers.items()}
    worker_group.by_rank[0].actor = SimpleNamespace(**calls)
    files = StoredFiles(tmp_path, read_files(tmp_path))
    worker_group.build(files, loopback, None)
    assert put == [(str(tmp_path), {"model.safetensors": 7}, "") if loopback else files.files] and worker_group.weights.base == "ref"


@pytest.mark.parametrize("sees", [True, False])
def test_ranks_of_zero_3_get_a_part_of_a_folder_that_they_do_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sees: bool) -> None:
    whole = save_tensors({"w": torch.arange(6.0)})
    write_file(tmp_path / "model.safetensors", whole)
    worker_group = gang_on(Cluster("cpu", {"a": [], "b": []}), Slot("a", 0), Slot("b", 0))
    worker_group.set_layout(RankLayout(2, 3))
    put, built = [], []
    monkeypatch.setattr("rlhfless_ray.learn.group_files.ray.put", lambda one: put.append(one) or len(put) - 1)
    for instance in worker_group.by_rank:
        answers = {"sees": sees, "rendezvous": ("", 0), "build": {"memory_mb": 700.0, "spans": [], "cutter": Cutter()}}
        calls = {
            name: SimpleNamespace(remote=lambda *given, answer=answer: lambda: built.append(given) or answer)
            for name, answer in answers.items()
        }
        instance.actor = SimpleNamespace(**calls)
    worker_group.build(StoredFiles(tmp_path, read_files(tmp_path)), False, None)
    folder = built[-1][0]
    if sees:
        assert folder == (str(tmp_path), {"model.safetensors": len(whole)}, "") and not put
    else:
        divided = put[folder]
        parts = [next(iter(put[ref]["model.safetensors"].values())).tolist() for ref in divided.fetch.args[0]]
        assert parts == [[0, 1, 2], [3, 4, 5]] and divided.others == {}


def test_a_process_that_is_lost_in_the_warm_start_ends_the_run_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool ends it if the driver was silent for too long. Before, Ray's error of many lines was printed with a traceback."""

    def lose(*about: Any) -> Any:
        raise ActorDiedError

    monkeypatch.setattr("rlhfless_ray.learn.worker_group.get", lose)
    group = object.__new__(WorkerGroup)
    actor = SimpleNamespace(warm_start=SimpleNamespace(remote=lambda *settings: None))
    group.deadline_s, group.threads = 1.0, None
    monkeypatch.setattr(WorkerGroup, "by_rank", [SimpleNamespace(actor=actor, leases=[])], raising=False)
    with pytest.raises(RunError, match=r"the process of the supervised warm start was lost .*; start the run again"):
        group.warm_start({}, Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}))


@pytest.mark.parametrize(("exact", "told"), [(False, [[1, 1], [3, 3], [2, 1]]), (True, [[3, 3], [3, 3], [3, 3]])])
def test_ranks_run_as_many_threads_as_they_lease_or_with_exact_always_as_many(exact: bool, told: list[list[int]]) -> None:
    """The leases change between calls, as the planner or other runs change them."""
    cluster = Cluster("cpu", {"here": []})
    worker_group, found = gang_on(cluster, Slot("here", 0), Slot("here", 1), threads=3, exact=exact), []
    for instance in worker_group.by_rank:
        for method in ("update", "logprobs"):
            setattr(instance.actor, method, SimpleNamespace(remote=lambda share, threads, *more: found.append(threads)))
    batch = Batch.of([((1,), np.array([2]), np.zeros(1, np.float32), 0.0, 0)])
    algorithm = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}).algorithm
    worker_group.cutter = Cutter(ranks=2, max_tokens=64, algorithm=algorithm)
    for method, held in (("update", (1, 1)), ("logprobs", (3, 3)), ("update", (2, 1))):
        for instance, count in zip(worker_group.by_rank, held, strict=True):
            instance.leases = [cluster.lease("here", device) for device in range(count)]
        worker_group.ask(method, batch)
    assert [found[0:2], found[2:4], found[4:6]] == told
