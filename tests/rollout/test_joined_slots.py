"""A rollout that grows when a node joins, and late engines, which do not bother the learner's node."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Slot
from rlhfless_ray.rollout import live_rollout
from rlhfless_ray.rollout.events import RolloutProgress
from rlhfless_ray.rollout.joined_slots import JoinedSlots
from rlhfless_ray.rollout.live_rollout import LiveRollout
from rlhfless_ray.types import WeightVersion


class Pool:
    """A pool of engines on nodes `a`, `b`, …, one for each of the free slots."""

    width = 1

    def __init__(self, nodes: str, free: str) -> None:
        self.working = [SimpleNamespace(slot=SimpleNamespace(node=node)) for node in nodes]
        self.free = list(free)
        source = SimpleNamespace(room=lambda width: len(self.free))
        self.leases = SimpleNamespace(source=source, without_lost=lambda leases: leases)

    def lease_one(self, need: bool, wait_s: float) -> list[str]:
        return [self.free.pop(0)] if self.free else []


class Rollout:
    def __init__(self, pool: Pool) -> None:
        self.pool, self.stopping, self.start_s, self.tail = pool, False, 10.0, 100.0
        self.calls = SimpleNamespace(draining=set())
        self.result = SimpleNamespace(exchanged=Counter())

    def join(self, leases: list[str]) -> None:
        self.pool.working.append(SimpleNamespace(slot=SimpleNamespace(node=leases[0])))

    def tail_s(self) -> float:
        return self.tail

    def remaining(self) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(4), np.ones(4)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("rlhfless_ray.rollout.joined_slots.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def look(plugin: JoinedSlots, now: list[float]) -> str:
    """Return the nodes of the engines after the next look."""
    now[0] += 100.0
    plugin.on_event(RolloutProgress(0, 4))
    return "".join(engine.slot.node for engine in plugin.rollout.pool.working)


def test_a_rollout_takes_the_slots_that_pay(now: list[float]) -> None:
    plugin = JoinedSlots(lambda left, tokens: 3)
    rollout: Any = Rollout(Pool("a", ""))
    plugin.begin(rollout)
    assert look(plugin, now) == "a"
    rollout.pool.free += "bcd"
    assert look(plugin, now) == "abc" and rollout.result.exchanged["rollout/joined"] == 2
    assert look(plugin, now) == "abc", "a fourth would have no work"
    rollout.calls.draining = {"a"}
    assert look(plugin, now) == "abcd", "what will go is replaced while it works"


@pytest.mark.parametrize("change", [{"tail": 20.0}, {"stopping": True}, {"start_s": np.inf}])
def test_no_slot_is_taken_if_the_rest_is_too_short(now: list[float], change: dict[str, Any]) -> None:
    plugin = JoinedSlots(lambda left, tokens: 3)
    rollout: Any = Rollout(Pool("a", "b"))
    vars(rollout).update(change)
    plugin.begin(rollout)
    assert look(plugin, now) == "a"


class Copies:
    """Copies of objects by node, and what late engines were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[object, str]] = []
        context = SimpleNamespace(get_node_id=lambda: "driver")
        monkeypatch.setattr(live_rollout, "ray", SimpleNamespace(get_runtime_context=lambda: context))
        monkeypatch.setattr(live_rollout, "copy_to", self.copy)

    def copy(self, ref: object, node: str) -> tuple[str, None]:
        self.made.append((ref, node))
        return f"{ref}@{node}", None


def rollout_with(weights: WeightVersion, *nodes: str) -> Any:
    """Return a rollout with an engine on each of these nodes that has loaded the weights."""
    rollout = object.__new__(LiveRollout)
    rollout.weights, rollout.held_at, rollout.late = weights, {}, set()
    rollout.calls = SimpleNamespace(draining=set(), number=id)  # type: ignore[assignment]
    engines = [Instance("rollout", Slot(node, 0), None, version=weights.version) for node in nodes]
    rollout.pool = SimpleNamespace(working=engines)  # type: ignore[assignment]
    return rollout


def late(rollout: Any, node: str) -> WeightVersion:
    engine = Instance("rollout", Slot(node, 0), None)
    rollout.pool.working.append(engine)
    return rollout._weights_for(engine)


def test_a_late_engine_pulls_from_a_node_that_is_not_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, weights = Copies(monkeypatch), WeightVersion(3, ("w0", "w1"), nodes=("learner", ""))
    rollout = rollout_with(weights, "learner", "spot")
    assert late(rollout, "new").shards == ("w0@spot", "w1@spot")
    assert late(rollout, "newer").shards == ("w0@spot", "w1@spot"), "a copy serves all"
    assert copies.made == [("w0", "spot"), ("w1", "spot")] and len(rollout.late) == 2


def test_a_late_engine_where_the_weights_are_pulls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, weights = Copies(monkeypatch), WeightVersion(3, ("w",))
    rollout = rollout_with(weights, "spot")
    assert late(rollout, "spot") is weights and late(rollout, "driver") is weights and not copies.made


def test_without_another_holder_the_learner_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, weights = Copies(monkeypatch), WeightVersion(3, ("w",), nodes=("learner",))
    rollout = rollout_with(weights, "learner")
    assert late(rollout, "new") is weights
    rollout = rollout_with(weights, "going")
    rollout.calls.draining = {"going"}
    assert late(rollout, "new") is weights and not copies.made


def test_a_holder_that_is_gone_has_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, weights = Copies(monkeypatch), WeightVersion(3, ("w",), nodes=("learner",))
    rollout = rollout_with(weights, "a", "b")
    assert late(rollout, "new").shards == ("w@a",)
    rollout.pool.working = rollout.pool.working[1:2]
    assert late(rollout, "newer").shards == ("w@b",) and copies.made == [("w", "a"), ("w", "b")]
