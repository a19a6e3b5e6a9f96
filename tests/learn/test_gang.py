"""Which leases the learner's ranks take: those of the nodes and devices that hold their state, and no others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from rlhfless_ray.errors import RunError, UserError
from rlhfless_ray.functions.faults import Cause
from rlhfless_ray.functions.instance import Instance, State
from rlhfless_ray.functions.lease import Lease, Leases, Request, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.learn.gang import Gang
from rlhfless_ray.learn.recovery import LearnerLost
from rlhfless_ray.recipe import Recipe


class Cluster(Leases):
    """Leases of a cluster that grants at once what it has: {node: free devices}."""

    def __init__(self, resource: str, free: dict[str, list[int]], deadline_s: float = 5.0) -> None:
        super().__init__(resource, Ledger(resource, 1.0), deadline_s, "test")
        self.free = free
        self.log: list[str] = []
        self.notices = set

    def lease(self, node: str, device: int) -> Lease:
        self.counter += 1
        lease = Lease(f"test-{self.counter}", Slot(node, device), None)
        self.held[lease.id] = lease
        return lease

    def ask(self, count: int, nodes: list[str] | None = None) -> list[Any]:
        return [nodes[i] if nodes and i < len(nodes) else None for i in range(count)]

    def collect(self, requests: list[Any], kind: str, wait_s: float, need: int = 0, have: Any = None) -> list[Lease]:
        got = []
        for node in requests:
            found = next((n for n in self.free if self.free[n] and node in (None, n)), None)
            self.log.append(f"{node or 'any'} → {found}")
            if found is not None:
                got.append(self.lease(found, self.free[found].pop(0)))
        return got

    def gone(self, nodes: list[str]) -> list[str]:
        return [node for node in nodes if node not in self.free]

    def living(self, leases: list[Lease]) -> list[Lease]:
        return leases

    def lose(self, node: str) -> bool:
        return node not in self.free

    def with_room(self, nodes: list[str]) -> list[str]:
        return nodes

    def release(self, leases: list[Lease]) -> None:
        for lease in leases:
            del self.held[lease.id]
            self.free[lease.slot.node].append(lease.slot.device)

    def availability(self) -> str:
        return f"free: {self.free}"


def gang_on(cluster: Cluster, *slots: Slot, threads: int = 1) -> Gang:
    """A gang whose ranks are parked on these slots, with their state."""
    tree = {
        "prompts": {"task": "chain"}, "reward": {"function": "task"},
        "learner": {"ranks": len(slots), "max_slots_per_rank": threads},
    }
    pool = Pool("learn", lambda slot: pytest.fail("a rank is started anew"), cluster, cluster.ledger, 1e9)
    gang = Gang(pool, len(slots), Recipe.parse(tree).learner)
    gang._all = lambda refs, what, deadline_s=None: [ref() for ref in refs]  # type: ignore[method-assign]
    for slot in slots:
        actor = SimpleNamespace(unpark=SimpleNamespace(remote=lambda: lambda: cluster.log.append("unpark") or []))
        gang.by_rank.append(Instance("learn", slot, actor, state=State.PARKED, opened="done"))
    gang.pool.parked = list(gang.by_rank)
    return gang


def nodes_of(gang: Gang) -> list[list[str]]:
    return [[lease.slot.node for lease in instance.leases] for instance in gang.by_rank]


def test_the_rank_takes_the_spare_lease_of_its_own_node_wherever_it_stands_in_the_row():
    cluster = Cluster("cpu", {"here": [], "there": []})
    spare = [cluster.lease("there", 0), cluster.lease("here", 1)]
    gang = gang_on(cluster, Slot("here", 0))
    assert gang.staff(spare) == spare[:1]
    assert gang.by_rank[0].leases == spare[1:] and cluster.log == []


def test_what_the_run_holds_without_using_it_is_taken_before_anything_is_asked_for():
    """As when a learner is lost between two steps: a cluster that is all the run's own would wait for itself."""
    cluster = Cluster("cpu", {"here": [], "there": []})
    spare = [cluster.lease("here", 0), cluster.lease("there", 0), cluster.lease("here", 1)]
    gang = gang_on(cluster, Slot("here", 0), Slot("here", 1))
    gang.leases.lend = lambda: [spare.pop() for _ in range(len(spare))]
    [left] = gang.staff([])
    assert nodes_of(gang) == [["here"], ["here"]] and left.slot.node == "there" and cluster.log == [] and not spare


def test_what_was_asked_for_ahead_is_not_waited_for():
    """As when it is lost after it has published: engines' next leases were asked for meanwhile, and granted the last slot."""
    cluster = Cluster("cpu", {"here": []})
    cluster.asked = {"ahead": Request("ahead", None, 0.0)}

    def withdraw(requests: list[Request]) -> None:
        for request in requests:
            del cluster.asked[request.id]
            cluster.free["here"].append(0)

    cluster.withdraw = withdraw  # type: ignore[method-assign]
    gang = gang_on(cluster, Slot("here", 0))
    assert gang.staff([]) == [] and nodes_of(gang) == [["here"]] and cluster.log == ["here → here"] and not cluster.asked


def test_without_one_it_lets_the_others_go_and_asks_at_its_own_node():
    cluster = Cluster("cpu", {"here": [0], "there": []})
    gang = gang_on(cluster, Slot("here", 0))
    assert gang.staff([cluster.lease("there", 0)]) == []
    assert nodes_of(gang) == [["here"]] and cluster.log == ["here → here"] and cluster.free["there"] == [0]


def test_processes_ended_for_their_memory_are_started_anew_and_loaded_and_that_is_no_fault(monkeypatch):
    monkeypatch.setattr("rlhfless_ray.functions.pool.ray.kill", lambda actor, no_restart: None)
    cluster = Cluster("cpu", {"here": []})
    gang = gang_on(cluster, Slot("here", 0))
    built: list[Any] = []

    def call(answer: Any) -> Any:
        return SimpleNamespace(remote=lambda *given: lambda: built.append(given) or answer)

    opened, loaded = {"memory_mb": 500.0, "spans": []}, {"memory_mb": 700.0, "spans": []}
    gang.pool.start = lambda slot: SimpleNamespace(open=call(opened), rendezvous=call(("", 0)), build=call(loaded))
    gang.files = lambda: "files"
    gang.pool.end(gang.by_rank[0])
    lease = cluster.lease("here", 1)
    assert not gang.fits([lease]), "a start would hold up the rollout"
    assert gang.staff([lease]) == [] and nodes_of(gang) == [["here"]]
    assert gang.by_rank[0].state is State.READY and gang.by_rank[0].memory_mb == 700.0
    assert built == [(1,), (False,), ("files", ("", 0), 1, None)] and gang.recovery.restarts == 0


def test_ranks_on_two_nodes_get_one_lease_each_and_threads_never_mix_nodes():
    cluster = Cluster("cpu", {"a": [7], "b": []})
    gang = gang_on(cluster, Slot("a", 0), Slot("b", 0), threads=2)
    spare = [cluster.lease("b", 0), cluster.lease("b", 1), cluster.lease("b", 2), cluster.lease("a", 0), cluster.lease("c", 0)]
    left = gang.staff(spare)
    assert sorted(nodes_of(gang)) == [["a", "a"], ["b", "b"]]
    assert [lease.slot for lease in left] == [Slot("b", 2), Slot("c", 0)]
    assert cluster.log == ["a → a"]


def test_on_gpu_it_holds_the_wrong_devices_until_the_right_one_comes():
    cluster = Cluster("gpu", {"here": [0, 1, 2, 3]})
    gang = gang_on(cluster, Slot("here", 2), threads=2)  # threads are a matter of cores
    left = gang.staff([])
    assert [lease.slot.device for lease in gang.by_rank[0].leases] == [2]
    assert [lease.slot.device for lease in left] == [0, 1]
    assert cluster.log == ["here → here"] * 3 + ["unpark"]


def test_a_device_that_never_comes_is_named_after_the_deadline_and_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("rlhfless_ray.learn.gang_leases.random.uniform", lambda a, b: 0.05)
    cluster = Cluster("gpu", {"here": [0, 1]}, deadline_s=0.2)
    gang = gang_on(cluster, Slot("here", 2))
    start = time.monotonic()
    with pytest.raises(RunError, match=r"needs 1 × .* on the nodes and devices that hold its state and did not get them within"):
        gang.staff([])
    assert time.monotonic() - start < 60 and not cluster.held and sorted(cluster.free["here"]) == [0, 1]


def test_a_users_mistake_that_a_rank_finds_stays_one(monkeypatch):
    def get(refs, deadline_s, what):
        raise RayTaskError("build", "a traceback", UserError("lora.target_modules: the model has no such layers")).as_instanceof_cause()

    monkeypatch.setattr("rlhfless_ray.learn.gang.get", get)
    gang = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    with pytest.raises(UserError) as caught:
        Gang._all(gang, [], "loading the policy", 1.0)
    assert str(caught.value) == "lora.target_modules: the model has no such layers"


def test_a_port_that_is_taken_before_the_ranks_meet_there_makes_them_start_anew(monkeypatch):
    """Between its choice and its use anybody may take it. Ranks that wait there cannot be asked again: new ones are."""

    def get(refs, deadline_s, what):
        error = RuntimeError("The server socket has failed to listen on any local network address. port: 4711, EADDRINUSE")
        raise RayTaskError("build", "a traceback", error).as_instanceof_cause()

    monkeypatch.setattr("rlhfless_ray.learn.gang.get", get)
    gang = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    with pytest.raises(LearnerLost, match=r"^loading the policy failed: the port .* was taken meanwhile$") as lost:
        Gang._all(gang, [], "loading the policy", 1.0)
    assert lost.value.cause is Cause.DIED


def test_a_kept_state_that_was_lost_is_asked_of_the_ranks(monkeypatch):
    """They have it still."""
    gang = gang_on(Cluster("cpu", {"a": [0]}), Slot("a", 0))
    gang.recovery.whole = "kept"

    def get(ref, deadline_s, what):
        assert ref == "kept"
        raise ObjectLostError("00", "", "")

    monkeypatch.setattr("rlhfless_ray.learn.gang.get", get)
    gang.by_rank[0].actor.snapshot = SimpleNamespace(remote=lambda: lambda: {"model.safetensors": b"w"})
    assert gang.recovery.has_now and gang.snapshot(1.0, gang.ask_snapshot()) == {"model.safetensors": b"w"}
