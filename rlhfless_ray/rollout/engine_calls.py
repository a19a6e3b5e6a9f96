"""The engines of a rollout and the calls they are at work on."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.control_queue import EngineCommand
from rlhfless_ray.rollout.token_log import TokenLog

_epochs = itertools.count(1)  # of all rollouts of this driver: an order is for one call of one engine


@dataclass
class EngineCall:
    """A call of an engine. asked: indices of the requests it was called with and has not cut; heard_s: when it last said
    something, and before that, when it had started; before that, when it was called."""

    instance: Instance
    number: int
    epoch: int
    asked: set[int]
    heard_s: float
    started: bool = False  # its process, as far as was seen


class EngineCalls:
    """Engines are known by number, in the order in which they came; a number is never used twice."""

    def __init__(self, pool: WorkerPool, token_log: TokenLog, interval_s: float) -> None:
        self.pool, self.token_log, self.interval_s = pool, token_log, interval_s
        self.engines: list[Instance] = []  # by number
        self.running: dict[Any, EngineCall] = {}  # by the generator of the call

    def number(self, instance: Instance) -> int:
        if instance not in self.engines:
            self.engines.append(instance)
        return self.engines.index(instance)

    def of(self, number: int) -> EngineCall | None:
        return next((launch for launch in self.running.values() if launch.number == number), None)

    def living(self) -> list[int]:
        """Numbers of the engines that are at work or could be at once."""
        busy = {launch.number for launch in self.running.values()}
        numbers = [self.number(instance) for instance in self.pool.working]
        return [number for number in numbers if number in busy or _ready(self.engines[number])]

    def send(self, number: int, indices: np.ndarray, what: str = "", pages: tuple[Any, ...] = ()) -> None:
        """The engine goes on with these requests: beside what it has, or called anew. `pages`: references to their KV pages."""
        instance, launch = self.engines[number], self.of(number)
        requests = self.token_log.give(indices, number)
        if launch is not None:
            self.tell(launch, EngineCommand(add=tuple(requests), what=what, pages=pages))
            return
        epoch = next(_epochs)
        generator = instance.actor.rollout.options(num_returns="streaming").remote(
            epoch, requests, self.interval_s, len(instance.leases), *([pages] if pages else [])
        )
        self.running[generator] = EngineCall(instance, number, epoch, set(indices.tolist()), time.monotonic())

    def tell(self, launch: EngineCall, order: EngineCommand) -> None:
        """Not waited for: an order that comes too late is seen from what the engine's call leaves undone."""
        launch.instance.actor.tell.options(concurrency_group="control").remote(launch.epoch, order)

    def spread(self, indices: np.ndarray, engines: list[int], expected: np.ndarray) -> None:
        """Requests whose engine is gone go on, longest expected first, on the engines with the least to do."""
        live = ~self.token_log.finished & (self.token_log.owner >= 0)
        held = np.bincount(self.token_log.owner[live], minlength=len(self.engines))
        heap = [(int(held[number]), number) for number in engines]
        heapq.heapify(heap)
        share: dict[int, list[int]] = {}
        for i in indices[np.argsort(-expected[indices], kind="stable")].tolist():
            load, number = heapq.heappop(heap)
            share.setdefault(number, []).append(i)
            heapq.heappush(heap, (load + 1, number))
        for number, part in share.items():
            self.send(number, np.array(part), f"take over {sequences(len(part))}")


def _ready(instance: Instance) -> bool:
    """Whether an instance without work could begin at once."""
    return instance.loading is None or bool(ray.wait([instance.loading], timeout=0)[0])


def sequences(count: int) -> str:
    return f"{count} sequence" if count == 1 else f"{count} sequences"
