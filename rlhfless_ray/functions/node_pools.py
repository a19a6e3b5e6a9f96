"""Which nodes belong to which pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from placement.pools import OWN, PoolKind
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.pool_messages import NODE_LABEL


class NodePools:
    """The pool of each node. Nodes that are lost or drained keep theirs, for their bill."""

    def __init__(self, nodes: ClusterNodes, kinds: Sequence[PoolKind]) -> None:
        """`kinds`: the pools, `OWN` last."""
        self.nodes, self.kinds = nodes, tuple(kinds)
        self._known: dict[str, PoolKind] = {}

    def slots(self) -> dict[str, dict[str, int]]:
        """Return {pool: {node id: slots}} of the nodes that are there and stay."""
        left, found = dict(self.nodes.slots({})), dict[str, dict[str, int]]()
        for kind in self.kinds:
            here = self.nodes.slots(kind.labels) if kind.name != OWN else left
            found[kind.name] = {node: count for node, count in here.items() if node in left}
            left = {node: count for node, count in left.items() if node not in here}
            self._known |= dict.fromkeys(found[kind.name], kind)
        return found

    def largest_node(self) -> int:
        """Return the slots of the largest node in the pools where engines may always work."""
        slots = self.slots()
        return max((count for kind in self.kinds if kind.max_slots != 0 for count in slots[kind.name].values()), default=0)

    def pool_of(self, node: str) -> PoolKind:
        """Return the pool of a node; `OWN` if the node was never seen."""
        if node not in self._known and len(self.kinds) > 1:
            self.slots()
        return self._known.get(node, self.kinds[-1])

    def labels_of(self, pool: str) -> dict[str, str]:
        """Return the conditions on labels that the pool's nodes meet, of those that are there now."""
        slots, names = self.slots(), [kind.name for kind in self.kinds]
        at = names.index(pool)
        own = dict(self.kinds[at].labels)
        there = self.nodes.slots(own)
        others = [node for name in names[:at] for node in slots[name] if node in there]
        return own | (not_on(others) if others else {})


def not_on(nodes: Iterable[str]) -> dict[str, str]:
    """Return the condition that a node is none of these."""
    return {NODE_LABEL: f"!in({','.join(sorted(nodes))})"}
