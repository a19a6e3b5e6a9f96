"""Random graphs of calls on fake worker groups: nothing runs before its needs, nobody waits for a lease that the run itself holds, and no
lease is lost, also when processes and nodes are lost."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.calls import Call, Kind, ModelRole, StepGraph, in_turn
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.call_runner import CallRunner, GroupCall
from rlhfless_ray.learn.colocation import ColocatedGroups
from tests.learn.fake_slots import FakeSlots

ROLES = [ModelRole.POLICY, ModelRole.CRITIC, ModelRole.REFERENCE]


class Machine(FakeSlots):
    """Slots and a clock."""

    resource = "cpu"

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.now = 0.0
        self.pending: dict[str, Any] = {}


class Group:
    """A worker group whose calls take their time. `losses`: how many of its next calls lose a rank, and whether with the rank's slot."""

    def __init__(self, machine: Machine, broker: SlotBroker, name: str, ranks: int) -> None:
        self.machine, self.broker, self.name, self.ranks, self.slots = machine, broker, name, ranks, ranks
        self.by_rank: list[Any] = [SimpleNamespace(leases=[]) for _ in range(ranks)]
        self.recovery, self.call_s, self.deadline_s = SimpleNamespace(restarts=0), 0.0, 100.0
        self.losses: list[bool] = []
        self.ends: dict[Any, float] = {}
        self.log: list[tuple[str, float, float]] = []
        self.scheduler = SimpleNamespace(lease_free=self.lease_free)

    @property
    def working(self) -> bool:
        return any(rank.leases for rank in self.by_rank)

    def fits(self, leases: list[Lease]) -> bool:
        return self.working or len(leases) >= self.ranks

    def lease_free(self, by_rank: list[Any], have: list[Lease]) -> list[Lease]:
        lacks = self.ranks - len(have)
        return self.machine.grant(lacks) if 0 < lacks <= len(self.machine.free) else []

    def assign_leases(self, spare: list[Lease]) -> list[Lease]:
        assert not self.working
        if len(spare) < self.ranks:
            spare = [*spare, *self.broker.reclaim()]
        spare += self.machine.grant(self.ranks - len(spare))
        assert len(spare) >= self.ranks, "it would wait for leases that the run itself holds"
        taken, spare = spare[: self.slots], spare[self.slots :]
        for number, lease in enumerate(taken):
            self.by_rank[number % self.ranks].leases.append(lease)
        return spare

    def park(self) -> list[Lease]:
        leases = [lease for rank in self.by_rank for lease in rank.leases]
        for rank in self.by_rank:
            rank.leases = []
        return leases

    def pending(self, refs: list[Any]) -> list[Any]:
        return [ref for ref in refs if self.ends[ref] > self.machine.now]

    def start(self, call: str, seconds: float) -> Pending[str]:
        assert self.working and not any(end > self.machine.now for end in self.ends.values()), "one call at a time"
        start_s, ref, lost = self.machine.now, object(), bool(self.losses)
        self.ends[ref] = start_s + seconds / (2 if lost else 1)

        def result() -> str:
            self.machine.now = max(self.machine.now, self.ends[ref])
            while self.losses:
                self.recovery.restarts += 1
                leases = self.park()
                if self.losses.pop():
                    self.machine.release(leases[-1:])
                    self.machine.free.pop()  # the slot is gone with its node
                    leases = leases[:-1]
                self.broker.put(leases)
                self.broker.put(self.assign_leases(self.broker.take()))
                self.machine.now += seconds
            self.call_s = seconds
            self.log.append((call, start_s, self.machine.now if lost else self.ends[ref]))
            return f"result of {call}"

        return Pending(result, lambda: not self.pending([ref]), lambda: lost and not self.pending([ref]), (ref,))


def random_graph(rng: np.random.Generator) -> StepGraph:
    calls: list[Call] = []
    for number in range(rng.integers(1, 8)):
        needs = tuple(one.name for one in calls if rng.random() < 0.3)
        calls.append(Call(f"call {number}", ROLES[rng.integers(3)], Kind.INFER, needs))
    return StepGraph(tuple(calls))


def setting(slots: int, ranks: list[int], *, shares_slots: bool = False) -> tuple[Machine, dict[ModelRole, Group], ColocatedGroups]:
    machine = Machine(slots)
    broker = SlotBroker(machine)  # type: ignore[arg-type]
    found = {role: Group(machine, broker, str(role), count) for role, count in zip(ROLES, ranks, strict=True)}
    context = SimpleNamespace(broker=broker, leases=machine, autoscaler=SimpleNamespace(criteria=SimpleNamespace(bids=None)))
    groups = ColocatedGroups(context, *found.values())  # type: ignore[arg-type]
    groups.shares_slots = shares_slots
    return machine, found, groups


def runner_of(machine: Machine, groups: ColocatedGroups, graph: StepGraph) -> CallRunner:
    def wait(refs: list[Any], seconds: float, what: str, of_s: float) -> list[Any]:
        ends = {ref: end for group in groups.all for ref, end in group.ends.items()}  # type: ignore[attr-defined]
        first = min(refs, key=ends.__getitem__)
        if ends[first] - machine.now > of_s:
            raise RunError(f"timed out after {of_s:.0f} s waiting for {what}")
        machine.now = max(machine.now, ends[first])
        return [first]

    return CallRunner(groups, graph, wait)


def check(machine: Machine, groups: ColocatedGroups) -> None:
    pools = [
        SimpleNamespace(working=[SimpleNamespace(id=group.name, leases=rank.leases) for rank in group.by_rank], expected=[])
        for group in groups.all
    ]
    groups.context.broker.check("calls", pools)  # type: ignore[arg-type]
    assert len(machine.held) + len(machine.free) <= machine.nodes.slots({})["here"]


@pytest.mark.parametrize("seed", range(200))
def test_calls_run_after_their_needs_and_no_lease_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = rng.integers(1, 3, 3).tolist()
    lost_slots = int(rng.integers(0, 2))
    machine, found, groups = setting(max(ranks) + lost_slots + int(rng.integers(0, 4)), ranks, shares_slots=rng.random() < 0.2)
    groups.context.broker.put(machine.grant(int(rng.integers(0, 4))))
    graph = random_graph(rng)
    if rng.random() < 0.5:
        lossy = found[ROLES[rng.integers(3)]]
        lossy.losses = [bool(lost_slots), *[False] * int(rng.integers(0, 2))]
    together, runner = bool(rng.random() < 0.8), runner_of(machine, groups, graph)

    def call_of(call: Call) -> GroupCall:
        group, seconds = found[call.model], float(rng.uniform(0.1, 5.0))

        def start() -> Pending[str]:
            assert all(need in runner.results for need in call.needs), "started before what it needs has ended"
            check(machine, groups)
            return group.start(call.name, seconds)

        slots = group.ranks * int(rng.integers(1, 3))
        return GroupCall(group, slots, start)  # type: ignore[arg-type]

    calls = {call.name: call_of(call) for call in graph.calls}
    runner.start(calls, graph if together else in_turn(graph))
    check(machine, groups)
    assert runner.finish() == {call.name: f"result of {call.name}" for call in graph.calls}
    check(machine, groups)
    assert set(runner.times) == set(calls) and runner.is_ready() and not runner.has_failed()
    if not together:
        spans = sorted((start_s, end_s) for group in found.values() for _, start_s, end_s in group.log)
        assert all(end_s <= start_s + 1e-9 for (_, end_s), (start_s, _) in itertools.pairwise(spans))


UPDATES = StepGraph((Call("critic", ModelRole.CRITIC, Kind.TRAIN), Call("policy", ModelRole.POLICY, Kind.TRAIN)))


def both(found: dict[ModelRole, Group], critic_s: float = 2.0) -> dict[str, GroupCall]:
    policy, critic = found[ModelRole.POLICY], found[ModelRole.CRITIC]
    return {
        "critic": GroupCall(critic, 1, lambda: critic.start("critic", critic_s)),  # type: ignore[arg-type]
        "policy": GroupCall(policy, 1, lambda: policy.start("policy", 3.0)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize(("slots", "starts"), [(1, {"critic": 0.0, "policy": 2.0}), (2, {"critic": 0.0, "policy": 0.0})])
def test_two_updates_run_at_once_if_there_are_slots_for_both(slots: int, starts: dict[str, float]) -> None:
    machine, found, groups = setting(slots, [1, 1, 1])
    runner = runner_of(machine, groups, UPDATES)
    runner.start(both(found), UPDATES)
    assert list(runner.running) == [name for name in starts if slots == 2 or name == "policy"], "the last one is not waited for"
    runner.finish()
    log = [row for group in found.values() for row in group.log]
    assert {name: start_s for name, start_s, _ in log} == starts and machine.now == max(end_s for *_, end_s in log)


def test_a_lost_critic_is_replaced_while_the_learner_works_and_takes_its_slot_only_if_there_is_no_other() -> None:
    for lost_slot, end_s in ((False, 4.0), (True, 5.0)):  # half of the call, and the call again; at first the policy's 3 seconds
        machine, found, groups = setting(2, [1, 1, 1])
        found[ModelRole.CRITIC].losses = [lost_slot]
        runner = runner_of(machine, groups, UPDATES)
        runner.start(both(found), UPDATES)
        runner.end("critic")
        assert machine.now == (3.0 if not lost_slot else 5.0) and found[ModelRole.CRITIC].recovery.restarts == 1
        assert ("policy" in runner.running) != lost_slot
        assert runner.finish().keys() == {"critic", "policy"} and runner.times["critic"].lost and not runner.times["policy"].lost
        assert machine.now <= end_s
        check(machine, groups)


def test_a_call_that_hangs_is_named_after_its_deadline() -> None:
    machine, found, groups = setting(2, [1, 1, 1])
    runner = runner_of(machine, groups, UPDATES)
    found[ModelRole.CRITIC].deadline_s = found[ModelRole.POLICY].deadline_s = 1.0
    runner.start(both(found), UPDATES)
    with pytest.raises(RunError, match="timed out after 1 s waiting for the critic and the policy"):
        runner.finish()
