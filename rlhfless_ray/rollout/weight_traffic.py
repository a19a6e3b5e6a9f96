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
        here, receivers = ray.get_runtime_context().get_node_id(), self._nodes - weights.others.keys()
        homes = [node or here for node in weights.nodes or [""] * len(weights.shards)]
        shards = [(shard, home, receivers) for shard, home in zip(weights.shards, homes, strict=True)]
        shards += [(shard, node, set()) for node, of_node in weights.others.items() for shard in of_node]
        places = get_local_object_locations([shard for shard, *_ in shards])
        pulled, sizes = 0, list[int]()
        for shard, home, loaded in shards:
            place = places.get(shard, {})
            sizes.append(place.get("object_size") or 0)
            # Ray's records of copies lag behind. Engines that loaded the version certainly have one.
            pulled += sizes[-1] * len(({*place.get("node_ids", ())} | loaded) - {home})
        held = list(zip(homes, sizes, strict=False))  # the others hold the same
        return {"weights/pulled_mb": pulled / 1e6, "weights/least_mb": least_bytes(held, self._nodes, complete_nodes) / 1e6}


def least_bytes(shards: Sequence[tuple[str, int]], nodes: Iterable[str], complete_nodes: Container[str] = ()) -> int:
    """Return the fewest bytes that give each of these nodes a version.

    Args:
        shards: (node, bytes) of each shard of the version.
        complete_nodes: nodes whose learner ranks hold all of it.
    """
    return sum(size for node in nodes if node not in complete_nodes for home, size in shards if home != node)
