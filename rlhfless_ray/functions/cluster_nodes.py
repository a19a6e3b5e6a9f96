"""The nodes of the cluster, their slots and memory, and which of them are lost or will be removed soon."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import ray

from placement.pools import has_labels
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.pool_messages import NODE_LABEL

NODES_S = 1.0  # time for which a list of nodes is reused: Ray takes milliseconds to make it
NOTICES_S = 0.25  # the same for notices of drained nodes, which leave little time and take a millisecond to query
ANSWER_S = 2.0  # timeout of a connection to a node
UNKNOWN_S = 0.0  # time of a removal that was not announced


class ClusterNodes:
    """The cluster's nodes as Ray lists them. Lists are reused for a while."""

    def __init__(self, resource: str) -> None:
        """`resource`: "cpu" (a slot is a core) or "gpu" (a slot is a device)."""
        self.resource = resource
        self.notices: Callable[[], dict[str, float]] = draining_nodes  # returns {id: deadline} of the nodes that will be removed soon
        self._nodes: list[JsonObject] = []  # Ray's list at `_listed_s`
        self._listed_s = -float("inf")
        self._silent: set[str] = set()  # ids of nodes that do not respond, though Ray may still list them
        self._draining: dict[str, float] = {}  # result of the last `notices` call, at `_noticed_s`
        self._noticed_s = -float("inf")
        self._slot_mbs: dict[str, float] = {}

    def listed(self) -> list[JsonObject]:
        """Return Ray's list of nodes, at most a second old."""
        if time.monotonic() - self._listed_s > NODES_S:
            self._list()
        return self._nodes

    def present(self) -> list[JsonObject]:
        """Return Ray's nodes, at most a second old, without drained and lost ones."""
        nodes, going = self.listed(), self.draining() | self._silent
        return [node for node in nodes if node["NodeID"] not in going]

    def _list(self) -> None:
        self._nodes, self._listed_s = ray.nodes(), time.monotonic()

    def draining(self) -> set[str]:
        """Return ids of the nodes that will be removed soon: nothing should start or stay there."""
        if time.monotonic() - self._noticed_s > NOTICES_S:
            self._draining, self._noticed_s = self.notices(), time.monotonic()
        return set(self._draining)

    def notice_s(self, node: str) -> float | None:
        """Return the seconds until a node with notice is removed, or None if the time is unknown."""
        deadline_s = self._draining.get(node, UNKNOWN_S)
        return None if deadline_s == UNKNOWN_S else max(0.0, deadline_s - time.time())

    def slots(self, labels: Mapping[str, str]) -> dict[str, int]:
        """Return {node id: slots} of the nodes that meet these conditions on labels."""
        return node_slots(self.resource, labels, self.present())

    def memory_mb(self, node: str) -> float:
        """Return the node's memory in MB according to Ray; infinite if Ray does not know the node."""
        memory = next((known["Resources"].get("memory") for known in self.present() if known["NodeID"] == node), None)
        return float("inf") if memory is None else memory / 2**20

    def slot_mb(self, node: str) -> float:
        """Return the memory in MB per slot of the node, as at the first call."""
        if node not in self._slot_mbs:
            self._slot_mbs[node] = (self.memory_mb(node) or float("inf")) / max(1, self.slots({}).get(node, 1))
        return self._slot_mbs[node]

    def find_lost(self, nodes: list[str]) -> list[str]:
        """Return those of `nodes` that no longer exist, checked now."""
        if nodes:
            self._list()
        alive = {node["NodeID"] for node in self._nodes if node["Alive"]} - self._silent
        return [node for node in nodes if node not in alive]

    def confirm_lost(self, node: str) -> bool:
        """Check a node whose processes do not respond, and return whether it is lost. Ray takes up to half a minute to notice."""
        if not node_answers(node):
            self._silent.add(node)
        return node in self._silent

    def known_going(self) -> set[str]:
        """Return ids of the nodes that were lost or drained when they were last looked up."""
        return self._silent | set(self._draining) | {node["NodeID"] for node in self._nodes if not node["Alive"]}


def draining_nodes() -> dict[str, float]:
    """Return the nodes that Ray drains: after a cloud's notice, by the autoscaler, or by `ray drain-node`.

    {node id: time of the removal in seconds since the epoch, `UNKNOWN_S` if Ray was not told}.
    """
    import ray._private.state as state

    return {node: deadline_ms / 1000 for node, deadline_ms in state.state.get_draining_nodes().items()}


def node_answers(node_id: str) -> bool:
    """Return whether the node's raylet accepts connections."""
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return False
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def node_slots(resource: str, labels: Mapping[str, str] | None = None, nodes: list[JsonObject] | None = None) -> dict[str, int]:
    """Return {node id: slots} of the alive nodes that have slots and meet these conditions on labels. `nodes`: Ray's list, if known."""
    name, wanted = "GPU" if resource == "gpu" else "CPU", labels or {}
    slots_of_node = {
        node["NodeID"]: int(node["Resources"].get(name, 0))
        for node in (ray.nodes() if nodes is None else nodes)
        if node["Alive"] and has_labels({**(node.get("Labels") or {}), NODE_LABEL: node["NodeID"]}, wanted)
    }
    return {node: slots for node, slots in slots_of_node.items() if slots}


def cluster_slots(resource: str) -> int:
    """Return the number of slots of all alive nodes."""
    return sum(node_slots(resource).values())
