"""How many engines a plan may have: where they may work, read from the cluster for each plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from placement.pools import OWN
from rlhfless_ray.functions.lease import Lease, most_instances


@dataclass(frozen=True)
class Limits:
    """The limits of one plan. Pure.

    A shared pool divides these slots among its runs by their bids, see `MarketBids`.
    """

    slots: Mapping[str, int]  # node id → slots, of the nodes on which engines may work
    most: Mapping[int, int]  # width → engines that the recipe allows
    least: int = 1  # rollout.min_actors
    is_own: bool = False  # whether only the run's own node is left, although it lacks the labels of rollout.nodes
    pools: Mapping[str, str] = field(default_factory=dict)  # node id → pool; nodes that it lacks are of the pool `own`
    caps: Mapping[str, int] = field(default_factory=dict)  # pool → most slots that engines lease in it at once

    def engines(self, width: int, held: Iterable[Lease] = ()) -> int:
        """Return the most engines of `width` slots beside the leases `held`."""
        return min(self.most.get(width, 0), sum(self.by_pool(width, held).values()))

    def by_pool(self, width: int, held: Iterable[Lease] = ()) -> dict[str, int]:
        """Return how many engines of `width` slots each pool has room for beside the leases `held`. `own` is always among them."""
        by_pool: dict[str, dict[str, int]] = {OWN: {}}
        for node, count in self.slots.items():
            by_pool.setdefault(self.pools.get(node, OWN), {})[node] = count
        leases = list(held)
        room = {pool: most_instances(slots, width, leases) for pool, slots in by_pool.items()}
        return {pool: min(count, self.caps[pool] // width) if pool in self.caps else count for pool, count in room.items()}

    def fewest(self, width: int) -> int:
        """Return the fewest engines for which a rollout waits. The run's own node may have slots for fewer than the recipe wants."""
        return max(1, min(self.least, self.engines(width))) if self.is_own else self.least

    def since(self, before: Limits, width: int) -> str:
        """Describe what has changed since earlier limits, or return an empty string."""
        changes = [self.slots.get(node, 0) - before.slots.get(node, 0) for node in {**before.slots, **self.slots}]
        joined, left = sum(n for n in changes if n > 0), -sum(n for n in changes if n < 0)
        parts = [f"{n} slot{'s' * (n > 1)} {verb}" for n, verb in ((joined, "joined"), (left, "left")) if n]
        if self.is_own != before.is_own:
            parts = ["only the run's own node is left" if self.is_own else "nodes with the labels of rollout.nodes are back"]
        count, cap = self.engines(width), self.most.get(width, 0)
        limited = " (rollout.max_actors)" if count == cap < sum(self.by_pool(width).values()) else ""
        return f"{' and '.join(parts)}: the pool may be {count}{limited}" if parts else ""
