"""The free leases of a run: held by the run, and not in use by a working process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rlhfless_ray.functions.lease import Lease, LeaseManager

if TYPE_CHECKING:
    from rlhfless_ray.functions.worker_pool import WorkerPool


class LeasedGroup(Protocol):
    """A group of ranks, which takes the leases that it needs and returns the others."""

    def assign_leases(self, spare: list[Lease], /) -> list[Lease]: ...


class SlotBroker:
    """Owns every free lease of a run. Stages take leases from here and put back what they do not use.

    Each lease the run holds is in exactly one place: free in this broker, or with a working instance of one pool. `check`
    asserts that between phases.
    """

    def __init__(self, leases: LeaseManager) -> None:
        self.leases = leases
        self._free: list[Lease] = []
        self._reclaim_idle: Callable[[], list[Lease]] = list

    @property
    def free(self) -> tuple[Lease, ...]:
        """The free leases, in the order in which they were put back."""
        return tuple(self._free)

    # ---- taking and giving back -------------------------------------------------------------------------------

    def take(self, n: int | None = None, prefer: Callable[[Lease], bool] | None = None) -> list[Lease]:
        """Remove up to `n` free leases (default: all), those that `prefer` accepts before others."""
        ordered = self._free if prefer is None else sorted(self._free, key=lambda lease: not prefer(lease))
        taken = ordered[:n]
        gone = {id(lease) for lease in taken}
        self._free = [lease for lease in self._free if id(lease) not in gone]
        return taken

    def put(self, leases: Iterable[Lease]) -> None:
        """Make these leases free."""
        self._free += leases

    def resize(self, pool: WorkerPool, count: int, **how: Any) -> None:
        """Resize `pool` to `count` instances. It uses free leases first; `how`: keyword arguments of `WorkerPool.resize`."""
        self.put(pool.resize(count, self.take(), **how))

    def staff(self, group: LeasedGroup) -> None:
        """Hand free leases to the ranks of `group`. It puts back those it does not use."""
        self.put(group.assign_leases(self.take()))

    def release(self, keep: int = 0, sooner: Collection[str] = ()) -> None:
        """Return free leases to Ray, except for the first `keep`. Those with ids in `sooner` go before others."""
        leases = self.take(prefer=(lambda lease: lease.id not in sooner) if sooner else None)
        self.put(leases[:keep])
        self.leases.release(leases[keep:])

    # ---- leases of instances that wait for work ---------------------------------------------------------------

    def lend_idle(self, reclaim: Callable[[], list[Lease]]) -> None:
        """Register `reclaim`, which parks instances that hold leases but have no work yet, and returns their leases.

        It is called at most once. It replaces a function registered before.
        """
        self._reclaim_idle = reclaim

    def keep_idle(self) -> None:
        """End the registration: those instances have work now."""
        self._reclaim_idle = list

    def reclaim(self) -> list[Lease]:
        """Take every free lease, and those of idle instances. Ray would never grant what the run itself holds."""
        reclaim, self._reclaim_idle = self._reclaim_idle, list
        return [*self.take(), *reclaim()]

    @contextmanager
    def lending(self, reclaim: Callable[[], list[Lease]]) -> Iterator[None]:
        """Inside the block, `reclaim` may be called too: after the function that is registered, and at most once."""
        before = self._reclaim_idle
        both = self._reclaim_idle = lambda: [*before(), *reclaim()]
        try:
            yield
        finally:
            if self._reclaim_idle is both:
                self._reclaim_idle = before

    # ---- the invariant ----------------------------------------------------------------------------------------

    def check(self, where: str, pools: Iterable[WorkerPool]) -> None:
        """Check that no lease is lost. `where`: the phase that has just ended.

        Raises AssertionError, naming the lease, unless each held lease is either free or held by one working instance of `pools`, and
        each pending request is one that a pool expects.
        """
        pools = list(pools)
        owners: dict[str, list[str]] = {}
        for lease in self._free:
            owners.setdefault(lease.id, []).append("free")
        for pool in pools:
            for instance in pool.working:
                for lease in instance.leases:
                    owners.setdefault(lease.id, []).append(instance.id)
        wrong = []
        for id, lease in self.leases.held.items():
            if id not in owners:
                last = f", last with {lease.holder}" if lease.holder else ""
                wrong.append(f"lease {id} (slot {lease.slot.device} of node {lease.slot.node}{last}) is lost: neither free nor working")
        for id, holders in owners.items():
            if len(holders) > 1:
                wrong.append(f"lease {id} has {len(holders)} owners: {', '.join(holders)}")
            if id not in self.leases.held:
                wrong.append(f"lease {id} of {holders[0]} was released already")
        expected = {request.id for pool in pools for request in pool.expected}
        wrong += [f"no pool waits for the requested lease {id}" for id in self.leases.pending if id not in expected]
        if wrong:
            raise AssertionError(f"leases after {where}: {'; '.join(wrong)}")
