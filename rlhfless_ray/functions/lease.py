"""Leases: the right to use a slot.

A new slot may take Ray 0.5-0.8 s (see `node_groups`). So a lease is handed from one function to the next if possible, and only surplus
leases are removed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import ray

from placement.pools import OWN, PoolKind
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.node_groups import bundle_of
from rlhfless_ray.functions.node_pools import NodePools
from rlhfless_ray.functions.node_times import NodeTimes
from rlhfless_ray.functions.pool_messages import PoolSlot, SlotRequest
from rlhfless_ray.functions.private_slots import PrivateSlots
from rlhfless_ray.functions.slot_source import SlotSource

PREFERRED_S = 1.0  # longest wait for a preferred node: a little more than Ray's retry interval
Labels = Callable[[], dict[str, str]]  # returns the node labels that slots must have now
LOOKING_SHARE = 0.01  # largest share of time for checks whether others wait: Ray's table lists every group ever created


@dataclass(frozen=True)
class Slot:
    """A node and a device on it.

    On GPU `device` is the name in CUDA_VISIBLE_DEVICES: an index, or a UUID if the node uses those (MIG). On CPU it numbers the
    node's slots.
    """

    node: str
    device: int | str

    @property
    def places(self) -> set[tuple[str, str]]:
        """The node and device, one for each if the slot is of an instance with several devices."""
        return {(self.node, device) for device in str(self.device).split(",")}


@dataclass(eq=False)
class Lease:
    id: str
    slot: Slot
    holder: str = ""  # id of the instance that holds it
    leaving: Callable[[], None] | None = None  # waits until an earlier holder, which may still be leaving the device, has left it

    def wait_until_left(self) -> None:
        if self.leaving is not None:
            self.leaving()
            self.leaving = None


class LeaseManager:
    """Request and release slots, and record every change in the ledger."""

    def __init__(
        self,
        resource: str,
        ledger: Ledger,
        deadline_s: float,
        run_id: str,
        source: SlotSource | None = None,
        nodes: ClusterNodes | None = None,
        pools: NodePools | None = None,
    ) -> None:
        """`resource`: "cpu" (a slot is a core) or "gpu" (a slot is a device).

        `source`: source of the slots; default: a pool of this run alone. `nodes`: the cluster's, if another part of the run reads them too.
        `pools`: those of the nodes; default: `own` has all.
        """
        self.resource = resource
        self.bundle = bundle_of(resource)
        self.source: SlotSource = PrivateSlots(resource, run_id) if source is None else source
        self.ledger = ledger
        self.deadline_s = deadline_s
        self.run_id = run_id
        self.held: dict[str, Lease] = {}
        self.pending: dict[str, SlotRequest] = {}  # neither granted nor withdrawn, by id
        self.counter = 0
        self.waited_s = 0.0  # time on the critical path, for the step's metrics
        self.nodes = ClusterNodes(resource) if nodes is None else nodes
        self.pools = NodePools(self.nodes, [PoolKind(OWN)]) if pools is None else pools
        self.node_times = NodeTimes()
        self.look_again_s = -float("inf")  # earliest time of the next check whether others wait
        self.granted = 0  # number of leases so far

    # ---- asking -----------------------------------------------------------------------------------------------

    def ask(
        self,
        count: int,
        nodes: list[str] | None = None,
        labels: dict[str, str] | None = None,
        width: int = 1,
        returns: Iterable[Lease] = (),
    ) -> list[SlotRequest]:
        """Request `count` times `width` slots of one node, without waiting.

        `nodes`: ids of required nodes, for the first requests. `labels`: required of all nodes. `returns`: leases that are not enough. They
        go back, and may be completed to `width`.
        """
        required = [nodes[i] if nodes and i < len(nodes) else "" for i in range(count)]
        requests = [SlotRequest(self._new_id(), "", node, dict(labels or {}), None, width) for node in required]
        return self._ask(requests, self._let_go(returns))

    def ask_preferred(self, count: int, nodes: list[str], labels: dict[str, str] | None = None, width: int = 1) -> list[SlotRequest]:
        """Request so many slots on those of `nodes` that have room, where parked instances wait. `nodes`: ids, one per request."""
        nodes = self.with_room(nodes, width)[:count] if count > 0 else []
        return self.ask(len(nodes), nodes, labels, width) if nodes else []

    def ask_again(self, slots: list[Slot]) -> list[SlotRequest]:
        """Request slots to which processes with state must return: on CPU any of the same nodes, on GPU the same devices."""
        on_gpu = self.resource == "gpu"
        return self._ask([SlotRequest(self._new_id(), "", slot.node, {}, slot.device if on_gpu else None) for slot in slots])

    def _new_id(self) -> str:
        self.counter += 1
        return f"{self.run_id}-{self.counter}"

    def _ask(self, requests: list[SlotRequest], returns: Iterable[str] = ()) -> list[SlotRequest]:
        self.source.ask(requests, returns=returns)
        self.pending |= {request.id: request for request in requests}
        return requests

    def collect(
        self,
        requests: list[SlotRequest],
        kind: str,
        wait_s: float,
        need: int = 0,
        have: list[Lease] | None = None,
        use: Callable[[list[Lease]], object] = lambda leases: None,
        labels: Labels = dict,
    ) -> list[Lease]:
        """Return `have` and the leases of those requests that are granted; those not granted in time are withdrawn.

        `use`: called with the leases of each request as soon as it is granted, while others may still be missing. `labels`: those of
        `requests`. If they change, as when the last node with them is lost, what is needed is requested again.

        It waits until `need` requests are granted, those of `have` included, until the lease deadline, and for each other one for `wait_s`
        after the last grant: slots come one after the other, and on GPU Ray starts a process to name the first devices. If there are fewer
        than `need`, all are released, and RunError names what is missing. The run's other requests are withdrawn before a wait for what is
        needed. They may be granted the only slot, which nothing would collect meanwhile.
        """
        start = granted_s = time.monotonic()
        leases, used_s, width = list(have or []), 0.0, max((request.width for request in requests), default=1)
        for request in requests:
            if needed := len(leases) < need * width:
                self.withdraw([one for one in self.pending.values() if one not in requests])
            end = start + self.deadline_s if needed else granted_s + wait_s
            look_s = PREFERRED_S if needed and request.labels else float("inf")
            slots = self.source.wait(request, min(end, time.monotonic() + look_s))
            while not slots and needed and (time.monotonic() < end or self.may_wait(width, request.labels)):  # sooner: its node was lost
                if request.labels and labels() != request.labels:
                    self.withdraw([request])
                    [request] = self.ask(1, labels=labels(), width=width)
                slots = self.source.wait(request, min(max(end, time.monotonic() + PREFERRED_S), time.monotonic() + look_s))
            if not slots:
                self.withdraw([request])
            else:
                granted = self._granted(request, slots, kind)
                leases += granted
                began_s = time.monotonic()
                use(granted)
                granted_s = time.monotonic()
                used_s += granted_s - began_s
        seconds = time.monotonic() - start
        self.waited_s += seconds - used_s
        if len(leases) < need * width:
            where = f" on nodes labelled {labels()}" if labels() else ""
            each = f"{width} × {self.bundle} of one node" if width > 1 else f"{self.bundle}"
            got = f"got {len(leases) // width} within {seconds:.0f} s"
            missing = f"{kind} needs {need} × {each}{where} and {got}; {self.availability()}"
            self.release(leases)
            raise RunError(missing)
        return leases

    def take(
        self,
        count: int,
        kind: str,
        asked: list[SlotRequest] | None = None,
        need: int | None = None,
        wait_s: float = 0.0,
        labels: Labels = dict,
        use: Callable[[list[Lease]], object] = lambda leases: None,
        width: int = 1,
        returns: Iterable[Lease] = (),
    ) -> list[Lease]:
        """Request and collect `count` times `width` slots, of which `need` (default: all) must be granted within the lease deadline.

        Args:
            asked: requests for preferred nodes, see `ask_preferred`; more than `count` are withdrawn. It waits for them briefly (half
                of `wait_s` if `need` is 0). What is missing is then requested on any node, for a cold start.
            labels: required of every slot's node.
            use: see `collect`.
            returns: see `ask`.
        """
        need = count if need is None else need
        first, surplus = (asked or [])[:count], (asked or [])[count:]
        self.withdraw(surplus)
        leases = self.collect(first, kind, PREFERRED_S if need else wait_s / 2, use=use)
        if (got := len(leases) // width) < count:
            requests = self.ask(count - got, labels=labels(), width=width, returns=returns)
            leases = self.collect(requests, kind, wait_s / 2 if first else wait_s, need, leases, use, labels)
        return leases

    def try_again(self, start_s: float, leases: list[Lease], wanted: str, count: int, labels: dict[str, str]) -> None:
        """Release leases that were not enough for work that needs several at once, and pause before the next attempt.

        Another run may wait for what is held here while it holds what is missing here. The pause is random, so that one of them comes
        first. Raises RunError past the lease deadline. `start_s`: time of the first attempt (monotonic). `wanted`: for its message.
        `count`, `labels`: see `may_wait`.
        """
        seconds = time.monotonic() - start_s
        self.release(leases)
        if seconds >= self.deadline_s and not self.may_wait(count, labels):
            raise RunError(f"{wanted} and did not get them within {self.deadline_s:.0f} s; {self.availability()}")
        STOP.check()
        time.sleep(random.uniform(0.2, 1.0))

    def with_room(self, nodes: list[str], width: int = 1) -> list[str]:
        """Return those of `nodes` that are alive and have `width` slots beyond the leases held, each as often as that."""
        room = Counter(self.nodes.slots({})) if nodes else Counter()
        room.subtract(lease.slot.node for lease in self.held.values())
        nodes_with_room = []
        for node in nodes:
            if room[node] >= width:
                room[node] -= width
                nodes_with_room.append(node)
        return nodes_with_room

    def reachable(self) -> set[tuple[str, str]]:
        """Return the nodes and devices on which parked processes of this run could work.

        These are devices that it holds, that no run holds, or that other runs hold beyond their shares.
        """
        view = self.source.look()  # it may be older than the last release
        return {*view.warm_free, *view.warm_lent}.union(*(lease.slot.places for lease in self.held.values()))

    def may_wait(self, count: int, labels: Mapping[str, str]) -> bool:
        """Return whether needed slots may come after their deadline: a node has `count` of them, and other runs may hold these."""
        return any(slots >= count for slots in self.nodes.slots(labels).values()) and self.source.may_wait()

    def _granted(self, request: SlotRequest, slots: list[PoolSlot], kind: str) -> list[Lease]:
        self.pending.pop(request.id, None)
        leases = [Lease(id, Slot(slot.node, slot.device)) for id, slot in zip(request.ids, slots, strict=True)]
        for lease, slot in zip(leases, slots, strict=True):
            self.held[lease.id] = lease
            self.granted += 1
            self.node_times.begin(slot.node, self.pools.pool_of(slot.node).name, time.monotonic())
            self.ledger.hold(lease.id, slot.node, str(slot.device), kind, "", slot.granted_s)
        return leases

    # ---- giving back ------------------------------------------------------------------------------------------

    def hand_over(self, lease: Lease, kind: str, instance: str) -> None:
        """Hand a lease to another instance of this run."""
        lease.holder = instance
        self.ledger.hold(lease.id, lease.slot.node, str(lease.slot.device), kind, instance)

    def release(self, leases: Iterable[Lease]) -> None:
        """Return leases, once the devices are empty."""
        self.source.release(self._let_go(leases))

    def _let_go(self, leases: Iterable[Lease]) -> list[str]:
        """End leases in the ledger, and return the ids of those whose slots the run may use again. Slots of lost nodes are released."""
        ending = list(leases)
        for lease in ending:
            lease.wait_until_left()
        held = [lease for lease in ending if self.held.pop(lease.id, None) is not None]
        for lease in held:
            self.ledger.release(lease.id)
        going = self.nodes.known_going() if held else set()
        for lease in held:
            self.node_times.end(lease.slot.node, time.monotonic(), is_lost=lease.slot.node in going)
        self.source.release([lease.id for lease in held if lease.slot.node in going], avoids=True)
        return [lease.id for lease in held if lease.slot.node not in going]

    def withdraw(self, requests: list[SlotRequest]) -> None:
        gone = [request for request in requests if self.pending.pop(request.id, None) is not None]
        self.source.release([id for request in gone for id in {request.id, *request.ids}])

    def release_all(self) -> None:
        """Release everything, at the end of a run."""
        self.withdraw(list(self.pending.values()))
        for lease in self.held.values():
            lease.leaving = None  # the processes are ended
        self.release(list(self.held.values()))
        self.source.close()

    def without_lost(self, leases: list[Lease]) -> list[Lease]:
        """Return the leases whose nodes exist and stay, and release the others.

        Ray moves the placement group of a lost node, so such a lease would be on another node.
        """
        there = {node["NodeID"] for node in self.nodes.present() if node["Alive"]} if leases else set()
        missing = {lease.slot.node for lease in leases} - there  # or added since the last query
        lost = set(self.nodes.find_lost(sorted(missing)))
        gone = lost | (missing & self.nodes.draining())
        for lease in leases:
            if lease.slot.node in lost:
                lease.leaving = None
        self.release([lease for lease in leases if lease.slot.node in gone])
        return [lease for lease in leases if lease.slot.node not in gone]

    # ---- looking ----------------------------------------------------------------------------------------------

    def availability(self) -> str:
        """Describe the cluster's slots and those of this run, for messages."""
        name = next(iter(self.bundle))
        total = ray.cluster_resources().get(name, 0)
        free = ray.available_resources().get(name, 0)
        last_with = ", ".join(filter(None, (lease.holder for lease in self.held.values())))
        own = f"this run holds {len(self.held)}" + (f", last with {last_with}" if last_with else "")
        return f"the cluster has {total:g} {name}, {free:g} free; {own}"

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


def whole_shares(leases: list[Lease], width: int) -> list[list[Lease]]:
    """Divide leases into those of whole instances of `width` slots of a node, for as many instances as they are enough for."""
    if width > 1:  # the same devices form the same instances, in whatever order they come back
        leases = sorted(leases, key=lambda lease: str(lease.slot.device))
    shares: list[list[Lease]] = []
    incomplete: dict[str, list[Lease]] = {}
    for lease in leases:
        share = incomplete.setdefault(lease.slot.node, [])
        share.append(lease)
        if len(share) == width:
            shares.append(incomplete.pop(lease.slot.node))
    return shares


def most_instances(slots: Mapping[str, int], width: int, held: Iterable[Lease] = ()) -> int:
    """Return how many instances these nodes have slots for beside the leases `held`. Each needs `width` slots of one node."""
    room = Counter(slots)
    room.subtract(lease.slot.node for lease in held)
    return sum(max(0, room[node]) // width for node in slots)


def places(slots: dict[str, int], home: str, count: int) -> list[Slot]:
    """Return up to `count` slots for parked processes, on `home` first, at most as many per node as it has slots."""
    nodes = sorted(slots, key=lambda node: node != home)
    return [Slot(node, number) for node in nodes for number in range(slots[node])][:count]
