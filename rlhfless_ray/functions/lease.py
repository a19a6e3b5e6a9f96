"""Leases: the right to use a slot, each backed by a placement group with one bundle.

Measured with Ray 2.60: an independent group takes 4 ms, but one that needs resources freed at the same instant waits 0.5-0.8 s
for Ray's retry interval. So a lease is handed from one function to the next if possible, and only surplus leases are removed.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.ledger import Ledger

NODES_S = 1.0  # time for which a list of nodes is reused: Ray takes milliseconds to make it
NOTICES_S = 0.25  # the same for notices of drained nodes, which leave little time and take a millisecond to query
ANSWER_S = 2.0  # timeout of a connection to a node
PREFERRED_S = 1.0  # longest wait for a preferred node: a little more than Ray's retry interval
DEVICE_S = 60.0  # timeout for the name of a granted device
POOL_PREFIX = "rlhfless-pool-"  # prefix of the names of the shared pool's placement groups
LOOKING_SHARE = 0.01  # largest share of time for checks whether others wait: Ray's table lists every group ever created


@dataclass(frozen=True)
class Slot:
    """A node and a device on it.

    On GPU `device` is the name in CUDA_VISIBLE_DEVICES: an index, or a UUID if the node uses those (MIG). On CPU it numbers the
    node's slots.
    """

    node: str
    device: int | str


@dataclass(eq=False)
class Lease:
    id: str
    slot: Slot
    holder: str = ""  # id of the instance that holds it


@dataclass(eq=False)
class LeaseRequest:
    """A slot that was requested and may not be granted yet, on a node (any if empty) that has these labels."""

    id: str
    from_s: float  # wall-clock time before which it was not granted
    node: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """A granted slot. `id`: of the lease."""

    id: str
    node: str
    device: int | str


class SlotSource(Protocol):
    """A source of slots: Ray's queue, or the pool that the runs of a cluster share."""

    def ask(self, requests: list[LeaseRequest], /) -> None: ...

    def wait(self, request: LeaseRequest, until_s: float, /) -> Grant | None: ...

    def withdraw(self, requests: list[LeaseRequest], /) -> None: ...

    def release(self, ids: list[str], /) -> None: ...

    def drop(self, ids: list[str], /) -> None:
        """Release slots of lost or drained nodes, which no run should get again."""
        ...

    def others_wait(self) -> bool: ...

    @property
    def surplus(self) -> int | None:
        """Number of slots that this run should give back to waiting runs; None if unknown."""
        ...

    def may_wait(self) -> bool:
        """Return whether a needed slot may still be granted after its deadline."""
        ...

    def close(self) -> None: ...


class RayGroups:
    """Slots as this run's own placement groups, from Ray's queue."""

    surplus = None

    def __init__(self, resource: str) -> None:
        self.resource, self.bundle = resource, bundle_of(resource)
        self.groups: dict[str, Any] = {}  # by the id of the request, which is the lease's id
        self.numbers: dict[str, tuple[str, int]] = {}  # on CPU: node and number of each granted slot

    def ask(self, requests: list[LeaseRequest]) -> None:
        for one in requests:
            selector = one.labels | ({"ray.io/node-id": one.node} if one.node else {})
            selectors = [selector] if selector else None
            self.groups[one.id] = placement_group([dict(self.bundle)], name=f"rlhfless-{one.id}", bundle_label_selector=selectors)

    def wait(self, request: LeaseRequest, until_s: float) -> Grant | None:
        """Return the granted slot, or None at the time `until_s` (monotonic) or if its node was lost before it could name the device.

        Does not use Ray's own wait, which rounds timeouts down to whole seconds.
        """
        group, pause = self.groups[request.id], 0.001
        while (table := placement_group_table(group))["state"] != "CREATED":
            request.from_s = time.time()
            STOP.check()
            if time.monotonic() >= until_s:
                return None
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)
        node = table["bundles_to_node_id"][0]
        if self.resource == "cpu":
            taken = {number for place, number in self.numbers.values() if place == node}
            self.numbers[request.id] = node, next(n for n in range(len(taken) + 1) if n not in taken)
            return Grant(request.id, node, self.numbers[request.id][1])
        try:
            return Grant(request.id, node, self._device(group))
        except RayTaskError:
            raise
        except RayError:
            return None

    def _device(self, group: Any) -> int | str:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        ids = ray.get(device_ids.options(scheduling_strategy=strategy).remote(), timeout=DEVICE_S)
        return device_named(ids[0])

    def withdraw(self, requests: list[LeaseRequest]) -> None:
        self.release([one.id for one in requests])

    def release(self, ids: list[str]) -> None:
        for id in ids:
            self.numbers.pop(id, None)
            remove_placement_group(self.groups.pop(id))

    drop = release

    def others_wait(self) -> bool:
        return others_wait(self.resource, {group.id.hex() for group in self.groups.values()})

    def may_wait(self) -> bool:
        return False

    def close(self) -> None:
        pass


class LeaseManager:
    """Request and release slots, and record every change in the ledger."""

    def __init__(self, resource: str, ledger: Ledger, deadline_s: float, run_id: str, source: SlotSource | None = None) -> None:
        """`resource`: "cpu" (a slot is a core) or "gpu" (a slot is a device). `source`: source of the slots; default: Ray's queue."""
        self.resource = resource
        self.bundle = bundle_of(resource)
        self.source: SlotSource = RayGroups(resource) if source is None else source
        self.ledger = ledger
        self.deadline_s = deadline_s
        self.run_id = run_id
        self.held: dict[str, Lease] = {}
        self.asked: dict[str, LeaseRequest] = {}
        self.counter = 0
        self.waited_s = 0.0  # time on the critical path, for the step's metrics
        self.nodes: list[dict[str, Any]] = []  # Ray's list at `nodes_s`, see `seen_nodes`
        self.nodes_s = -float("inf")
        self.notices: Callable[[], set[str]] = draining_nodes  # returns ids of the nodes that will be removed soon
        self.lost: set[str] = set()  # ids of nodes that do not respond, though Ray may still list them
        self.drained: tuple[set[str], float] = set(), -float("inf")  # result and time of the last `notices` call
        self.slot_mbs: dict[str, float] = {}
        self.look_again_s = -float("inf")  # earliest time of the next check whether others wait
        self.asked_leases = 0
        self.handed_over = 0

    # ---- asking -----------------------------------------------------------------------------------------------

    def ask(self, count: int, nodes: list[str] | None = None, labels: dict[str, str] | None = None) -> list[LeaseRequest]:
        """Request slots without waiting.

        `nodes`: ids of required nodes, one per slot for the first slots. `labels`: required of all nodes.
        """
        requests = []
        for i in range(count):
            self.counter += 1
            node = nodes[i] if nodes and i < len(nodes) else ""
            requests.append(LeaseRequest(f"{self.run_id}-{self.counter}", time.time(), node, dict(labels or {})))
        self.source.ask(requests)
        self.asked |= {request.id: request for request in requests}
        return requests

    def collect(
        self, requests: list[LeaseRequest], kind: str, wait_s: float, need: int = 0, have: list[Lease] | None = None
    ) -> list[Lease]:
        """Return `have` and the granted ones of `requests`; those not granted in time are withdrawn.

        It waits for the first `need` leases until the lease deadline, and for the others for `wait_s`. If there are fewer than `need`,
        all are released, and RunError names what is missing. The run's other requests are withdrawn before it waits for needed leases:
        they may be granted the only slot, which nothing would collect meanwhile.
        """
        start = time.monotonic()
        leases = list(have or [])
        for request in requests:
            if needed := len(leases) < need:
                self.withdraw([one for one in self.asked.values() if one not in requests])
            grant = self.source.wait(request, start + (self.deadline_s if needed else wait_s))
            while grant is None and needed and self.source.may_wait():
                grant = self.source.wait(request, time.monotonic() + PREFERRED_S)
            if grant is None:
                self.withdraw([request])
            else:
                leases.append(self._granted(request, grant, kind))
        seconds = time.monotonic() - start
        self.waited_s += seconds
        if len(leases) < need:
            missing = f"{kind} needs {need} × {self.bundle} and got {len(leases)} within {seconds:.0f} s; {self.availability()}"
            self.release(leases)
            raise RunError(missing)
        return leases

    def take(
        self,
        count: int,
        kind: str,
        prefer: list[str] | None = None,
        need: int | None = None,
        wait_s: float = 0.0,
        labels: dict[str, str] | None = None,
        asked: list[LeaseRequest] | None = None,
    ) -> list[Lease]:
        """Request and collect `count` slots, of which `need` (default: all) must be granted within the lease deadline.

        Args:
            prefer: ids of preferred nodes, one per slot, where parked instances wait. It waits for them briefly (half of `wait_s`
                if `need` is 0). Missing slots are then requested on any node, for a cold start.
            labels: required of every slot's node.
            asked: earlier requests for preferred nodes, used instead of `prefer`; more than `count` are withdrawn.
        """
        need = count if need is None else need
        first, surplus = (asked or [])[:count], (asked or [])[count:]
        self.withdraw(surplus)
        if count and not first and (nodes := self.with_room(prefer or [])[:count]):
            first = self.ask(len(nodes), nodes, labels)
        leases = self.collect(first, kind, PREFERRED_S if need else wait_s / 2)
        if len(leases) < count:
            leases = self.collect(self.ask(count - len(leases), labels=labels), kind, wait_s / 2 if first else wait_s, need, leases)
        return leases

    def take_together(
        self, count: int, kind: str, spare: list[Lease], prefer: set[str], labels: dict[str, str], need: bool, wait_s: float
    ) -> tuple[list[Lease], list[Lease]]:
        """Return `count` leases of one node, all or none, and what is left of `spare`, held leases that may be among them.

        Nodes are tried in turn: first those with parked instances (`prefer`), then those with many spare leases. If the leases are
        needed, this is repeated until the lease deadline. Between two rounds everything is released, because another run may wait for
        slots that are held here while it holds slots that are missing here.
        """
        start = time.monotonic()
        end = start + (self.deadline_s if need else wait_s)
        while True:
            spare_on_node = Counter(lease.slot.node for lease in spare)
            room = Counter(self.matching(labels))
            elsewhere = [lease for lease in self.held.values() if lease not in spare]
            room.subtract(lease.slot.node for lease in elsewhere)
            for node in sorted((node for node in room if room[node] >= count), key=lambda node: (node not in prefer, -spare_on_node[node])):
                share = [lease for lease in spare if lease.slot.node == node][:count]
                missing = count - len(share)
                wait = min(PREFERRED_S, max(0.0, end - time.monotonic()))
                got = self.collect(self.ask(missing, [node] * missing, labels), kind, wait)
                if len(got) == missing:
                    return [*share, *got], [lease for lease in spare if lease not in share]
                self.release(got)
                if time.monotonic() >= end:
                    break
            if not need:
                return [], spare
            self.release(spare)
            spare = []
            if time.monotonic() >= end and not self.source.may_wait():
                where = "one node" + (f" labelled {labels}" if labels else "")
                wanted = f"{kind} needs {count} × {self.bundle} on {where}"
                raise RunError(f"{wanted} and did not get them within {self.deadline_s:.0f} s; {self.availability()}")
            STOP.check()
            time.sleep(random.uniform(0.2, 1.0))

    def with_room(self, nodes: list[str]) -> list[str]:
        """Return those of `nodes` that are alive and have free slots beyond the leases held, each once per free slot."""
        room = Counter(self.matching({})) if nodes else Counter()
        room.subtract(lease.slot.node for lease in self.held.values())
        nodes_with_room = []
        for node in nodes:
            if room[node] > 0:
                room[node] -= 1
                nodes_with_room.append(node)
        return nodes_with_room

    def seen_nodes(self) -> list[dict[str, Any]]:
        """Return Ray's nodes, at most a second old, without drained and lost ones."""
        if time.monotonic() - self.nodes_s > NODES_S:
            self._look()
        going = self.draining() | self.lost
        return [node for node in self.nodes if node["NodeID"] not in going]

    def _look(self) -> None:
        self.nodes, self.nodes_s = ray.nodes(), time.monotonic()

    def draining(self) -> set[str]:
        """Return ids of the nodes that Ray will remove soon: nothing should start or stay there."""
        if time.monotonic() - self.drained[1] > NOTICES_S:
            self.drained = self.notices(), time.monotonic()
        return self.drained[0]

    def matching(self, labels: dict[str, str]) -> dict[str, int]:
        """Return {node id: slots} of the nodes that have all these labels."""
        return node_slots(self.resource, labels, self.seen_nodes())

    def memory_mb(self, node: str) -> float:
        """Return the node's memory in MB according to Ray; infinite if Ray does not know the node."""
        memory = next((one["Resources"].get("memory") for one in self.seen_nodes() if one["NodeID"] == node), None)
        return float("inf") if memory is None else memory / 2**20

    def slot_mb(self, node: str) -> float:
        """Return the memory in MB per slot of the node, as at the first call."""
        if node not in self.slot_mbs:
            self.slot_mbs[node] = (self.memory_mb(node) or float("inf")) / max(1, self.matching({}).get(node, 1))
        return self.slot_mbs[node]

    def lost_nodes(self, nodes: list[str]) -> list[str]:
        """Return those of `nodes` that no longer exist, checked now."""
        if nodes:
            self._look()
        alive = {node["NodeID"] for node in self.nodes if node["Alive"]} - self.lost
        return [node for node in nodes if node not in alive]

    def confirm_lost(self, node: str) -> bool:
        """Check a node whose processes do not respond, and return whether it is lost. Ray takes up to half a minute to notice."""
        if not node_answers(node):
            self.lost.add(node)
        return node in self.lost

    def _granted(self, request: LeaseRequest, grant: Grant, kind: str) -> Lease:
        self.asked.pop(request.id, None)
        lease = Lease(grant.id, Slot(grant.node, grant.device))
        self.held[lease.id] = lease
        self.asked_leases += 1
        self.ledger.hold(lease.id, grant.node, str(grant.device), kind, "", request.from_s)
        return lease

    # ---- giving back ------------------------------------------------------------------------------------------

    def hand_over(self, lease: Lease, kind: str, instance: str) -> None:
        """Hand a lease to another instance of this run."""
        if lease.holder and lease.holder != instance:
            self.handed_over += 1
        lease.holder = instance
        self.ledger.hold(lease.id, lease.slot.node, str(lease.slot.device), kind, instance)

    def release(self, leases: list[Lease]) -> None:
        held = [lease for lease in leases if self.held.pop(lease.id, None) is not None]
        for lease in held:
            self.ledger.release(lease.id)
        going = self.lost | self.drained[0] | {node["NodeID"] for node in self.nodes if not node["Alive"]}
        self.source.release([lease.id for lease in held if lease.slot.node not in going])
        self.source.drop([lease.id for lease in held if lease.slot.node in going])

    def withdraw(self, requests: list[LeaseRequest]) -> None:
        self.source.withdraw([request for request in requests if self.asked.pop(request.id, None) is not None])

    def release_all(self) -> None:
        """Release everything, at the end of a run."""
        self.withdraw(list(self.asked.values()))
        self.release(list(self.held.values()))
        self.source.close()

    def without_lost(self, leases: list[Lease]) -> list[Lease]:
        """Return the leases whose nodes exist and stay, and release the others.

        Ray moves the placement group of a lost node, so such a lease would be on another node.
        """
        there = {node["NodeID"] for node in self.seen_nodes() if node["Alive"]} if leases else set()
        missing = {lease.slot.node for lease in leases} - there  # or added since the last query
        gone = set(self.lost_nodes(sorted(missing))) | (missing & self.draining())
        self.release([lease for lease in leases if lease.slot.node in gone])
        return [lease for lease in leases if lease.slot.node not in gone]

    # ---- looking ----------------------------------------------------------------------------------------------

    def availability(self) -> str:
        name = next(iter(self.bundle))
        total = ray.cluster_resources().get(name, 0)
        free = ray.available_resources().get(name, 0)
        return f"the cluster has {total:g} {name}, {free:g} free"

    def others_wait(self) -> bool:
        """Return whether a pending placement group of another user could use one of this run's slots.

        False if the last check was too recent, see LOOKING_SHARE.
        """
        began_s = time.monotonic()
        if began_s < self.look_again_s:
            return False
        others = self.source.others_wait()
        now = time.monotonic()
        self.look_again_s = now + (now - began_s) / LOOKING_SHARE
        return others


def draining_nodes() -> set[str]:
    """Return ids of the nodes that will be removed: after a cloud's notice, by the autoscaler, or by `ray drain-node`."""
    import ray._private.state as state

    return set(state.state.get_draining_nodes())


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


def node_slots(resource: str, labels: dict[str, str] | None = None, nodes: list[dict[str, Any]] | None = None) -> dict[str, int]:
    """Return {node id: slots} of the alive nodes that have slots and all these labels. `nodes`: Ray's list, if known."""
    name, wanted = "GPU" if resource == "gpu" else "CPU", (labels or {}).items()
    slots_of_node = {
        node["NodeID"]: int(node["Resources"].get(name, 0))
        for node in (ray.nodes() if nodes is None else nodes)
        if node["Alive"] and wanted <= (node.get("Labels") or {}).items()
    }
    return {node: slots for node, slots in slots_of_node.items() if slots}


def cluster_slots(resource: str) -> int:
    """Return the number of slots of all alive nodes."""
    return sum(node_slots(resource).values())


def most_instances(slots: dict[str, int], width: int, held: Iterable[Lease] = ()) -> int:
    """Return how many instances these nodes have slots for beside the leases `held`. Each needs `width` slots of one node."""
    room = Counter(slots)
    room.subtract(lease.slot.node for lease in held)
    return sum(max(0, room[node]) // width for node in slots)


def places(slots: dict[str, int], home: str, count: int) -> list[Slot]:
    """Return up to `count` slots for parked processes, on `home` first, at most as many per node as it has slots."""
    nodes = sorted(slots, key=lambda node: node != home)
    return [Slot(node, number) for node in nodes for number in range(slots[node])][:count]


def device_named(id: str | int) -> int | str:
    """Convert Ray's device name, which is an index or the name in the node's CUDA_VISIBLE_DEVICES."""
    name = str(id).strip()
    return int(name) if name.isdecimal() else name


def bundle_of(resource: str) -> dict[str, float]:
    """Return the Ray resources of a slot."""
    return {"GPU": 1} if resource == "gpu" else {"CPU": 1}


def others_wait(resource: str, own: set[str]) -> bool:
    """Return whether a pending placement group that is not among `own` (hex ids) nor of the shared pool could use a slot."""
    name = "GPU" if resource == "gpu" else "CPU"
    return any(
        info["state"] == "PENDING"
        and id not in own
        and not info["name"].startswith(POOL_PREFIX)
        and any(name in b for b in info["bundles"].values())
        for id, info in placement_group_table().items()
    )


# max_calls=0: otherwise Ray ends a GPU task's process after each call, and the next call has to start one
@ray.remote(num_cpus=0, num_gpus=1, max_calls=0)
def device_ids() -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
