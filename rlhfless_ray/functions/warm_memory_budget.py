"""A budget per node for the memory of processes that wait for work."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol

from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.slot_source import SlotSource

SHARE = 0.5  # share of a node's memory, if the recipe sets no amount
FIRST_MB = 560.0  # assumed size of a parked process before one was measured: an engine's imports on CPU in `benchmarks.coldstart`


class ParkingPool(Protocol):
    """The part of a pool that the budget uses."""

    kind: str
    width: int
    parked: list[Instance]

    @property
    def is_bound(self) -> bool: ...

    def end(self, instance: Instance) -> None: ...


class WarmMemoryBudget:
    """Limit the memory of all parked processes of the watched pools on each node.

    A process is started ahead only if the budget has room. If parked processes exceed the budget, those that have waited longest end.
    The first decision of each kind is reported with its reason. Runs on the same cluster share the budget: each may park as much as
    the others leave, and at least an equal part.
    """

    def __init__(self, most_mb: float | None, node_mb: Callable[[str], float], say: Callable[[str], None], others: SlotSource) -> None:
        """Create a budget.

        Args:
            most_mb: limit on each node, for this run; None: the share SHARE of the node's memory.
            node_mb: node id → memory in MB.
            say: callback for messages.
            others: tells what the other runs of the cluster park on the same nodes.
        """
        self.most_mb, self.node_mb, self.say, self.others = most_mb, node_mb, say, others
        self.pools: list[ParkingPool] = []
        self.reported: set[str] = set()

    def watch(self, pool: ParkingPool) -> None:
        self.pools.append(pool)

    def admits(self, pool: ParkingPool, node: str) -> bool:
        """Return whether a process of `pool` may be started ahead on the node."""
        held_mb, most_mb = self._held_mb(node) + _of_one_more(pool), self._most_mb(node)
        if held_mb > most_mb:
            waits = f"with one more {pool.kind} process, parked processes on a node would hold {held_mb:.0f} MB"
            self._say_once("ahead", f"{waits}, so it is not started ahead: {self._limit(most_mb)}")
        return held_mb <= most_mb

    def enforce(self) -> None:
        """End the longest-parked processes of every node that exceeds its budget."""
        nodes = {instance.slot.node for pool in self.pools for instance in pool.parked}
        for node in nodes:
            most_mb = self._most_mb(node)
            while (held_mb := self._held_mb(node)) > most_mb:
                here = [(pool, i) for pool in self.pools for i in pool.parked if i.slot.node == node and i.leaving is None]
                if not here:
                    break
                pool, instance = min(here, key=lambda one: one[1].parked_since_s)
                pool.end(instance)
                waits = f"{len(here)} parked processes on a node held {held_mb:.0f} MB"
                self._say_once("parked", f"{waits}, so those that waited longest end: {self._limit(most_mb)}")
        self.others.parks({node: self._held_mb(node) for node in nodes}, self._devices())

    def _devices(self) -> frozenset[tuple[str, str]]:
        """Return the nodes and devices to which parked processes are bound."""
        return frozenset().union(*(instance.slot.places for pool in self.pools if pool.is_bound for instance in pool.parked))

    def _held_mb(self, node: str) -> float:
        return sum(_of(pool, instance) for pool in self.pools for instance in pool.parked if instance.slot.node == node)

    def _most_mb(self, node: str) -> float:
        if self.most_mb is not None:
            return self.most_mb
        whole_mb = SHARE * self.node_mb(node)
        return (
            whole_mb if self.others is None else max(whole_mb / self.others.view.runs, whole_mb - self.others.view.parked_mb.get(node, 0.0))
        )

    def _limit(self, most_mb: float) -> str:
        shared = ", less the memory of other runs" if self.others.view.runs > 1 else ""
        return f"functions.parked_mb allows {most_mb:.0f} MB" + (f" ({SHARE:.0%} of its memory{shared})" if self.most_mb is None else "")

    def _say_once(self, decision: str, message: str) -> None:
        if decision not in self.reported:
            self.reported.add(decision)
            self.say(message)


def _of(pool: ParkingPool, instance: Instance) -> float:
    return instance.parked_memory[0] or _of_one_more(pool)


def _of_one_more(pool: ParkingPool) -> float:
    """Return the memory in MB of one more process of this pool, which has imported everything and not worked yet."""
    measured = [one.kept_mb for one in pool.parked if one.kept_mb and not one.memory_mb]
    return statistics.median(measured) if measured else pool.width * FIRST_MB
