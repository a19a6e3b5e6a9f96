"""Staff the engines of a plan pool by pool, before whatever slots there are make up for those that a pool has not granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from placement.scaling.engine_assignment import assign_engines
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.pool_messages import SlotRequest
from rlhfless_ray.functions.worker_pool import WorkerPool


def lacking(pool: WorkerPool, planned: Iterable[str]) -> Counter[str]:
    """Return how many engines the plan wants in each pool beside those that work there. `planned`: the pool of each engine."""
    working = Counter(pool.leases.pools.pool_of(instance.slot.node).name for instance in pool.working)
    return Counter(planned) - working


def planned_leases(pool: WorkerPool, leases: Iterable[Lease], planned: Iterable[str]) -> list[Lease]:
    """Return those of the leases that engines lack in the pools of the plan."""
    room = Counter({name: count * pool.width for name, count in lacking(pool, planned).items()})
    taken = []
    for lease in leases:
        name = pool.leases.pools.pool_of(lease.slot.node).name
        if room[name] > 0:
            room[name] -= 1
            taken.append(lease)
    return taken


def staff_pools(
    pool: WorkerPool, free: list[Lease], planned: tuple[str, ...], wait_s: float, begin: Callable[[Instance], None]
) -> list[Lease]:
    """Let engines work in the pools of a plan, as far as slots are granted within `wait_s` each. Returns the free leases that are left.

    Free leases are used first, then slots where engines are parked. `begin`: called with each engine as soon as it has its leases.
    """
    leases = pool.leases
    leases.withdraw([one for one in pool.expected if one.id in leases.pending])
    pool.expected = []
    free = leases.without_lost(free)
    used = planned_leases(pool, free, planned)
    others = [lease for lease in free if lease not in used]
    left = pool.begin(len(planned), used, begin)
    asked: list[SlotRequest] = []
    for name, count in lacking(pool, planned).items():
        labels = leases.pools.labels_of(name)
        parked = [instance.slot.node for instance in pool.parked if leases.pools.pool_of(instance.slot.node).name == name]
        first = leases.ask_preferred(count, parked, labels, pool.width)
        asked += [*first, *leases.ask(count - len(first), labels=labels, width=pool.width)]
    leases.collect(asked, pool.kind, wait_s, use=lambda granted: begin(pool.assign_leases(granted)))
    return [*others, *left]


def order_in_pools(pool: WorkerPool, planned: tuple[str, ...], work_s: np.ndarray, overhead_s: np.ndarray) -> list[int]:
    """Return the engine of each share, of the pool for which the plan has it, or nothing if a pool has fewer engines than that.

    `work_s`, `overhead_s`: see `assign_engines`.
    """
    names = [pool.leases.pools.pool_of(instance.slot.node).name for instance in pool.working]
    if len(planned) != len(work_s) or Counter(planned) - Counter(names):
        return []
    order = [0] * len(planned)
    for name in set(planned):
        shares, engines = ([number for number, of in enumerate(every) if of == name] for every in (planned, names))
        for share, engine in zip(shares, assign_engines(work_s[shares], overhead_s[engines]), strict=True):
            order[share] = engines[engine]
    return order
