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
from rlhfless_ray.functions.pool_messages import SlotRequest
from rlhfless_ray.rollout.engine_calls import Ref
from rlhfless_ray.rollout.events import Event, RolloutProgress
from rlhfless_ray.rollout.live_rollout import Plugin

RENEW_S = 1.0  # interval of bids, that of heartbeats
BIDDING_SHARE = 0.02  # largest share of the driver's time for bids
PAUSE_S = 1.0  # time between two decisions to give slots, until the pool knows of the last one
GIVEN = Release(0, "another run of the cluster waits for its slot")


class SharedSlots(Plugin):
    """Exchange slots with other runs during a rollout.

    The rollout grows when another run releases the slots of an engine, and shrinks when another run waits for its own. Requests move
    between engines.
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

        `max_engines`: maximum number of engines. `start_s`: time until a warm engine works on its slots. `renew`: bids for
        the rest of the rollout, and returns how many engines have work. See `Autoscaler.renew_rollout`.
        """
        self.leases, self.source, self.max_engines, self.start_s, self.renew = leases, source, max_engines, start_s, renew
        self.renew_at_s = time.monotonic() + RENEW_S
        self.asked: list[tuple[SlotRequest, Ref]] = []  # one for each further engine, and what resolves when it is granted
        self.leaving: set[int] = set()  # engines that give up their slots
        self.look_again_s = 0.0

    def refs(self) -> list[Ref]:
        return [answer for _, answer in self.asked]

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress):
            self.poll()

    def take(self, number: int, instance: Instance) -> bool:
        if number in self.leaving:
            self.rollout.settings.give_back(instance, GIVEN)
        return number in self.leaving

    def poll(self) -> None:
        """Give slots that other runs wait for, or else take granted slots and request those of further engines that would have work."""
        if self.rollout.stopping:
            self.close()
            return
        self._give()
        self._take_granted()
        if time.monotonic() >= self.renew_at_s:
            self._renew()
        if not self.asked and self._further():
            self._renew()  # an engine that has just become idle is not asked for again
        further, pool = self._further(), self.rollout.pool
        labels = pool.labels  # the last node with the labels of an earlier request may be gone
        self._withdraw([one for one in self.asked if one[0].labels != labels])
        self._withdraw(self.asked[further:])
        requests = self.leases.ask(further - len(self.asked), labels=labels, width=pool.width)
        self.asked += [(request, self.source.arrival(request)) for request in requests]

    def close(self) -> None:
        """Withdraw the pending requests."""
        self._withdraw(self.asked)

    def _withdraw(self, asked: list[tuple[SlotRequest, Ref]]) -> None:
        self.leases.withdraw([request for request, _ in asked])
        self.asked = [one for one in self.asked if one not in asked]

    def _renew(self) -> None:
        began_s = time.monotonic()
        self.max_engines = self.renew(*self.rollout.remaining(), len(self.rollout.pool.working), self._warm())
        now = time.monotonic()
        self.renew_at_s = now + max(RENEW_S, (now - began_s) / BIDDING_SHARE)

    def _further(self) -> int:
        """Return how many more engines would have work for long enough."""
        pays = not self.leaving and self.rollout.tail_s() > self._wait_s()
        return max(0, self.max_engines - len(self.rollout.pool.working)) if pays else 0

    def _wait_s(self) -> float:
        """Return how long the rollout must go on for one more engine to pay."""
        return 2 * (self.start_s if self._warm() else self.rollout.start_s)

    def _warm(self) -> int:
        """Return the number of parked engines that could work on slots which no run holds. On GPU each has its own device."""
        return self.rollout.pool.count_warm(self.rollout.pool.width, self.source.view.warm_free)

    def _take_granted(self) -> None:
        rollout = self.rollout
        come = [one for one in self.asked if ray.wait([one[1]], timeout=0)[0]]
        self.asked = [one for one in self.asked if one not in come]
        for request, _ in come:
            if request.id not in self.leases.pending:  # a worker group withdrew it
                continue
            if got := self.leases.without_lost(self.leases.collect([request], rollout.pool.kind, 0.0)):
                rollout.join(got)  # the next moves send requests to it
                rollout.result.exchanged["shared/slots_taken"] += len(got)

    def _give(self) -> None:
        rollout, result = self.rollout, self.rollout.result
        working = {rollout.calls.number(instance): instance for instance in rollout.pool.working}
        if gone := len(self.leaving - set(working)):
            result.exchanged["shared/slots_given"] += gone * rollout.pool.width
        self.leaving &= set(working)
        now, spare, view = time.monotonic(), len(working) - len(self.leaving) - 1, self.source.view
        surplus = min(-(-view.surplus // rollout.pool.width), spare)
        if surplus > 0 and now > self.look_again_s and not rollout.migrations.leaving:
            usable = {number for number, one in working.items() if any(lease.id in view.surplus_leases for lease in one.leases)}
            if by_work := sorted(usable - self.leaving, key=lambda number: len(rollout.token_log.owed(number)))[:surplus]:
                self.leaving |= set(by_work)
                self.look_again_s = now + PAUSE_S
                result.decisions.append(f"{len(by_work)} engines leave: {GIVEN.reason}")
        if self.leaving:
            stay = [number for number in rollout.calls.available() if number not in self.leaving]
            rollout.evacuate([working[number] for number in sorted(self.leaving)], stay, GIVEN.reason)
