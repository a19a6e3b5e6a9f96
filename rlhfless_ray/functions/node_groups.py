"""Placement groups behind a pool's slots: what the pool asks of Ray, what Ray has granted, and what goes back.

On GPU a group has slots of one node, as many as runs lack there at that moment: 512 devices are tens of groups. One process names the
devices of a group together. Ray gets a group back when none of its slots is used. On CPU each slot is a group of its own, so that a core
goes back alone: other programs need single cores, and a core needs no process to name it.

Measured with Ray 2.60: an independent placement group takes 4 ms, but one that needs resources freed at the same instant waits
0.5-0.8 s for Ray's retry interval.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.pool_messages import NODE_LABEL, PoolSlot, SlotRequest
from rlhfless_ray.functions.pool_state import PoolState

NAMING_S = 20.0  # timeout for the names of a group's devices: starting a process for it takes 5 s on busy cores
RESERVED_S = 2.0  # longest wait until no node reserves a slot for a group that is withdrawn
RETRY_MS, RETRY_GROWTH, MAX_RETRY_MS = 100, 1.5, 1000  # Ray's delays between its attempts to create a group
POLL_S = (0.002, 0.05)  # shortest and longest pause between two looks at a placement group that Ray has not granted yet
LOOKS_PER_S = 200  # largest total number of such looks per second, because the pool answers no run during a look
PLAN_S = 0.25  # a group of several slots that Ray has not granted for this long is planned again
POOL_PREFIX = "rlhfless-pool-"  # prefix of the names of the shared pool's placement groups
Place = tuple[str, tuple[tuple[str, str], ...]]  # node (any if empty; a condition of Ray's on its id is allowed) and labels


@dataclass(eq=False)
class NodeGroup:
    """A placement group whose slots are not in the pool yet."""

    name: str
    ref: PlacementGroup
    place: Place
    count: int
    asked_s: float
    absent_s: float = 0.0  # wall-clock time before which Ray had not granted it
    node: str = ""  # once Ray has granted it
    naming: Future[list[str]] | None = None
    naming_s: float = 0.0
    pause_s: float = POLL_S[0]
    look_s: float = 0.0

    @property
    def at(self) -> str:
        return self.node or self.place[0]

    def may_serve(self, request: SlotRequest, place: Place, state: PoolState) -> bool:
        return self.place == place or (self.at in state.nodes and state.may_use(request, self.at))


class NodeGroups:
    """The groups that a pool has asked for. It has no thread: each `advance` looks how far they are."""

    def __init__(self, resource: str, prefix: str, *, is_shared: bool, is_bundled: bool) -> None:
        """`prefix`: of their names. `is_shared`: whether they outlive this process. `is_bundled`: whether a group has several slots."""
        self.resource, self.prefix, self.is_shared, self.is_bundled = resource, prefix, is_shared, is_bundled
        self.asked: list[NodeGroup] = []
        self.leaving: list[tuple[PlacementGroup, float]] = []  # withdrawn, and removed at the latest at that time
        self.first_number: Callable[[str], int] = lambda node: 0  # on CPU: of the slots of a node
        self.counter = 0

    @property
    def is_naming(self) -> bool:
        return any(group.naming is not None for group in self.asked)

    def pause_s(self, now_s: float) -> float:
        """Return how long nothing is to be looked at."""
        shortest, longest = POLL_S
        if self.leaving or self.is_naming:
            return shortest
        return min(max(shortest, min((group.look_s - now_s for group in self.asked), default=longest)), longest)

    def advance(self, state: PoolState, now_s: float) -> None:
        """Put the slots of granted groups into the pool, and remove withdrawn groups once no node reserves a slot for them."""
        for group in list(self.asked):
            if group.naming is not None or now_s >= group.look_s:
                self._advance(group, state, now_s)
        for ref, until_s in list(self.leaving):
            if now_s >= until_s or not is_reserving(placement_group_table(ref)):
                remove_placement_group(ref)
                self.leaving.remove((ref, until_s))

    def _advance(self, group: NodeGroup, state: PoolState, now_s: float) -> None:
        """Look whether Ray has granted a group, and whether its devices are named.

        A granted group is not removed before that: Ray 2.60 never answers a task of a removed one (measured), and devices of a node are
        named in turn. Otherwise Ray starts a process for each: 8 took 0.6 to 3 s instead of 0.1 s.
        """
        if not group.node:
            looked_s, table = time.time(), placement_group_table(group.ref)
            if table["state"] != "CREATED":
                group.absent_s = looked_s
                group.look_s = now_s + max(group.pause_s, len(self.asked) / LOOKS_PER_S)
                group.pause_s = min(POLL_S[1], 1.5 * group.pause_s)
                return
            group.node = table["bundles_to_node_id"][0]
        taken = {slot.device for slot in state.slots.values() if slot.node == group.node}
        if self.resource == "cpu":
            first = self.first_number(group.node)
            devices: list[int | str] = list(itertools.islice((n for n in itertools.count(first) if n not in taken), group.count))
        elif group.naming is None:
            if not any(other.naming is not None and other.node == group.node for other in self.asked):
                group.naming, group.naming_s = name_devices(group.ref, group.count), now_s
            return
        elif not group.naming.done() and now_s - group.naming_s < NAMING_S:
            return
        else:
            try:
                devices = [device_named(name) for name in group.naming.result(timeout=0)]
            except (RayError, TimeoutError):  # its node was lost before, or the process hangs: the pool asks for others
                devices = []
                remove_placement_group(group.ref)
        self.asked.remove(group)
        for number, device in enumerate(device for device in devices if device not in taken):
            state.put(PoolSlot(f"{group.name}.{number}", group.node, device, group.ref, granted_s=group.absent_s), now_s)

    def ask(self, state: PoolState, now_s: float) -> None:
        """Ask Ray for the slots that requests lack, and withdraw groups that are not needed any more.

        A group of several slots that Ray has not granted for PLAN_S is planned again: its node may be full, or others free by now.
        """
        lacking = [request for request in state.requests.values() if not state.has_device(request)]
        known = [group for group in self.asked if group.node or group.count == 1 or now_s - group.asked_s < PLAN_S]
        idle, left = Counter(slot.node for slot in state.free), {group: group.count for group in known}
        covered: dict[str, NodeGroup] = {}  # by request id
        for request in lacking:
            place = _place_of(request, state)
            fitting = [
                group for group in left if left[group] >= _missing(request, group.at, idle) and group.may_serve(request, place, state)
            ]
            if group := min(fitting, key=lambda group: group.place != place, default=None):
                missing = _missing(request, group.at, idle)
                idle[group.at] -= request.width - missing
                left[group] -= missing
                covered[request.id] = group
        for group in [group for group in known if left[group] and not group.node]:
            self._withdraw(group, now_s)
        wanted = self._plan([one for one in lacking if covered.get(one.id) not in self.asked], state, idle)
        for group in [group for group in self.asked if group not in left]:
            if (group.place, group.count) in wanted:
                wanted.remove((group.place, group.count))  # it is still the best
                group.asked_s = now_s
            else:
                self._withdraw(group, now_s)
        for place, count in wanted:
            self.counter += 1
            name = f"{self.prefix}{self.counter}"
            absent_s, ref = time.time(), request_group(self.resource, count, name, place, "detached" if self.is_shared else None)
            self.asked.append(NodeGroup(name, ref, place, count, now_s, absent_s))

    def _plan(self, lacking: list[SlotRequest], state: PoolState, idle: Counter[str]) -> list[tuple[Place, int]]:
        """Return the places and sizes of groups for these requests.

        Several slots of a node are asked for only if Ray says that they are free. What is free nowhere waits in Ray's queue. `idle`: slots
        of the pool by node, which several slots of a request may include.
        """
        plans_nodes = bool(lacking) and (self.is_bundled or any(request.width > 1 for request in lacking))
        free = Counter(free_slots(self.resource) if plans_nodes else {})
        together, apart = Counter[Place](), list[tuple[Place, int]]()
        for request in lacking:
            place, missing, is_free = _place_of(request, state), request.width, False
            nodes = [node for node in state.nodes if state.may_use(request, node) and free[node] >= _missing(request, node, idle)]
            if nodes and plans_nodes and (self.is_bundled or request.width > 1):
                node = max(nodes, key=lambda node: (-_missing(request, node, idle), together[node, ()] > 0, free[node]))
                place, missing, is_free = (node, ()), _missing(request, node, idle), True
                idle[node] -= request.width - missing
                free[node] -= missing
            if self.is_bundled and (is_free or request.width == 1):
                together[place] += missing
            else:
                apart.append((place, missing))
        most = max((count for count, _ in state.nodes.values()), default=1)
        return apart + [(place, min(most, count - begun)) for place, count in together.items() for begun in range(0, count, most)]

    def _withdraw(self, group: NodeGroup, now_s: float) -> None:
        self.asked.remove(group)
        self.leaving.append((group.ref, now_s + RESERVED_S))

    def give_back(self, state: PoolState, idle: Iterable[PoolSlot], now_s: float) -> None:
        """Return the groups to Ray of which every slot is among `idle`."""
        returned = {slot.id: slot for slot in idle}
        used = {slot.group for slot in state.slots.values() if slot.id not in returned}
        for slot in returned.values():
            if slot.group not in used:
                state.drop(slot.id, now_s)
        for ref in {slot.group for slot in returned.values()} - used:
            remove_placement_group(ref)

    def remove_all(self, state: PoolState, now_s: float) -> None:
        self.give_back(state, list(state.slots.values()), now_s)
        for group in self.asked:
            remove_placement_group(group.ref)
        self.asked.clear()


def _place_of(request: SlotRequest, state: PoolState) -> Place:
    avoided = state.runs[request.run].avoids
    return request.node or (f"!in({','.join(sorted(avoided))})" if avoided else ""), tuple(sorted(request.labels.items()))


def _missing(request: SlotRequest, node: str, idle: Mapping[str, int]) -> int:
    """Return how many slots of a node a request lacks beside the pool's idle ones."""
    return request.width - min(idle[node], request.width - 1)


def request_group(resource: str, count: int, name: str, place: Place, lifetime: str | None = None) -> PlacementGroup:
    """Request a placement group of `count` slots of one node. They are one bundle, so that one task can name its devices."""
    node, labels = place
    selector = ({NODE_LABEL: node} if node else {}) | dict(labels)
    if node and not node.startswith("!"):  # it meets the conditions
        selector[NODE_LABEL] = node
    bundle = {name: count * amount for name, amount in bundle_of(resource).items()}
    return placement_group([bundle], name=name, lifetime=lifetime, bundle_label_selector=[selector] if selector else None)


def free_slots(resource: str) -> dict[str, int]:
    """Return {node id: slots} that are in no placement group and no other program's use, as far as Ray's head knows."""
    from ray._private.state import available_resources_per_node

    name = next(iter(bundle_of(resource)))
    return {node: int(free.get(name, 0)) for node, free in available_resources_per_node().items()}


def name_devices(group: PlacementGroup, count: int) -> Future[list[str]]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    named: Future[list[str]] = device_ids.options(num_gpus=count, scheduling_strategy=strategy, max_retries=0).remote().future()
    return named


def device_named(id: str | int) -> int | str:
    """Convert Ray's device name, which is an index or the name in the node's CUDA_VISIBLE_DEVICES."""
    name = str(id).strip()
    return int(name) if name.isdecimal() else name


def bundle_of(resource: str) -> dict[str, float]:
    """Return the Ray resources of a slot."""
    return {"GPU": 1} if resource == "gpu" else {"CPU": 1}


def is_reserving(info: JsonObject) -> bool:
    """Return whether a node may be reserving the slots of a placement group right now. `info`: its entry in Ray's table.

    A group must not be removed meanwhile: Ray 2.60 then loses the slots for good (ray-project/ray#64693; measured: 17 of 60).
    """
    if info["state"] != "PENDING":
        return bool(info["state"] == "PREPARED")
    stats = info["stats"]
    # each failed attempt raises the delay; one that has not failed yet may be under way, until the delay is the longest
    failed_ms = int(min(MAX_RETRY_MS, RETRY_MS * RETRY_GROWTH ** (stats["scheduling_attempt"] - 1)))
    return bool(stats["scheduling_state"] != "INFEASIBLE" and stats["highest_retry_delay_ms"] < failed_ms)


def others_wait(resource: str, prefix: str) -> bool:
    """Return whether a pending placement group of another program could use a slot: its name has neither prefix of a pool's groups."""
    name = next(iter(bundle_of(resource)))
    return any(
        info["state"] == "PENDING"
        and not info["name"].startswith((POOL_PREFIX, prefix))
        and any(name in bundle for bundle in info["bundles"].values())
        for info in placement_group_table().values()
    )


def tasks_wait(resource: str) -> bool:
    """Return whether a task or an actor outside of placement groups waits for a slot, as far as `ray status` knows: it lags by a second."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    name = next(iter(bundle_of(resource)))
    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=1)
    except RayError:
        return False
    waiting = status.resource_demands.ray_task_actor_demand
    return any(name in bundle.bundle for demand in waiting for bundle in demand.bundles_by_count)


# max_calls=0: otherwise Ray ends a GPU task's process after each call, and the next call has to start one
@ray.remote(num_cpus=0, num_gpus=1, max_calls=0)
def device_ids() -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
