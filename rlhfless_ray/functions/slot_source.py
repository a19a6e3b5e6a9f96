"""Where slots come from: requests, grants, and Ray's queue as a source. The other source is `pool_client`.

Measured with Ray 2.60: an independent placement group takes 4 ms, but one that needs resources freed at the same instant waits
0.5-0.8 s for Ray's retry interval.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhfless_ray.common.deadlines import STOP

DEVICE_S = 60.0  # timeout for the name of a granted device
RESERVED_S = 2.0  # longest wait until no node reserves a slot for a group that is withdrawn
RETRY_MS, RETRY_GROWTH, MAX_RETRY_MS = 100, 1.5, 1000  # Ray's delays between its attempts to create a group
POOL_PREFIX = "rlhfless-pool-"  # prefix of the names of the shared pool's placement groups


@dataclass(eq=False)
class LeaseRequest:
    """A slot that was requested and may not be granted yet, on a node (any if empty) that has these labels.

    `device`: the only one that is of use, see `SlotSource.grants_devices`.
    """

    id: str
    from_s: float  # wall-clock time before which it was not granted
    node: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    device: int | str | None = None


@dataclass(frozen=True)
class Grant:
    """A granted slot. `id`: of the lease."""

    id: str
    node: str
    device: int | str


class SlotSource(Protocol):
    """A source of slots: Ray's queue, or the pool that the runs of a cluster share.

    `grants_devices`: on GPU, a request that names a device gets no other. Ray's queue grants any device of the node.
    """

    grants_devices: bool

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

    @property
    def surplus_leases(self) -> Collection[str]:
        """Ids of the leases whose slots these runs could use."""
        ...

    def warm_due(self) -> Collection[tuple[str, str]] | None:
        """Nodes and devices to which parked processes of this run are bound, if no other run is entitled to them; None if unknown."""
        ...

    def may_wait(self) -> bool:
        """Return whether a needed slot may still be granted after its deadline."""
        ...

    def close(self) -> None: ...


class RayGroups:
    """Slots as this run's own placement groups, from Ray's queue."""

    grants_devices = False
    surplus, surplus_leases = None, ()

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.groups: dict[str, Any] = {}  # by the id of the request, which is the lease's id
        self.numbers: dict[str, tuple[str, int]] = {}  # on CPU: node and number of each granted slot

    def ask(self, requests: list[LeaseRequest]) -> None:
        for one in requests:
            self.groups[one.id] = request_group(self.resource, f"rlhfless-{one.id}", one.node, one.labels)

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
        for one in requests:
            group, end = self.groups[one.id], time.monotonic() + RESERVED_S
            while is_reserving(placement_group_table(group)) and time.monotonic() < end:
                time.sleep(0.001)
            self.release([one.id])

    def release(self, ids: list[str]) -> None:
        for id in ids:
            self.numbers.pop(id, None)
            remove_placement_group(self.groups.pop(id))

    drop = release

    def others_wait(self) -> bool:
        return others_wait(self.resource, {group.id.hex() for group in self.groups.values()})

    def warm_due(self) -> None:
        return None

    def may_wait(self) -> bool:
        return False

    def close(self) -> None:
        pass


def device_named(id: str | int) -> int | str:
    """Convert Ray's device name, which is an index or the name in the node's CUDA_VISIBLE_DEVICES."""
    name = str(id).strip()
    return int(name) if name.isdecimal() else name


def bundle_of(resource: str) -> dict[str, float]:
    """Return the Ray resources of a slot."""
    return {"GPU": 1} if resource == "gpu" else {"CPU": 1}


def request_group(resource: str, name: str, node: str, labels: Mapping[str, str], lifetime: str | None = None) -> PlacementGroup:
    """Request a placement group of one slot, on a node (any if empty; a condition of Ray's on its id is allowed) with these labels."""
    selector = dict(labels) | ({"ray.io/node-id": node} if node else {})
    selectors = [selector] if selector else None
    return placement_group([bundle_of(resource)], name=name, lifetime=lifetime, bundle_label_selector=selectors)


def is_reserving(info: Mapping[str, Any]) -> bool:
    """Return whether a node may be reserving the slot of a placement group right now. `info`: its entry in Ray's table.

    A group must not be removed meanwhile: Ray 2.60 then loses the slot for good (ray-project/ray#64693; measured: 17 of 60).
    """
    if info["state"] != "PENDING":
        return bool(info["state"] == "PREPARED")
    stats = info["stats"]
    # each failed attempt raises the delay; one that has not failed yet may be under way, until the delay is the longest
    failed_ms = int(min(MAX_RETRY_MS, RETRY_MS * RETRY_GROWTH ** (stats["scheduling_attempt"] - 1)))
    return bool(stats["scheduling_state"] != "INFEASIBLE" and stats["highest_retry_delay_ms"] < failed_ms)


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


def tasks_wait(resource: str) -> bool:
    """Return whether a task or an actor outside of placement groups waits for a slot, as far as `ray status` knows: it lags by a second."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    name = "GPU" if resource == "gpu" else "CPU"
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
