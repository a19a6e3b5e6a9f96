"""What runs of one pool keep parked on a node: each what the others leave, and its even part in any case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfless_ray.functions.instance import Instance, State
from rlhfless_ray.functions.lease import Slot
from rlhfless_ray.functions.pool_messages import PoolView, RunInfo, RunSlots
from rlhfless_ray.functions.pool_state import PoolState
from rlhfless_ray.functions.pool_view import view_of
from rlhfless_ray.functions.warm_memory_budget import WarmMemoryBudget
from tests.functions.test_pool_state import pool


@dataclass
class Run:
    """A run with a pool of parked engines, which hears of the others by heartbeats."""

    state: PoolState
    name: str
    kind: str = "rollout"
    width: int = 1
    is_bound: bool = False
    parked: list[Instance] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = RunSlots(self.name)
        self.state.join(RunInfo(self.name), 0.0, session=self.slots.session)
        self.budget = WarmMemoryBudget(None, lambda node: 1600.0, self.said.append, self)
        self.budget.watch(self)

    @property
    def view(self) -> PoolView:
        return view_of(self.state, self.name, 0.0)

    def parks(self, own_mb: Mapping[str, float], devices: frozenset[tuple[str, str]]) -> None:
        self.slots.parked_mb, self.slots.warm = own_mb, devices

    def end(self, instance: Instance) -> None:
        self.parked.remove(instance)

    def park(self, count: int) -> None:
        for _ in range(count):
            self.parked.append(Instance(self.kind, Slot("a", 0), None, state=State.PARKED, parked_since_s=len(self.said), kept_mb=100.0))
        self.budget.enforce()
        self.beat()

    def beat(self) -> None:
        self.state.tell(self.slots.statement(), 0.0)


def test_a_run_alone_has_the_whole_budget_and_gives_up_what_another_needs():
    state = pool()
    x = Run(state, "x")
    x.park(9)
    assert len(x.parked) == 8 and "(50% of its memory)" in x.said[0]
    y = Run(state, "y")
    y.park(6)
    assert len(y.parked) == 4  # its even part, though the other one has not heard of it yet
    x.budget.enforce()
    x.beat()
    assert len(x.parked) == 4


def test_a_run_may_park_what_others_leave():
    state = pool()
    x, y = Run(state, "x"), Run(state, "y")
    y.park(1)
    x.park(9)
    assert len(x.parked) == 7 and "less the memory of other runs" in x.said[0]
    y.park(2)
    assert len(y.parked) == 3
    x.budget.enforce()
    assert len(x.parked) == 5 and view_of(state, "y", 0.0).parked_mb == {"a": 700.0}


def test_the_pool_hears_to_which_devices_parked_processes_are_bound():
    state = pool()
    x, scorers = Run(state, "x", is_bound=True, width=2), Run(state, "y")
    x.parked = [Instance("rollout", Slot("a", "1,3"), None, state=State.PARKED)]
    x.budget.watch(scorers)
    scorers.park(1)
    x.park(1)
    assert state.runs["x"].warm == {("a", "0"), ("a", "1"), ("a", "3")} and not state.runs["y"].warm
