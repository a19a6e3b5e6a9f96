"""The pause of a rollout whose engines take an update's weights."""

from __future__ import annotations

import time

from rlhfless_ray.functions.lease import LeaseManager


class Pause:
    """What a rollout loses between its part beside an update and the rest, under the update's weights, without waits for slots."""

    def __init__(self, leases: LeaseManager, plan_s: float) -> None:
        """`plan_s`: time of planning the rest."""
        self.leases, self.seconds, self.since_s = leases, plan_s, 0.0

    def begin_phase(self) -> None:
        """Note that the rest's phase begins."""
        self.since_s = self._working_s()

    def end(self) -> None:
        """Note that the rest is generated from now on."""
        self.seconds += self._working_s() - self.since_s

    def _working_s(self) -> float:
        """Return the time on a clock that stops while the step waits for slots."""
        return time.monotonic() - self.leases.waited_s
