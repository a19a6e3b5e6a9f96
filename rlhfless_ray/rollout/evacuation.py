"""Move requests off engines whose nodes are drained."""

from __future__ import annotations

from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.worker_pool import GRANT_S
from rlhfless_ray.rollout.events import Event, RolloutProgress
from rlhfless_ray.rollout.live_rollout import Plugin


class Evacuation(Plugin):
    """If all engines are on drained nodes, a new engine is started while they still work. An engine leaves once it has no request left."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress) and not self.rollout.stopping:
            self.evacuate()

    def evacuate(self) -> None:
        """Look for drained nodes, and move the requests of their engines."""
        rollout, pool, calls = self.rollout, self.rollout.pool, self.rollout.calls
        calls.draining = pool.leases.nodes.draining()
        if not calls.draining:
            return
        leaving = [instance for instance in pool.working if instance.slot.node in calls.draining]
        if not leaving:
            return
        if len(leaving) == len(pool.working):
            took = pool.lease_one(need=False, wait_s=GRANT_S)
            if took := pool.leases.without_lost(took):
                rollout.join(took)
        rollout.evacuate(leaving, calls.staying(), "the node is drained")

    def take(self, number: int, instance: Instance) -> bool:
        if instance.slot.node not in self.rollout.calls.draining:
            return False
        self.rollout.pool.leave(instance)
        return True
