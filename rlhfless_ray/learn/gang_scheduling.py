"""The leases of a gang: one for each of its ranks, all at once and where their state is, and more for threads."""

from __future__ import annotations

import random
import time

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.recovery import LearnerLost

ATTEMPT_S = 5.0  # two gangs that each hold half of what both need let go after this long


class GangScheduler:
    def __init__(self, pool: WorkerPool, ranks: int, broker: SlotBroker, name: str) -> None:
        """`name`: of the gang, in messages."""
        self.pool, self.ranks, self.broker, self.name = pool, ranks, broker, name

    def take(self, by_rank: list[Instance], spare: list[Lease], most: int) -> tuple[list[list[Lease]], list[Lease]]:
        """(leases of each rank, those left over): one each, then up to `most` (threads, on CPU) as far as they are free.
        `by_rank`: the ranks' processes, empty before they exist.

        Ranks stay where their state is: a lease of another node (on GPU: of another device) is of no use to them. A gang
        needs all its ranks at once. On a shared cluster another gang may hold what is missing here while it waits for what
        is held here: after a few seconds everything is let go, and asked for again at a random moment. Raises LearnerLost
        when a rank's node is gone, and RunError past the lease deadline.
        """
        leases, start = self.pool.leases, time.monotonic()
        own, spare = self.own(by_rank, spare)
        if len(own) < self.ranks:  # Ray would never grant what the run itself holds
            own, spare = self.own(by_rank, [*own, *spare, *leases.living(self.broker.reclaim())])
        while missing := self.ranks - len(own):
            leases.withdraw(list(leases.asked.values()))  # what was asked for ahead is for those that come after it
            homes = homes_of(by_rank)
            if gone := leases.gone(homes):
                self.broker.put(leases.living([*own, *spare]))
                raise LearnerLost(f"node {gone[0]} is gone")
            leases.release([lease for lease in spare if homes and lease.slot.node not in homes])
            spare = [lease for lease in spare if not homes or lease.slot.node in homes]  # on GPU: of the wrong device, so far
            asked = leases.ask(missing, homes_of(by_rank, own))
            got = leases.collect(asked, self.pool.kind, ATTEMPT_S)
            own, spare = self.own(by_rank, [*own, *spare, *got])
            late = time.monotonic() - start > leases.deadline_s
            if len(own) == self.ranks or (len(got) == missing and not late):
                continue  # or all that was asked for came, but on GPU not yet the device
            leases.release([*own, *spare])
            own, spare = [], []
            if late:
                where = " on the nodes and devices that hold its state" if homes else ""
                raise RunError(
                    f"the {self.name} gang needs {self.ranks} × {leases.bundle} at once{where} and did not get them within "
                    f"{leases.deadline_s:.0f} s; {leases.availability()}"
                )
            STOP.check()
            time.sleep(random.uniform(0.2, 1.0))
        shares = [[lease] for lease in own]
        # The first groups of a fresh cluster take Ray longer, and a warm start is worth every core.
        return shares, self._more(shares, spare, most, patience_s=0.05 if by_rank else 2.0)

    def own(self, by_rank: list[Instance], leases: list[Lease]) -> tuple[list[Lease], list[Lease]]:
        """One lease for each rank, as far as there are fitting ones, and the leases left over."""
        own: list[Lease] = []
        left = list(leases)
        ranks: list[Instance | None] = [*by_rank] or [None] * self.ranks
        for instance in ranks:
            found = next((lease for lease in left if instance is None or self.pool.fits(instance, lease.slot)), None)
            if found is not None:
                left.remove(found)
                own.append(found)
        return own, left

    def _more(self, shares: list[list[Lease]], spare: list[Lease], most: int, patience_s: float) -> list[Lease]:
        """Add leases of a rank's own node to its share, from the spare ones first; returns those that are left."""
        leases = self.pool.leases

        def add(found: list[Lease]) -> list[Lease]:
            left = []
            for lease in found:
                here = [share for share in shares if share[0].slot.node == lease.slot.node and len(share) < most]
                min(here, key=len).append(lease) if here else left.append(lease)
            return left

        spare = add(spare)
        wanted = [share[0].slot.node for share in shares for _ in range(most - len(share))]
        if wanted := leases.with_room(wanted):
            add(leases.collect(leases.ask(len(wanted), wanted), self.pool.kind, patience_s))
        return spare


def homes_of(by_rank: list[Instance], own: list[Lease] | tuple[()] = ()) -> list[str]:
    """The nodes of the ranks' processes, one entry a rank, without those that `own` serves; empty before they exist."""
    homes = [instance.slot.node for instance in by_rank]
    for lease in own if homes else ():
        homes.remove(lease.slot.node)
    return homes
