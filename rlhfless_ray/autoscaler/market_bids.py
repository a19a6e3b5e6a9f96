"""A run's bids on the slots that it shares with other runs of a cluster, made from the planner's own numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from placement.market import Bid, bid_of
from placement.planning.objective import Objective
from placement.planning.plan import Plan
from placement.scaling.learner_size import MIN_TRIALS, LearnerSize
from placement.scaling.phase_delay import Delay, delay
from placement.scaling.resize_policy import time_value
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.pool_client import PoolClient

# Seconds until a rollout has moved the responses of an engine that it gives up: a move by pages pauses for 0.2 s at 494 M parameters, and
# the rollout looks for runs that wait several times a second.
GIVE_S = 0.5
EPS = 1e-6  # of a deadline or budget that is used up
RENEWED = 0.25  # relative change of the worth of a running rollout's slots from which the bid is sent again


class MarketBids:
    """Bids for the phases of a step: each phase's bid stands until the next phase begins. A rollout that can grow renews its bid."""

    def __init__(self, pool: PoolClient, objective: Objective, learner_ranks: int) -> None:
        self.pool, self.objective, self.learner_ranks = pool, objective, learner_ranks
        self.rollout: Bid | None = None  # for the next rollout
        self.running: Bid | None = None  # for the rollout that runs
        self.begun_s, self.paid_slot_s = 0.0, 0.0  # when it began, and what the run had paid until then
        self.points: list[tuple[int, float, float]] = []  # slots, seconds and slot-seconds of its engines, without starts
        self.value_per_s = 0.0  # of the rollout, in slot-seconds: also what the rest of it is worth
        self.pair: Bid | None = None  # for an update and the rollout beside it, where they are sized together
        self.besides = 0  # slots that the run holds beside its engines during that rollout

    def divide(
        self, frontiers: Mapping[int, Sequence[Plan]], besides: int, started: Callable[[int, Plan], Plan]
    ) -> tuple[dict[int, list[Plan]], str]:
        """Return the plans that the pool would have slots for now, by the engines' width, and why others were left out.

        The smallest plan of each width always stays. `besides`: slots that the run holds beside its engines. `started`: adds to a plan
        of a width the time and cost of the starts that it needs, which the bid counts too. A budget does not cover them.
        """
        every = [(width, plan) for width, plans in frontiers.items() for plan in plans]
        self.value_per_s, self.besides = time_value(self.objective, [plan for _, plan in every]), besides
        self.points = self._points(((plan.actors * width, plan) for width, plan in every), self.value_per_s)
        within = [(width, plan) for width, plan in every if self._is_affordable(plan)] or every
        sized = ((plan.actors * width, started(width, plan)) for width, plan in within)
        self.rollout = self._bid(self._points(sized, self.value_per_s), self.value_per_s, besides)
        cleared = self.pool.what_if(self.rollout)
        room = cleared.slots[self.rollout.run] - besides
        bids_as_alone = self.objective.prefer is not None or self.objective.budget is not None  # for the number that it would choose alone
        if bids_as_alone and room >= self.most:
            return {width: list(plans) for width, plans in frontiers.items()}, ""
        left = {width: [plan for plan in plans if plan.actors * width <= room] for width, plans in frontiers.items()}
        kept = {width: plans or [min(frontiers[width], key=lambda plan: plan.actors)] for width, plans in left.items()}
        fewer = any(len(kept[width]) < len(plans) for width, plans in frontiers.items())
        return kept, cleared.reasons[self.rollout.run] if fewer else ""

    def room_for_pairs(self, pairs: Sequence[tuple[int, Plan]], started: Sequence[Plan]) -> int:
        """Return the slots that the pool would have for an update and the rollout beside it.

        `pairs`: slots of both together, and the time and cost by which the objective compares them. `started`: the same with the starts of
        engines, which the bid counts too.
        """
        every = list(zip(pairs, started, strict=True))
        both = [((slots, plan), later) for (slots, plan), later in every if self._is_affordable(plan)] or every
        value_per_s = time_value(self.objective, [plan for (_, plan), _ in both])
        self.pair = self._bid(self._points(((slots, plan) for (slots, _), plan in both), value_per_s), value_per_s)
        return self._slots_for(self.pair)

    def room_for_rest(self, plans: Sequence[tuple[int, Plan]]) -> int:
        """Return the slots that the pool would have for a rollout that goes on once its update has ended. `plans`: with their slots."""
        value_per_s = time_value(self.objective, [plan for _, plan in plans])
        return self._slots_for(self._bid(self._points(plans, value_per_s), value_per_s))

    def _is_affordable(self, plan: Plan) -> bool:
        """Return whether a plan is within the budget, which is one of the rollout alone."""
        return self.objective.budget is None or plan.cost <= self.objective.budget

    def _slots_for(self, bid: Bid) -> int:
        return self.pool.view.slots if self.alone else self.pool.what_if(bid).slots[bid.run]

    @property
    def room(self) -> int:
        """Slots that the run may hold by its standing bid: all of them if no other run is on the pool."""
        return self.pool.view.slots if self.alone else self.pool.view.target

    @property
    def alone(self) -> bool:
        """Whether no other run is on the pool."""
        return self.pool.view.runs <= 1

    @property
    def most(self) -> int:
        """Slots that engines of the planned rollout would have work for."""
        return 0 if self.rollout is None else self.rollout.most - self.besides

    def begin_rollout(self, wanted: int, seconds: float, grows: bool, value_per_s: float) -> Delay:
        """Bid for the planned rollout, and return whether it waits for slots of its own that another run gives back.

        `wanted`: slots that its engines need. `seconds`: until it ends, as predicted. `grows`: whether it takes and gives slots while it
        runs; then it does not wait. `value_per_s`: worth of a second of the step, in slot-seconds.
        """
        if self.rollout is None:
            return Delay(0.0, wanted, "")
        self.pool.bid(self.rollout, GIVE_S if grows else seconds)
        self.running, self.begun_s, self.paid_slot_s = self.rollout, time.monotonic(), self.pool.view.slot_s
        most = min(wanted, self.pool.view.target - self.besides)
        return Delay(0.0, wanted, "") if grows else self._delay(self.points, most, self.besides, value_per_s)

    def renew_rollout(self, plans: Sequence[Plan], width: int = 1) -> int:
        """Bid for the rest of the running rollout, and return how many engines, of `width` slots each, have work.

        `plans`: frontier of the rest, beside an update with the time and cost of the step. Others learn of the bid with the next heartbeat,
        if it has changed much.
        """
        points = self._points(((plan.actors * width, plan) for plan in plans), self.value_per_s)
        bid = self._bid(points, self.value_per_s, self.besides, self._rest_of_objective())
        before = self.running
        if before is None or bid.slots != before.slots or abs(bid.worth[-1] - before.worth[-1]) > RENEWED * before.worth[-1]:
            self.running = bid
            self.pool.renew_bid(bid)
        return (bid.most - self.besides) // width

    def _rest_of_objective(self) -> Objective:
        """Return the objective for the rest of the running rollout."""
        if self.objective.deadline_s is not None:
            return Objective(deadline_s=max(EPS, self.objective.deadline_s - (time.monotonic() - self.begun_s)))
        if self.objective.budget is not None:
            paid = self.pool.view.slot_s - self.paid_slot_s - self.besides * (self.pool.viewed_s - self.begun_s)
            return Objective(budget=max(EPS, self.objective.budget - max(0.0, paid)))
        return self.objective

    def begin_pair(self, seconds: float) -> None:
        """Bid for the update and the rollout that were sized together last. `seconds`: of the update."""
        if self.pair is not None:
            self.pool.bid(self.pair, seconds)

    def begin_update(self, sizes: LearnerSize, slots_per_rank: int, tokens: float, value_per_s: float) -> tuple[Delay, str]:
        """Bid for an update on `slots_per_rank` slots per rank, valued by the durations of earlier updates.

        Returns (delay, reason). The delay says whether the update waits for slots of its own that another run gives back, and how many
        slots each rank gets. The reason says why they are fewer than `slots_per_rank`, or is empty.
        """
        known = [count for count in sizes.counts if sizes.tried[count] >= MIN_TRIALS and count <= slots_per_rank] or [1]
        points = [_held(self.learner_ranks * count, sizes.predict(count, tokens)) for count in known]
        untried = []
        if known[-1] < slots_per_rank:  # as if slots divided the work evenly, otherwise it would never be tried
            untried = [_held(self.learner_ranks * slots_per_rank, points[-1][1] * known[-1] / slots_per_rank)]
        self.pool.bid(self._bid([*points, *untried], value_per_s), points[-1][1])
        view = self.pool.view
        # alone, a run also tries numbers again that seem worse: that costs no other run
        room = slots_per_rank if self.alone else min(slots_per_rank, max(1, view.target // self.learner_ranks))
        found = self._delay(points, room * self.learner_ranks, 0, value_per_s)
        return replace(found, slots=found.slots // self.learner_ranks), view.reason if room < slots_per_rank else ""

    def _delay(self, points: Sequence[tuple[int, float, float]], most: int, besides: int, value_per_s: float) -> Delay:
        """Return whether a phase on up to `most` slots waits for those that it lacks. `besides`: slots that other work of the run holds."""
        view, usable = self.pool.view, [(slots, seconds) for slots, seconds, _ in points if slots <= most]
        have = view.held + view.free - besides
        if not usable or have >= usable[-1][0] or have < usable[0][0]:  # nothing is missing, or it has to wait anyway
            return Delay(0.0, most, "")
        found = delay(usable, have, view.due, value_per_s)
        return found if found.seconds else replace(found, slots=most)

    def metrics(self) -> JsonObject:
        return self.pool.view.metrics()

    def _bid(
        self, points: Sequence[tuple[int, float, float]], value_per_s: float, besides: int = 0, objective: Objective | None = None
    ) -> Bid:
        """Return the bid for a phase's slots and those that the run holds beside them, which its cost does not cover."""
        bid = bid_of(self.pool.info.run, points, objective or self.objective, value_per_s)
        return replace(bid, slots=tuple(slots + besides for slots in bid.slots))

    def _points(self, plans: Iterable[tuple[int, Plan]], value_per_s: float) -> list[tuple[int, float, float]]:
        """Return slots, seconds and slot-seconds of the best plans with so many slots, ascending: with `prefer` by what they are worth."""
        by_worth, best = self.objective.prefer is not None or self.objective.knee, dict[int, tuple[float, float, Plan]]()
        for slots, plan in plans:
            key = (plan.cost + value_per_s * plan.time_s if by_worth else plan.time_s), plan.time_s, plan
            if slots not in best or key[:2] < best[slots][:2]:
                best[slots] = key
        return [(slots, plan.time_s, plan.cost) for slots, (_, _, plan) in sorted(best.items())]


def _held(slots: int, seconds: float) -> tuple[int, float, float]:
    """Return the point of a phase that holds all its slots until it ends."""
    return slots, seconds, slots * seconds
