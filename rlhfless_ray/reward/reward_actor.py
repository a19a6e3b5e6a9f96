"""The process of a scoring function. Imports neither the driver's side of scoring nor the planner behind that."""

from __future__ import annotations

import time

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.local.member_process import members_memory_mb
from rlhfless_ray.local.process_memory import own_memory_mb
from rlhfless_ray.reward.source import Item, Score, Source
from rlhfless_ray.types import Span


class RewardActor:
    def __init__(self, source: Source, timeout_s: float, device: str = "cpu") -> None:
        start = time.time()
        self.worker = source.worker(timeout_s, device)
        self.imported = Span("start", "load reward function", start, time.time())

    def open(self, threads: int) -> JsonObject:
        self.worker.open(threads)
        return {"memory_mb": own_memory_mb() + members_memory_mb(), "spans": [self.imported], "note": self.worker.note}

    def park(self) -> JsonObject:
        start = time.time()
        self.worker.park()
        return {"memory_mb": own_memory_mb() + members_memory_mb(), "spans": [Span("transfer", "leave the device", start, time.time())]}

    def score(self, items: list[Item], budget_s: float) -> tuple[list[Score], list[Span]]:
        start = time.time()
        return self.worker.score(items, budget_s), [Span("work", "score", start, time.time())]
