"""A cluster without Ray: it grants placement groups at once where their slots are free, and names devices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from rlhfless_ray.functions import node_groups, pool_client, pool_core, slot_pool
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.slot_pool import SlotPool


class FakeRay:
    """`nodes`: slots and labels by node id."""

    def __init__(self, nodes: Mapping[str, tuple[int, dict[str, str]]], resource: str = "gpu") -> None:
        self.nodes, self.resource = dict(nodes), resource
        self.groups: dict[str, dict[str, Any]] = {}  # by name
        self.taken: dict[str, tuple[str, list[int]]] = {}  # node and devices of each granted group
        self.busy: dict[str, set[int]] = {node: set() for node in nodes}  # devices of other programs
        self.asked = self.named = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(node_groups, "placement_group", self.ask)
        patch.setattr(node_groups, "free_slots", lambda resource: {node: len(self.free(node)) for node in self.nodes})
        patch.setattr(node_groups, "name_devices", self.name)
        for module in (node_groups, slot_pool):
            patch.setattr(module, "placement_group_table", self.table)
        for module in (node_groups, pool_core, slot_pool):
            patch.setattr(module, "remove_placement_group", self.remove)
        patch.setattr(pool_core, "ray", SimpleNamespace(nodes=self.list))
        patch.setattr(
            slot_pool, "ray", SimpleNamespace(kill=lambda *_, **__: None, get_runtime_context=lambda: SimpleNamespace(current_actor=None))
        )
        patch.setattr(slot_pool, "load_costs", lambda resource: None)
        patch.setattr(slot_pool, "save_costs", lambda *_: None)
        patch.setattr(slot_pool, "tasks_wait", lambda resource: False)
        patch.setattr(pool_client, "ray", SimpleNamespace(get=get))

    def list(self) -> list[dict[str, Any]]:
        name = "GPU" if self.resource == "gpu" else "CPU"
        return [{"NodeID": id, "Alive": True, "Resources": {name: count}, "Labels": labels} for id, (count, labels) in self.nodes.items()]

    def free(self, node: str) -> list[int]:
        used = self.busy[node].union(*(devices for where, devices in self.taken.values() if where == node))
        return [device for device in range(self.nodes[node][0]) if device not in used]

    def ask(self, bundles: list[dict[str, float]], name: str, lifetime: str | None = None, bundle_label_selector: Any = None) -> str:
        self.asked += 1
        self.groups[name] = {"name": name, "state": "PENDING", "bundles": dict(enumerate(bundles)), "selector": bundle_label_selector}
        self.groups[name]["stats"] = {"scheduling_attempt": 1, "highest_retry_delay_ms": 100.0, "scheduling_state": "NO_RESOURCES"}
        return name

    def table(self, group: str | None = None) -> dict[str, Any]:
        if group is None:
            return self.groups
        info = self.groups[group]
        [bundle], [selector] = info["bundles"].values(), info["selector"] or [{}]
        for node in self.nodes if info["state"] == "PENDING" else ():
            free, count = self.free(node), int(sum(bundle.values()))
            labels = self.nodes[node][1] | {"ray.io/node-id": node}
            if len(free) >= count and all(_has(labels.get(name), wanted) for name, wanted in selector.items()):
                self.taken[group] = node, free[:count]
                info |= {"state": "CREATED", "bundles_to_node_id": {0: node}}
                break
        return info

    def name(self, group: str, count: int) -> Future[list[str]]:
        self.named += 1
        named: Future[list[str]] = Future()
        named.set_result([str(device) for device in self.taken[group][1]])
        return named

    def remove(self, group: str) -> None:
        self.groups[group]["state"] = "REMOVED"
        self.taken.pop(group, None)

    def lose(self, node: str) -> None:
        del self.nodes[node]

    def alive(self) -> list[str]:
        return [name for name, info in self.groups.items() if info["state"] != "REMOVED"]


def _has(value: str | None, wanted: str) -> bool:
    if wanted.startswith("!in("):
        return value not in wanted[4:-1].split(",")
    return value == wanted


def get(reply: Future[Any], timeout: float) -> Any:
    try:
        return reply.result(timeout)
    except TimeoutError as error:
        raise GetTimeoutError from error


class ActorOnThread:
    """The pool's actor on an event loop of this process, called as Ray calls it."""

    def __init__(self, resource: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def make() -> SlotPool:
            return SlotPool(resource)

        self.pool: SlotPool = asyncio.run_coroutine_threadsafe(make(), self.loop).result(10)

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self.pool, name)
        return SimpleNamespace(remote=lambda *args, **named: asyncio.run_coroutine_threadsafe(method(*args, **named), self.loop))

    def stop(self) -> None:
        async def end() -> None:
            for task in self.pool.tasks:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def client_on(actor: ActorOnThread, run: str, **info: Any) -> PoolClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolClient, "_find", lambda self: actor)
        return PoolClient(actor.pool.resource, RunInfo(run, folder=run, **info))
