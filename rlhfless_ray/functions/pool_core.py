"""A pool of slots: its state, and the placement groups behind it. It runs where it is called, in an actor or in a run's own process."""

from __future__ import annotations

import time

import ray
from ray.util.placement_group import remove_placement_group

from rlhfless_ray.functions.cluster_nodes import node_slots
from rlhfless_ray.functions.node_groups import NodeGroups
from rlhfless_ray.functions.pool_state import IDLE_S, PoolState

LOOK_S = 1.0  # interval at which the pool looks at the cluster's nodes


class PoolCore:
    def __init__(self, resource: str, prefix: str, *, is_shared: bool, is_bundled: bool) -> None:
        """`is_shared`: whether other runs may join, for which free slots stay for a while. Others: see `NodeGroups`."""
        self.resource, self.is_shared = resource, is_shared
        self.idle_s = IDLE_S if is_shared else -1.0  # how long free slots stay in the pool
        self.keeps_warm = is_shared  # whether slots of devices with parked processes stay longer
        self.state = PoolState(time.monotonic())
        self.groups = NodeGroups(resource, prefix, is_shared=is_shared, is_bundled=is_bundled)
        self.looked_s = -float("inf")

    def look(self) -> None:
        """Look at the nodes of the cluster."""
        now = time.monotonic()
        is_new = any(slot.node not in self.state.nodes for slot in self.state.slots.values())
        if now - self.looked_s < LOOK_S and not is_new:
            return
        self.looked_s, nodes = now, ray.nodes()
        labels = {node["NodeID"]: node.get("Labels") or {} for node in nodes}
        gone = self.state.set_nodes({id: (count, labels[id]) for id, count in node_slots(self.resource, nodes=nodes).items()}, now)
        for group in {slot.group for slot in gone}:
            remove_placement_group(group)

    def settle(self) -> None:
        """Hand free slots to those who wait, and ask Ray for what they lack."""
        now = time.monotonic()
        self.groups.advance(self.state, now)
        self.look()
        for slot in self.state.match(now):
            if self.is_shared or slot.last:  # the slots of a run alone are its own as soon as Ray has granted them
                slot.granted_s = time.time()
        # after `match`: what one run does not take, or avoids, another may want
        self.groups.give_back(self.state, self.state.idle(now, self.idle_s, keeps_warm=self.keeps_warm), now)
        self.groups.ask(self.state, now)
