"""Slots of one node that are granted at once, without Ray."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from rlhfless_ray.functions.lease import Lease, Slot


class FakeSlots:
    """A slot is a lease's as long as it is held. The lowest free ones are granted first."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.held: dict[str, Lease] = {}
        self.numbers = itertools.count()
        self.nodes = SimpleNamespace(slots=lambda labels: {"here": count})

    def grant(self, count: int) -> list[Lease]:
        """Return leases of so many slots, or of those that are free."""
        new = [Lease(f"run-{next(self.numbers)}", Slot("here", device)) for device in self.free[:count]]
        del self.free[:count]
        self.held |= {lease.id: lease for lease in new}
        return new

    def release(self, leases: list[Lease]) -> None:
        for lease in leases:
            del self.held[lease.id]
            self.free.append(int(lease.slot.device))
