"""Move requests between engines as the migration policy decides."""

from __future__ import annotations

import math
import time

from rlhfless_ray.rollout.events import Event, RolloutProgress, TokensArrived
from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.rollout.migration_policy import MigrationPolicy

DECIDING_SHARE = 0.02  # largest share of the driver's time for decisions about moves


class Migration(Plugin):
    """Ask a policy for moves, one decision at a time: never while a request is between two engines."""

    def __init__(self, policy: MigrationPolicy, start_s: float = math.inf) -> None:
        """`start_s`: expected start time of a new engine."""
        self.policy, self.start_s = policy, start_s

    def begin(self, rollout: LiveRollout) -> None:
        super().begin(rollout)
        rollout.migrations.choose_methods, rollout.start_s = self.policy.choose_methods, self.start_s
        self.decide_at_s = 0.0

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokensArrived):
            for moved in event.moved:
                self.policy.observe(moved.context_tokens, moved.pause_s, moved.how)
        elif isinstance(event, RolloutProgress):
            self._decide()

    def _decide(self) -> None:
        rollout, began_s = self.rollout, time.monotonic()
        if rollout.stopping or rollout.migrations.leaving or not rollout.calls.running or began_s < self.decide_at_s:
            return
        decided = self.policy.decide(rollout.token_log, rollout.calls.staying(), rollout.result.steps)
        now = time.monotonic()
        self.decide_at_s = now + max(rollout.settings.interval_s, (now - began_s) / DECIDING_SHARE)
        if not decided.moves:
            return
        if decided.time_saved_s <= 0 and rollout.decide_lease().action != "Release":
            return  # the move only saves leases, and these would be held for the next phase
        rollout.result.decisions.append(f"{sum(len(move.requests) for move in decided.moves)} moved: {decided.reason}")
        for move in decided.moves:
            rollout.migrations.start(move)
