"""A budget for the memory of processes that only wait for work, per node."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Protocol

from rlhfless_ray.functions.instance import Instance

SHARE = 0.5  # of a node's memory, where the recipe names no amount
FIRST_MB = 560.0  # of a process that waits, until one has told: an engine's imports on CPU, as `benchmarks.coldstart` measured them


class ParkingPool(Protocol):
    """What the budget needs of a pool."""

    kind: str
    width: int
    parked: list[Instance]

    def end(self, instance: Instance) -> None: ...


class OtherRuns(Protocol):
    """The runs of the cluster, which park processes on the same nodes."""

    @property
    def runs(self) -> int:
        """All of them, with this one."""
        ...

    def parks(self, own_mb: Mapping[str, float], /) -> None:
        """Tell the others what this run parks, in MB by node."""
        ...

    def others_mb(self, node: str, /) -> float:
        """Return what the others park on a node."""
        ...


class WarmMemoryBudget:
    """One budget a node, for the pools in `pools` together: processes are started ahead only as far as it has room, and where those
    that are parked hold more, the ones that have waited longest end. What it decides for the first time it says, with the reason.

    Runs that share a cluster share the budget too. Each may park what the others leave of it, and its even part in any case.
    """

    def __init__(
        self, most_mb: float | None, node_mb: Callable[[str], float], say: Callable[[str], None], others: OtherRuns | None = None
    ) -> None:
        """`most_mb`: on each node, for this run alone; None: a share of `node_mb(node id)`. `others`: None if the run is alone."""
        self.most_mb, self.node_mb, self.say, self.others = most_mb, node_mb, say, others
        self.pools: list[ParkingPool] = []
        self.told: set[str] = set()

    def watch(self, pool: ParkingPool) -> None:
        self.pools.append(pool)

    def admits(self, pool: ParkingPool, node: str) -> bool:
        """Return whether a process of `pool` may be started ahead on the node."""
        held_mb, most_mb = self._held_mb(node) + _of_one_more(pool), self._most_mb(node)
        if held_mb > most_mb:
            waits = f"with one more {pool.kind} process, those that wait on a node would hold {held_mb:.0f} MB"
            self._once("ahead", f"{waits}: it is not started ahead, {self._limit(most_mb)}")
        return held_mb <= most_mb

    def enforce(self) -> None:
        """End the longest-parked processes of every node that exceeds its budget."""
        nodes = {instance.slot.node for pool in self.pools for instance in pool.parked}
        for node in nodes:
            most_mb = self._most_mb(node)
            while (held_mb := self._held_mb(node)) > most_mb:
                here = [(pool, instance) for pool in self.pools for instance in pool.parked if instance.slot.node == node]
                pool, instance = min(here, key=lambda one: one[1].parked_since_s)
                pool.end(instance)
                waits = f"{len(here)} parked processes on a node held {held_mb:.0f} MB"
                self._once("parked", f"{waits}: those that waited longest end, {self._limit(most_mb)}")
        if self.others is not None:
            self.others.parks({node: self._held_mb(node) for node in nodes})

    def _held_mb(self, node: str) -> float:
        return sum(_of(pool, instance) for pool in self.pools for instance in pool.parked if instance.slot.node == node)

    def _most_mb(self, node: str) -> float:
        if self.most_mb is not None:
            return self.most_mb
        whole_mb = SHARE * self.node_mb(node)
        return whole_mb if self.others is None else max(whole_mb / self.others.runs, whole_mb - self.others.others_mb(node))

    def _limit(self, most_mb: float) -> str:
        shared = ", less what other runs keep there" if self.others is not None and self.others.runs > 1 else ""
        return f"functions.parked_mb allows {most_mb:.0f} MB" + (f" ({SHARE:.0%} of its memory{shared})" if self.most_mb is None else "")

    def _once(self, decision: str, said: str) -> None:
        if decision not in self.told:
            self.told.add(decision)
            self.say(said)


def _of(pool: ParkingPool, instance: Instance) -> float:
    return instance.parked_memory[0] or _of_one_more(pool)


def _of_one_more(pool: ParkingPool) -> float:
    """MB of a process of this pool that has imported everything and has done nothing yet."""
    told = [one.kept_mb for one in pool.parked if one.kept_mb and not one.memory_mb]
    return statistics.median(told) if told else pool.width * FIRST_MB
