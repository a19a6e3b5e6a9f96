"""Measure the bytes of a weight version that were moved between nodes, and the least that any transfer must move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import ray
from ray.experimental.locations import get_local_object_locations

from rlhfless_ray.types import WeightVersion
from rlhfless_ray.weights.layout import Interval, missing_elements


class WeightTraffic:
    """Count the transfers of the newest version. Engines of a node share one copy of it, so receivers are nodes."""

    def __init__(self) -> None:
        self._version = -1
        self._nodes: set[str] = set()  # where engines loaded the version

    def loaded(self, version: int, nodes: Iterable[str]) -> None:
        """Record that engines of these nodes have loaded a version."""
        if version != self._version:
            self._version, self._nodes = version, set()
        self._nodes |= set(nodes)

    def metrics(self, weights: WeightVersion, held_weights: Callable[[int], Mapping[str, Sequence[Interval]]]) -> dict[str, float]:
        """Return metrics of the version's transfers so far.

        `held_weights`: size in bytes → {node: intervals of bytes that the learner's ranks hold there}.
        """
        place = get_local_object_locations([weights.ref]).get(weights.ref, {})
        home = weights.node or ray.get_runtime_context().get_node_id()
        size = place.get("object_size") or 0
        # Ray's records of copies lag behind. Engines that loaded the version certainly have one.
        copies = ({*place.get("node_ids", ())} | self._nodes) - {home}
        return {"weights/pulled_mb": size * len(copies) / 1e6, "weights/least_mb": least_bytes(size, self._nodes, held_weights(size)) / 1e6}


def least_bytes(size: int, nodes: Iterable[str], held: Mapping[str, Sequence[Interval]]) -> int:
    """Return the fewest bytes that give each node a version of `size` bytes, of which nodes hold parts already."""
    return sum(missing_elements([(0, size)], held.get(node, ())) for node in nodes)
