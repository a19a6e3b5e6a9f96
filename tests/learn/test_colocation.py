"""On GPUs critic and reference are built on devices of their own if some are free, and otherwise share the learner's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.colocation import ColocatedGroups
from tests.learn.fake_slots import FakeSlots


class Devices(FakeSlots):
    """A node of GPUs that grants at once what is free."""

    resource = "gpu"

    def ask(self, count: int, labels: dict[str, str] | None = None) -> int:
        assert count <= len(self.free), "it would wait for devices that are not there"
        return count

    def collect(self, count: int, kind: str, wait_s: float) -> list[Lease]:
        return self.grant(count)


class Group:
    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks, self.slots, self.pool = name, ranks, ranks, SimpleNamespace(kind=name, labels={}, may_use=bool)
        self.by_rank: list[Any] = []
        self.leases: list[Lease] = []

    @property
    def working(self) -> bool:
        return bool(self.leases)

    def assign_leases(self, spare: list[Lease]) -> list[Lease]:
        self.leases = spare[: self.ranks]
        assert len(self.leases) == self.ranks
        self.by_rank = [SimpleNamespace(slot=lease.slot, leases=[lease]) for lease in self.leases]
        return spare[self.ranks :]

    def build(self, files: Any, loopback: bool, state: Any) -> None:
        assert self.working

    def park(self) -> list[Lease]:
        leases, self.leases = self.leases, []
        for instance in self.by_rank:
            instance.leases = []
        return leases


@pytest.mark.parametrize(
    ("devices", "learner", "expected"),
    [(1, 1, [[0], [0], [0]]), (2, 1, [[0], [1], [0]]), (3, 1, [[0], [1], [2]]), (3, 2, [[0, 1], [2], [0]]), (4, 2, [[0, 1], [2], [3]])],
)
def test_groups_are_apart_as_far_as_there_are_devices(devices: int, learner: int, expected: list[list[int]]) -> None:
    leases = Devices(devices)
    broker = SlotBroker(leases)  # type: ignore[arg-type]
    groups = [Group("learn", learner), Group("critic", 1), Group("reference", 1)]
    colocated = ColocatedGroups(SimpleNamespace(broker=broker, leases=leases), *groups)  # type: ignore[arg-type]
    broker.put(leases.collect(leases.ask(learner), "learn", 0.0))
    broker.staff(groups[0])  # type: ignore[arg-type]
    broker.put(groups[0].park())
    colocated.open_critic("files", False, None)  # type: ignore[arg-type]
    colocated.open_reference("files", False)  # type: ignore[arg-type]
    assert [[int(instance.slot.device) for instance in group.by_rank] for group in groups] == expected
    assert {lease.id for lease in broker.free} == set(leases.held), "no lease is lost"
