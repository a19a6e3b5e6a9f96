"""A run's bids on the slots that it shares with other runs of a cluster, made from the planner's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from placement.market import Bid, Clearing, bid_of
from placement.planning.objective import Objective
from placement.planning.plan import Plan
from placement.scaling.learner_size import LearnerSize
from rlhfless_ray.functions.pool_messages import PoolView, RunInfo


class Pool(Protocol):
    """The part of the shared pool that bids use."""

    info: RunInfo
    view: PoolView

    def bid(self, bid: Bid, /) -> None: ...

    def what_if(self, bid: Bid, /) -> Clearing: ...


class MarketBids:
    """Bids for the phases of a step: each phase's bid stands until the next phase begins."""

    def __init__(self, pool: Pool, objective: Objective, learner_ranks: int) -> None:
        self.pool, self.objective, self.learner_ranks = pool, objective, learner_ranks
        self.rollout: Bid | None = None  # for the next rollout
        self.besides = 0  # slots that the run holds beside its engines during that rollout

    def divide(self, frontiers: Mapping[int, Sequence[Plan]], besides: int) -> tuple[dict[int, list[Plan]], str]:
        """Return the plans that the pool would have slots for now, by the engines' width, and why others were left out.

        The smallest plan of each width always stays. `besides`: slots that the run holds beside its engines.
        """
        points = [(plan.actors * width + besides, plan.time_s) for width, plans in frontiers.items() for plan in plans]
        quickest: dict[int, float] = {}
        for slots, seconds in points:
            quickest[slots] = min(seconds, quickest.get(slots, seconds))
        self.rollout, self.besides = self._bid(sorted(quickest.items())), besides
        cleared = self.pool.what_if(self.rollout)
        room = cleared.slots[self.rollout.run] - besides
        left = {width: [plan for plan in plans if plan.actors * width <= room] for width, plans in frontiers.items()}
        kept = {width: plans or [min(frontiers[width], key=lambda plan: plan.actors)] for width, plans in left.items()}
        fewer = any(len(kept[width]) < len(plans) for width, plans in frontiers.items())
        return kept, cleared.reasons[self.rollout.run] if fewer else ""

    @property
    def most(self) -> int:
        """Slots that engines of the planned rollout would have work for."""
        return 0 if self.rollout is None else self.rollout.most - self.besides

    def begin_rollout(self) -> None:
        if self.rollout is not None:
            self.pool.bid(self.rollout)

    def begin_update(self, sizes: LearnerSize, slots_per_rank: int, tokens: float) -> tuple[int, str]:
        """Bid for an update on `slots_per_rank` slots per rank, valued by the durations of earlier updates.

        Returns how many slots the pool has for each rank, and why they are fewer than `slots_per_rank` (or an empty string).
        """
        tried = [count for count in sizes.counts if sizes.tried[count] and count <= slots_per_rank] or [1]
        points = [(self.learner_ranks * count, sizes.predict(count, tokens)) for count in tried]
        if tried[-1] < slots_per_rank:  # never tried: valued a little, so that free slots are used for it
            points.append((self.learner_ranks * slots_per_rank, 0.999 * points[-1][1]))
        self.pool.bid(self._bid(points))
        view = self.pool.view
        room = max(1, view.target // self.learner_ranks)
        return min(room, slots_per_rank), view.reason if room < slots_per_rank else ""

    def metrics(self) -> dict[str, Any]:
        return self.pool.view.metrics()

    def _bid(self, points: Sequence[tuple[int, float]]) -> Bid:
        return bid_of(self.pool.info.run, points, self.objective)
