"""Take free slots during a rollout, in a run that shares no pool: nodes may join, and engines may have been lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rlhfless_ray.rollout.events import Event, RolloutProgress
from rlhfless_ray.rollout.live_rollout import Plugin

GRANT_S = 0.5  # wait for a slot that is free: Ray may take as long to grant one on a new node
LOOK_S = 1.0  # interval of looks, that of lists of nodes
LOOKING_SHARE = 0.02  # largest share of the driver's time for looks


class JoinedSlots(Plugin):
    """Start further engines while the rest of the rollout pays for it. Moves send them requests."""

    def __init__(self, count: Callable[[np.ndarray, np.ndarray], int]) -> None:
        """`count`: returns how many engines are best for the rest, from the tokens left and those of the contexts of live responses."""
        self.count, self.look_at_s = count, time.monotonic() + LOOK_S

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress) and not self.rollout.stopping and time.monotonic() >= self.look_at_s:
            began_s, has_joined = time.monotonic(), self._look()
            now = time.monotonic()
            self.look_at_s = now + (LOOK_S if has_joined else max(LOOK_S, (now - began_s) / LOOKING_SHARE))

    def _look(self) -> bool:
        """Start the engines for which there are slots. Returns whether there were any."""
        rollout, pool, joined = self.rollout, self.rollout.pool, 0
        if not pool.working or rollout.tail_s() <= 2 * rollout.start_s or not pool.leases.source.room(pool.width):
            return False
        staying = sum(instance.slot.node not in rollout.calls.draining for instance in pool.working)
        for _ in range(self.count(*rollout.remaining()) - staying):
            if not (leases := pool.leases.without_lost(pool.lease_one(need=False, wait_s=GRANT_S))):
                break
            rollout.join(leases)
            joined += 1
        rollout.result.exchanged["rollout/joined"] += joined
        return joined > 0
