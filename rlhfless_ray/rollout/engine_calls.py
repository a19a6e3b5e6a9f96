"""The engines of a rollout and the calls they work on."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np
import ray

from rlhfless_ray.engine.control_queue import DraftNews, EngineCommand
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Request

Ref: TypeAlias = Any  # a reference of Ray, or a generator of them: Ray's own classes have no types

MOST_REPORTS = 500  # a second, from all engines together: each costs the driver a fraction of a millisecond, however much it contains
_epochs = itertools.count(1)  # over all rollouts of this driver: a command belongs to one call of one engine


@dataclass
class EngineCall:
    """A call of an engine.

    `assigned`: keys of its requests, without those it has cut. `heard_s`: time of its last report. Before the first report this is
    the time of its start, and before that the time of the call.
    """

    instance: Instance
    number: int
    epoch: int
    assigned: set[int]
    heard_s: float
    started: bool = False  # whether the driver has seen that its process is ready


class Attached(TypedDict, total=False):
    """What an engine gets together with requests. `pages`: references to KV pages of their contexts."""

    pages: tuple[Ref, ...]
    drafts: DraftNews


Attach = Callable[[int, list[Request]], Attached]  # from the engine's number and its requests


class EngineCalls:
    """Engines by number, in the order in which they joined. A number is never reused."""

    def __init__(
        self, pool: WorkerPool, token_log: TokenLog, interval_s: float, attach: Attach = lambda number, requests: Attached()
    ) -> None:
        self.pool, self.token_log, self.interval_s, self.attach = pool, token_log, interval_s, attach
        self.draining: set[str] = set()  # ids of nodes that are drained
        self.engines: list[Instance] = []  # by number
        self._numbers: dict[int, int] = {}  # by id of the instance
        self.running: dict[Ref, EngineCall] = {}  # by the call's generator

    def number(self, instance: Instance) -> int:
        """Return the instance's number, which it gets on first use."""
        number = self._numbers.setdefault(id(instance), len(self.engines))
        if number == len(self.engines):
            self.engines.append(instance)
        return number

    def find(self, number: int) -> EngineCall | None:
        """Return the running call of an engine."""
        return next((call for call in self.running.values() if call.number == number), None)

    def available(self) -> list[int]:
        """Return the numbers of the engines that work, or could start to at once. One whose process still starts is not among them."""
        calls = {call.number: call for call in self.running.values()}
        numbers = [self.number(instance) for instance in self.pool.working]
        return [number for number in numbers if _is_ready(self.engines[number], calls.get(number))]

    def available_or_starting(self, but: int = -1) -> list[int]:
        """Return `available` engines, or if there is none those that still start, which may hold all slots. `but`: one to leave out."""
        numbers = [number for number in self.available() if number != but]
        return numbers or [number for instance in self.pool.working if (number := self.number(instance)) != but]

    def staying(self) -> list[int]:
        """Return the `available` engines whose nodes are not drained."""
        return [number for number in self.available() if self.engines[number].slot.node not in self.draining]

    def leaving(self) -> list[int]:
        """Return the numbers of the engines whose nodes are drained."""
        return [number for number, instance in enumerate(self.engines) if instance.slot.node in self.draining]

    def send(self, number: int, keys: np.ndarray, what: str = "", pages: tuple[Ref, ...] = ()) -> None:
        """Let an engine continue these requests: in its running call, or in a new one. `pages`: references to their KV pages."""
        instance, call = self.engines[number], self.find(number)
        requests = self.token_log.assign(keys, number)
        attached = self.attach(number, requests)
        if pages:
            attached["pages"] = pages
        if call is not None:
            self.send_command(call, EngineCommand(add=tuple(requests), what=what, **attached))
            return
        epoch, interval_s = next(_epochs), max(self.interval_s, len(self.pool.working) / MOST_REPORTS)
        generator = instance.actor.rollout.options(num_returns="streaming").remote(
            epoch, requests, interval_s, len(instance.leases), **attached
        )
        self.running[generator] = EngineCall(instance, number, epoch, set(keys.tolist()), time.monotonic())

    def send_command(self, call: EngineCall, command: EngineCommand) -> None:
        """Send a command without waiting for a reply. If it arrives too late, the end of the call shows what was not carried out."""
        call.instance.actor.enqueue.options(concurrency_group="control").remote(call.epoch, command)

    def spread(self, keys: np.ndarray, engines: list[int]) -> None:
        """Continue requests of a lost engine on the least loaded of `engines`, the longest expected first."""
        live = ~self.token_log.finished & (self.token_log.owner >= 0)
        held = np.bincount(self.token_log.owner[live], minlength=len(self.engines))
        heap = [(int(held[number]), number) for number in engines]
        heapq.heapify(heap)
        share: dict[int, list[int]] = {}
        for i in keys[np.argsort(-self.token_log.expected[keys], kind="stable")].tolist():
            load, number = heapq.heappop(heap)
            share.setdefault(number, []).append(i)
            heapq.heappush(heap, (load + 1, number))
        for number, part in share.items():
            self.send(number, np.array(part), f"take over {count_sequences(len(part))}")


def _is_ready(instance: Instance, call: EngineCall | None) -> bool:
    """Return whether an instance with this call has started, or an idle one has loaded its weights."""
    if call is not None:
        return call.started or instance.started
    return has_loaded(instance)


def has_loaded(instance: Instance) -> bool:
    """Return whether the instance's last load of weights has ended."""
    return instance.loading is None or bool(ray.wait([instance.loading], timeout=0)[0])


def count_sequences(count: int) -> str:
    return f"{count} sequence" if count == 1 else f"{count} sequences"
