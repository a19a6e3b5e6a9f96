"""Lease slots for a worker group: one per rank, all at once and where their state is, and more for threads."""

from __future__ import annotations

import time

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.worker_pool import ATTEMPT_S, WorkerPool
from rlhfless_ray.learn.recovery import LearnerLost

FREE_S = 0.05  # longest wait for Ray to grant a free slot


class GangScheduler:
    def __init__(self, pool: WorkerPool, broker: SlotBroker, name: str) -> None:
        """`name`: the worker group's name in messages."""
        self.pool, self.broker, self.name = pool, broker, name
        self.ranks = 1  # number of them
        self.wait_s = 0.0  # longest wait for more than one lease a rank, in the next `take`

    def take(self, by_rank: list[Instance], spare: list[Lease], max_leases: int) -> tuple[list[list[Lease]], list[Lease]]:
        """Return the leases of each rank, and those left over. `by_rank`: the ranks' processes, empty before they exist.

        Every rank gets one lease, then up to `max_leases` (threads, on CPU) while slots are free. Ranks cannot use leases of other
        nodes (on GPU: of other devices) than those of their state. A worker group needs all its ranks at once, see
        `LeaseManager.try_again`. Raises LearnerLost if a rank's node is lost, and RunError after the lease deadline.
        """
        leases, start = self.pool.leases, time.monotonic()
        fitting, spare, missing = self.fit(by_rank, spare)
        if missing:  # the run itself may hold them, and Ray would never grant those
            fitting, spare, missing = self.fit(by_rank, [*fitting, *spare, *leases.without_lost(self.broker.reclaim())])
        while missing:
            leases.withdraw(list(leases.pending.values()))  # earlier requests are for later phases
            homes = homes_of(by_rank)
            if gone := leases.nodes.find_lost(homes):
                self.broker.put(leases.without_lost([*fitting, *spare]))
                raise LearnerLost(f"node {gone[0]} is gone")
            leases.release(spare)
            slots = [instance.slot for instance in missing if instance is not None]
            requests = leases.ask_again(slots) if by_rank else leases.ask(len(missing), labels=self.pool.labels)
            fitting, spare, missing = self.fit(by_rank, [*fitting, *leases.collect(requests, self.pool.kind, ATTEMPT_S)])
            if not missing:
                break
            where = " on the nodes and devices that hold its state" if homes else ""
            wanted = f"the {self.name} worker group needs {self.ranks} × {leases.bundle} at once{where}"
            leases.try_again(start, [*fitting, *spare], wanted, 1, self.pool.labels)
            fitting, spare, missing = self.fit(by_rank, [])
        shares = [[lease] for lease in fitting]
        # The first placement groups of a new cluster take Ray longer, and a warm start uses every core.
        patience_s, self.wait_s = max(self.wait_s, 0.05 if by_rank else 2.0), 0.0
        return shares, self._more(shares, spare, max_leases, patience_s)

    def fit(self, by_rank: list[Instance], leases: list[Lease]) -> tuple[list[Lease], list[Lease], list[Instance | None]]:
        """Return a fitting lease for each rank, as far as there are any, the leases left over, and the ranks without one.

        A rank is None while its process does not exist.
        """
        fitting: list[Lease] = []
        missing: list[Instance | None] = []
        left = list(leases)
        ranks: list[Instance | None] = [*by_rank] or [None] * self.ranks
        for instance in ranks:
            fits = self.pool.may_use if instance is None else lambda lease, rank=instance: self.pool.fits(rank, lease.slot)
            lease_for_rank = next(filter(fits, left), None)
            if lease_for_rank is None:
                missing.append(instance)
            else:
                left.remove(lease_for_rank)
                fitting.append(lease_for_rank)
        return fitting, left, missing

    def lease_free(self, by_rank: list[Instance], have: list[Lease]) -> list[Lease]:
        """Lease the slots that the ranks lack where their state is, if all of these are free. `have`: leases that they may take."""
        leases, missing = self.pool.leases, self.fit(by_rank, have)[2]
        slots = [instance.slot for instance in missing if instance is not None]
        nodes = [slot.node for slot in slots]
        if not slots or len(slots) < len(missing) or len(leases.with_room(nodes)) < len(nodes):
            return []
        return leases.collect(leases.ask_again(slots), self.pool.kind, FREE_S)

    def _more(self, shares: list[list[Lease]], spare: list[Lease], max_leases: int, patience_s: float) -> list[Lease]:
        """Add leases of a rank's own node to its share, spare ones first. Returns the leases left over."""
        leases = self.pool.leases

        def add(candidates: list[Lease]) -> list[Lease]:
            left = []
            for lease in candidates:
                here = [share for share in shares if share[0].slot.node == lease.slot.node and len(share) < max_leases]
                min(here, key=len).append(lease) if here else left.append(lease)
            return left

        spare = add(spare)
        wanted = [share[0].slot.node for share in shares for _ in range(max_leases - len(share))]
        if wanted := leases.with_room(wanted):
            add(leases.collect(leases.ask(len(wanted), wanted), self.pool.kind, patience_s))
        return spare


def homes_of(by_rank: list[Instance]) -> list[str]:
    """Return the node of each rank's process; empty before the processes exist."""
    return [instance.slot.node for instance in by_rank]
