"""Take slots from the cluster's shared pool during a rollout, and give slots to other runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import ray

from placement.scaling.resize_policy import Release
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.slot_source import LeaseRequest
from rlhfless_ray.rollout.engine_calls import Ref
from rlhfless_ray.rollout.events import Event, RolloutProgress
from rlhfless_ray.rollout.live_rollout import Plugin

RENEW_S = 1.0  # interval of bids, that of heartbeats
BIDDING_SHARE = 0.02  # largest share of the driver's time for bids
PAUSE_S = 1.0  # time between two decisions to give slots, until the pool knows of the last one
GIVEN = Release(0, "another run of the cluster waits for its slot")


class SharedSlots(Plugin):
    """Exchange slots with other runs during a rollout.

    The rollout grows when another run releases a slot, and shrinks when another run waits for its own. Requests move between engines.
    The bid follows what is left to do, so that a tail leaves its slots to others.
    """

    def __init__(
        self,
        leases: LeaseManager,
        source: PoolClient,
        max_engines: int,
        start_s: float,
        renew: Callable[[np.ndarray, np.ndarray, int, int], int],
    ) -> None:
        """Configure the exchange.

        `max_engines`: maximum number of engines, of one slot each. `start_s`: time until a warm engine works on a slot. `renew`: bids for
        the rest of the rollout, and returns how many engines have work. See `Autoscaler.renew_rollout`.
        """
        self.leases, self.source, self.max_engines, self.start_s, self.renew = leases, source, max_engines, start_s, renew
        self.renew_at_s = time.monotonic() + RENEW_S
        self.request: LeaseRequest | None = None
        self.answer: Ref | None = None  # resolves when the request is granted
        self.leaving: set[int] = set()  # engines that give up their slots
        self.look_again_s = 0.0

    def refs(self) -> list[Ref]:
        return [] if self.answer is None else [self.answer]

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress):
            self.poll()

    def take(self, number: int, instance: Instance) -> bool:
        if number in self.leaving:
            self.rollout.settings.give_back(instance, GIVEN)
        return number in self.leaving

    def poll(self) -> None:
        """Give slots that other runs wait for, or else take a granted slot and request another one if it would have work."""
        if self.rollout.stopping:
            self.close()
            return
        self._give()
        if self.answer is not None and ray.wait([self.answer], timeout=0)[0]:
            self._collect()
        if time.monotonic() >= self.renew_at_s:
            self._renew()
        if self.request is None and self._would_grow():
            self._renew()  # an engine that has just become idle is not asked for again
        if not self._would_grow():
            self.close()
        elif self.request is None:
            [self.request] = self.leases.ask(1, labels=self.rollout.pool.labels)
            self.answer = self.source.arrival(self.request)

    def close(self) -> None:
        """Withdraw the pending request."""
        if self.request is not None:
            self.leases.withdraw([self.request])
            self.request = self.answer = None

    def _renew(self) -> None:
        began_s = time.monotonic()
        self.max_engines = self.renew(*self.rollout.remaining(), len(self.rollout.pool.working), self._warm())
        now = time.monotonic()
        self.renew_at_s = now + max(RENEW_S, (now - began_s) / BIDDING_SHARE)

    def _would_grow(self) -> bool:
        has_room = not self.leaving and len(self.rollout.pool.working) < self.max_engines
        return has_room and self.rollout.tail_s() > self._wait_s()

    def _wait_s(self) -> float:
        """Return how long the rollout must go on for one more engine to pay."""
        return 2 * (self.start_s if self._warm() else self.rollout.start_s)

    def _warm(self) -> int:
        """Return the number of parked engines that could work on slots which no run holds. On GPU each has its own device."""
        return self.rollout.pool.count_warm(1, self.source.warm_free)

    def _collect(self) -> None:
        rollout, request = self.rollout, self.request
        self.request = self.answer = None
        if request is None or request.id not in self.leases.pending:  # a worker group withdrew it
            return
        got = self.leases.without_lost(self.leases.collect([request], rollout.pool.kind, 0.0))
        if got:
            rollout.join(got)  # the next moves send requests to it
            rollout.result.exchanged["shared/slots_taken"] += len(got)

    def _give(self) -> None:
        rollout, result = self.rollout, self.rollout.result
        working = {rollout.calls.number(instance): instance for instance in rollout.pool.working}
        if gone := len(self.leaving - set(working)):
            result.exchanged["shared/slots_given"] += gone
        self.leaving &= set(working)
        now, spare = time.monotonic(), len(working) - len(self.leaving) - 1
        if (surplus := min(self.source.surplus, spare)) > 0 and now > self.look_again_s and not rollout.migrations.leaving:
            usable = {number for number, one in working.items() if any(lease.id in self.source.surplus_leases for lease in one.leases)}
            if by_work := sorted(usable - self.leaving, key=lambda number: len(rollout.token_log.owed(number)))[:surplus]:
                self.leaving |= set(by_work)
                self.look_again_s = now + PAUSE_S
                result.decisions.append(f"{len(by_work)} engines leave: {GIVEN.reason}")
        if self.leaving:
            stay = [number for number in rollout.calls.available() if number not in self.leaving]
            rollout.evacuate([working[number] for number in sorted(self.leaving)], stay, GIVEN.reason)
