"""Measure the bytes of a weight version that were moved between nodes, and the least that any transfer must move."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import ray
from ray.experimental.locations import get_local_object_locations

from rlhfless_ray.types import WeightVersion


class WeightTraffic:
    """Count the transfers of the newest version. Engines of a node share one copy of each shard, so receivers are nodes."""

    def __init__(self) -> None:
        self._version = -1
        self._nodes: set[str] = set()  # where engines loaded the version

    def loaded(self, version: int, nodes: Iterable[str]) -> None:
        """Record that engines of these nodes have loaded a version."""
        if version != self._version:
            self._version, self._nodes = version, set()
        self._nodes |= set(nodes)

    def metrics(self, weights: WeightVersion, complete_nodes: set[str]) -> dict[str, float]:
        """Return metrics of the version's transfers so far. `complete_nodes`: see `least_bytes`."""
        places, here = get_local_object_locations(list(weights.shards)), ray.get_runtime_context().get_node_id()
        pulled, held = 0, list[tuple[str, int]]()
        for number, shard in enumerate(weights.shards):
            place, home = places.get(shard, {}), (weights.nodes[number] if weights.nodes else "") or here
            held.append((home, place.get("object_size") or 0))
            # Ray's records of copies lag behind. Engines that loaded the version certainly have one.
            pulled += held[-1][1] * len(({*place.get("node_ids", ())} | self._nodes) - {home})
        return {"weights/pulled_mb": pulled / 1e6, "weights/least_mb": least_bytes(held, self._nodes, complete_nodes) / 1e6}


def least_bytes(shards: Sequence[tuple[str, int]], nodes: Iterable[str], complete_nodes: Container[str] = ()) -> int:
    """Return the fewest bytes that give each of these nodes a version.

    Args:
        shards: (node, bytes) of each shard of the version.
        complete_nodes: nodes whose learner ranks hold all of it.
    """
    return sum(size for node in nodes if node not in complete_nodes for home, size in shards if home != node)
