"""What the parts of a worker group use of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.learn.recovery import LearnerLost, Recovery


class Ranks(Protocol):
    """The ranks of a worker group, see `WorkerGroup`."""

    name: str
    by_rank: list[Instance]
    pool: WorkerPool
    broker: SlotBroker
    recovery: Recovery
    layout: RankLayout
    deadline_s: float
    loopback: bool

    @property
    def ranks(self) -> int: ...

    @property
    def working(self) -> bool: ...

    def park(self) -> list[Lease]: ...

    def call(self, ask: Callable[[], list[Any]], what: str) -> list[Any]: ...

    def wait_for(self, refs: list[Any], what: str, deadline_s: float | None = None) -> list[Any]: ...

    def record_spans(self, spans: Iterable[list[Any]]) -> None: ...

    def handle_loss(self, lost: LearnerLost, cause: FailureCause | None = None) -> None: ...

    def assign_free_leases(self) -> None: ...
