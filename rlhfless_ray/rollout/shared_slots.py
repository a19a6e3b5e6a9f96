"""Take slots from the cluster's shared pool during a rollout, and give slots to other runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import ray

from placement.scaling.resize_policy import Release
from rlhfless_ray.functions.fetch_weights import fetch_weights
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import SlotRequest
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.engine_calls import EngineCalls
from rlhfless_ray.rollout.inflight_migrations import InflightMigrations
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import WeightVersion

RENEW_S = 1.0  # interval of bids, that of heartbeats
BIDDING_SHARE = 0.02  # largest share of the driver's time for bids
PAUSE_S = 1.0  # time between two decisions to give slots, until the pool knows of the last one
GIVEN = Release(0, "another run of the cluster waits for its slot")


class Rollout(Protocol):
    """The part of `RolloutDriver` that is used here."""

    pool: WorkerPool
    weights: WeightVersion
    calls: EngineCalls
    token_log: TokenLog
    migrations: InflightMigrations
    result: RolloutResult
    stopping: bool
    start_s: float

    def tail_s(self) -> float: ...

    def remaining(self) -> tuple[np.ndarray, np.ndarray]: ...

    def evacuate(self, leaving: list[Instance], stay: list[int], reason: str) -> None: ...


class SharedSlots:
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
        self.asked: list[tuple[SlotRequest, Any]] = []  # one for each further engine, and what resolves when it is granted
        self.leaving: set[int] = set()  # engines that give up their slots
        self.look_again_s = 0.0

    def refs(self) -> list[Any]:
        return [answer for _, answer in self.asked]

    def poll(self, driver: Rollout) -> None:
        """Give slots that other runs wait for, or else take granted slots and request those of further engines that would have work."""
        if driver.stopping:
            self.close()
            return
        self._give(driver)
        self._take(driver)
        if time.monotonic() >= self.renew_at_s:
            self._renew(driver)
        if not self.asked and self._further(driver):
            self._renew(driver)  # an engine that has just become idle is not asked for again
        further = self._further(driver)
        self._withdraw(self.asked[further:])
        requests = self.leases.ask(further - len(self.asked), labels=driver.pool.labels, width=driver.pool.width)
        self.asked += [(request, self.source.arrival(request)) for request in requests]

    def close(self) -> None:
        """Withdraw the pending requests."""
        self._withdraw(self.asked)

    def _withdraw(self, asked: list[tuple[SlotRequest, Any]]) -> None:
        self.leases.withdraw([request for request, _ in asked])
        self.asked = [one for one in self.asked if one not in asked]

    def _renew(self, driver: Rollout) -> None:
        began_s = time.monotonic()
        self.max_engines = self.renew(*driver.remaining(), len(driver.pool.working), self._warm(driver))
        now = time.monotonic()
        self.renew_at_s = now + max(RENEW_S, (now - began_s) / BIDDING_SHARE)

    def _further(self, driver: Rollout) -> int:
        """Return how many more engines would have work for long enough."""
        pays = not self.leaving and driver.tail_s() > self._wait_s(driver)
        return max(0, self.max_engines - len(driver.pool.working)) if pays else 0

    def _wait_s(self, driver: Rollout) -> float:
        """Return how long the rollout must go on for one more engine to pay."""
        return 2 * (self.start_s if self._warm(driver) else driver.start_s)

    def _warm(self, driver: Rollout) -> int:
        """Return the number of parked engines that could work on slots which no run holds. On GPU each has its own device."""
        return driver.pool.count_warm(driver.pool.width, self.source.view.warm_free)

    def _take(self, driver: Rollout) -> None:
        come = [one for one in self.asked if ray.wait([one[1]], timeout=0)[0]]
        self.asked = [one for one in self.asked if one not in come]
        for request, _ in come:
            if request.id not in self.leases.pending:  # a worker group withdrew it
                continue
            if got := self.leases.without_lost(self.leases.collect([request], driver.pool.kind, 0.0)):
                driver.pool.assign_leases(got)  # the next moves send requests to it
                driver.result.exchanged["shared/slots_taken"] += len(got)
        if come:
            fetch_weights(driver.pool, driver.weights)

    def _give(self, driver: Rollout) -> None:
        working = {driver.calls.number(instance): instance for instance in driver.pool.working}
        if gone := len(self.leaving - set(working)):
            driver.result.exchanged["shared/slots_given"] += gone * driver.pool.width
        self.leaving &= set(working)
        now, spare = time.monotonic(), len(working) - len(self.leaving) - 1
        if (
            (surplus := min(-(-self.source.view.surplus // driver.pool.width), spare)) > 0
            and now > self.look_again_s
            and not driver.migrations.leaving
        ):
            usable = {number for number, one in working.items() if any(lease.id in self.source.view.surplus_leases for lease in one.leases)}
            if by_work := sorted(usable - self.leaving, key=lambda number: len(driver.token_log.owed(number)))[:surplus]:
                self.leaving |= set(by_work)
                self.look_again_s = now + PAUSE_S
                driver.result.decisions.append(f"{len(by_work)} engines leave: {GIVEN.reason}")
        if self.leaving:
            stay = [number for number in driver.calls.available() if number not in self.leaving]
            driver.evacuate([working[number] for number in sorted(self.leaving)], stay, GIVEN.reason)
