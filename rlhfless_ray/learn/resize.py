"""Change the layout of a worker group between steps: ranks that stay keep their processes, and each fetches only what it lacks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhfless_ray.functions.instance import Instance, State
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.recovery import LearnerLost

if TYPE_CHECKING:
    from rlhfless_ray.learn.rank_settings import RankLayout
    from rlhfless_ray.learn.worker_group import WorkerGroup

LEASES_S = 5.0  # longest wait for the slots of further ranks: the planner counts free ones


@dataclass(frozen=True)
class Resharding:
    """What a change of layout took: seconds, bytes that ranks fetched of others, and the least that they had to fetch.

    After a loss all ranks fetch the whole state, which is not counted.
    """

    seconds: float
    fetched_bytes: int
    least_bytes: int

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "learn/reshard_s": self.seconds,
            "learn/reshard_mb": self.fetched_bytes / 2**20,
            "learn/reshard_bound_mb": self.least_bytes / 2**20,
        }


def resize(group: WorkerGroup, layout: RankLayout) -> Resharding | None:
    """Give a worker group that holds its leases another layout. Returns None if it could not be changed.

    The state goes through the object stores of the nodes that hold it. A rank that is lost after the new ranks have their slots makes
    the group start again in the new layout, from the same state, and before that in the old one. If there are no slots for the new
    ranks, the old layout stays.
    """
    began_s = time.monotonic()
    group.weights.wait_until_read()
    state = None if group.name == "reference" else group.snapshot()
    added = _start_ranks(group, layout.ranks - len(group.by_rank))
    if added is None:
        group.recovery.say(f"the {group.name} stays on {group.layout}, because there are no free slots for {layout}")
        return None
    _end_ranks(group, group.by_rank[layout.ranks :])
    group.by_rank += added
    group.set_layout(layout)
    try:
        for instance in added:
            group.wait_until_open(instance)
        replies = group.load_model(state)
    except LearnerLost as lost:
        group.handle_loss(lost)
        group.assign_free_leases()
        return Resharding(time.monotonic() - began_s, 0, 0)
    for instance in added:
        instance.state = State.READY
    fetched, least = (sum(one["fetched"][i] for one in replies) for i in (0, 1))
    return Resharding(time.monotonic() - began_s, fetched, least)


def _start_ranks(group: WorkerGroup, count: int) -> list[Instance] | None:
    """Start so many further ranks under leases of their own. Returns None if there are no slots for them."""
    if count <= 0:
        return []
    pool, broker = group.pool, group.broker
    for instance in group.by_rank:  # the first one of each is for the rank itself, and others for its threads
        broker.put(instance.leases[1:])
        del instance.leases[1:]
    free = pool.leases.without_lost(broker.take())
    free.sort(key=lambda lease: not pool.may_use(lease))
    taken = [lease for lease in free[:count] if pool.may_use(lease)]
    if (missing := count - len(taken)) > 0:
        taken += pool.leases.collect(pool.leases.ask(missing, labels=pool.labels), pool.kind, LEASES_S)
    broker.put([lease for lease in free if lease not in taken])
    if len(taken) < count:
        broker.put(taken)
        return None
    return [pool.assign_leases([lease]) for lease in taken]


def _end_ranks(group: WorkerGroup, leaving: list[Instance]) -> None:
    """End ranks that the new layout lacks, and free their leases. Their state is in the object store."""
    leases: list[Lease] = [lease for instance in leaving for lease in instance.leases]
    for instance in leaving:
        group.pool.end(instance)
    del group.by_rank[len(group.by_rank) - len(leaving) :]
    group.broker.put(leases)
