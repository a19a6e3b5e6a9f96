"""How long a run had slots on the nodes of each pool, and how many of these nodes it lost. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolTime:
    """Seconds for which a run had any slot of a pool's nodes, summed over nodes, and the nodes that went meanwhile."""

    node_s: float = 0.0
    preemptions: int = 0

    def plus(self, node_s: float, preemptions: int = 0) -> PoolTime:
        return PoolTime(self.node_s + node_s, self.preemptions + preemptions)


class NodeTimes:
    """All methods take the current time in seconds, from the same clock."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()  # leases by node id
        self.pool: dict[str, str] = {}  # of those nodes
        self.since_s: dict[str, float] = {}  # when each was counted last
        self.lost: set[str] = set()  # nodes that went: their other leases end later
        self.found: dict[str, PoolTime] = {}

    def begin(self, node: str, pool: str, now_s: float) -> None:
        """Add a lease."""
        if not self.held[node]:
            self.since_s[node], self.pool[node] = now_s, pool
        self.held[node] += 1

    def end(self, node: str, now_s: float, *, is_lost: bool) -> None:
        """End a lease. `is_lost`: its node is lost or drained."""
        if not self.held[node]:
            return
        self.held[node] -= 1
        is_first = is_lost and node not in self.lost
        if is_first:
            self.lost.add(node)
        if is_first or not self.held[node]:
            self._count(node, now_s, int(is_first))
        if not self.held[node]:
            del self.held[node], self.since_s[node]

    def take(self, now_s: float) -> dict[str, PoolTime]:
        """Return what was counted since the last call, by pool."""
        for node in self.held:
            self._count(node, now_s, 0)
        found, self.found = self.found, {}
        return found

    def _count(self, node: str, now_s: float, preemptions: int) -> None:
        seconds = 0.0 if node in self.lost and not preemptions else now_s - self.since_s[node]
        self.since_s[node] = now_s
        if seconds or preemptions:
            self.found[self.pool[node]] = self.found.get(self.pool[node], PoolTime()).plus(seconds, preemptions)
