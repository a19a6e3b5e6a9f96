"""Calls of all ranks of a worker group, and their replies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.rank_replies import has_raised, wait_for_ranks
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.learn.shares import joined as joined_values
from rlhfless_ray.types import Span


class RankCalls:
    """The base of `WorkerGroup`, which sets these attributes."""

    pool: WorkerPool
    name: str
    layout: RankLayout
    by_rank: list[Instance]
    cutter: Cutter
    deadline_s: float
    threads: int | None

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def ask(self, what: str, batch: Batch, *more: object) -> list[Any]:
        """Call method `what` of every rank with its share of the batch. Returns references for `wait_for_values`."""
        cut = self.cutter.of_update if what == "update" else self.cutter.of_pass
        if what in ("reference", "values"):  # their routers choose by themselves
            batch = replace(batch, experts=None)
        shares = cut(batch)
        copies = [ray.put(share) for share in shares] if len(shares) < self.ranks else shares
        return [
            getattr(i.actor, what).remote(copies[rank * len(copies) // self.ranks], self.threads_of(i), *more)
            for rank, i in enumerate(self.by_rank)
        ]

    def threads_of(self, instance: Instance) -> int:
        return self.threads or len(instance.leases)

    def joined(self, replies: list[Any]) -> dict[str, np.ndarray]:
        """Join the values of all shares. Ranks of one copy of the model have computed the same values."""
        return joined_values([(values, places) for values, places, _ in replies[:: self.ranks // self.cutter.ranks]])

    def pending(self, refs: list[Any]) -> list[Any]:
        """Return the references that are not ready yet."""
        return ray.wait(refs, num_returns=len(refs), timeout=0)[1] if refs else []

    def have_failed(self, refs: list[Any]) -> bool:
        """Return whether one of these calls raised or lost its process. The others may wait for it in a collective. Handles no loss."""
        pending = self.pending(refs)
        return any(has_raised(ref) for ref in refs if ref not in pending)

    def wait_for(self, refs: list[Any], what: str, deadline_s: float | None = None) -> list[Any]:
        return wait_for_ranks(refs, deadline_s or self.deadline_s, what, self.name, self.ranks)

    def record_spans(self, spans: Iterable[list[Any]]) -> None:
        """Record the spans of every rank, in order of rank, in the ledger."""
        for instance, spans_of_rank in zip(self.by_rank, spans, strict=True):
            self.record_spans_of(instance, spans_of_rank)

    def record_spans_of(self, instance: Instance, spans: list[Any]) -> None:
        self.pool.ledger.spans([lease.id for lease in instance.leases], spans)


def slowest_s(spans: Iterable[list[Span]]) -> float:
    """Return the seconds of the rank that worked the longest, from the spans of each rank's call."""
    return max(sum(span.to_s - span.from_s for span in of_rank) for of_rank in spans)
