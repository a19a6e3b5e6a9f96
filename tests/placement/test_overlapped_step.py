"""A rollout and the update that it works beside, sized together: compared with every pair there is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from placement.planning.frontier import frontier
from placement.planning.objective import Objective
from placement.planning.plan import Plan
from placement.scaling.overlapped_step import Rest, Update, size_together, step_plan
from placement.speed.decode_speed import Speed

SPEED = Speed(0.01, 2e-3, 1e-6)
FASTEST, CHEAPEST, MIDDLE = Objective(prefer=1.0), Objective(prefer=0.0), Objective(prefer=0.5)


def every_rollout(lengths: np.ndarray, prompts: np.ndarray, engines: int) -> Iterator[tuple[float, float]]:
    """Yield seconds and slot-seconds of every assignment of the sequences to at most so many engines."""
    for places in set(product(range(engines), repeat=len(lengths))):
        groups = [np.flatnonzero(np.array(places) == k) for k in range(engines)]
        times = [SPEED.rollout_s(lengths[g], prompts[g]) for g in groups if len(g)]
        yield max(times), sum(times)


def every_step(lengths: np.ndarray, prompts: np.ndarray, updates: list[Update], slots: int) -> np.ndarray:
    """Return rollout seconds, rollout slot-seconds, step seconds and step slot-seconds of every pair, (pairs, 4)."""
    found = []
    for update in updates:
        for rollout_s, cost in every_rollout(lengths, prompts, slots - update.slots):
            step_s = max(rollout_s, update.seconds) + update.apart_s
            found.append((rollout_s, cost, step_s, cost + update.slots * step_s))
    return np.array(found)


@pytest.mark.parametrize("seed", range(12))
def test_no_pair_of_sizes_is_better_than_the_chosen_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, prompts = rng.integers(5, 200, 5).astype(float), rng.integers(1, 50, 5).astype(float)
    alone_s, slots = SPEED.rollout_s(lengths, prompts), 5
    update_s = alone_s * rng.uniform(0.1, 2.0)
    updates = [Update(n, update_s * n ** -rng.uniform(0, 1), 0.1 * alone_s) for n in (1, 2, 4)]
    plans = {update: frontier(lengths, SPEED, max_actors=slots - update.slots, prompts=prompts) for update in updates}
    rollout_s, rollout_cost, step_s, cost = every_step(lengths, prompts, updates, slots).T

    for prefer in (0.0, 0.3, 0.5, 0.8, 1.0):
        chosen = step_of(size_together(plans, Objective(prefer=prefer)))
        score = prefer * chosen.time_s / step_s.min() + (1 - prefer) * chosen.cost / cost.min()
        assert score == pytest.approx((prefer * step_s / step_s.min() + (1 - prefer) * cost / cost.min()).min(), rel=1e-9)
    deadline = float(np.quantile(rollout_s, 0.2)) + 1e-9
    chosen = step_of(size_together(plans, Objective(deadline_s=deadline)))
    assert chosen.cost == pytest.approx(cost[rollout_s <= deadline].min(), rel=1e-9)
    budget = float(np.quantile(rollout_cost, 0.6)) + 1e-9
    chosen = step_of(size_together(plans, Objective(budget=budget)))
    assert chosen.time_s == pytest.approx(step_s[rollout_cost <= budget].min(), rel=1e-9)


def step_of(sizes) -> Plan:
    return step_plan(sizes.plan, sizes.update, MIDDLE)


def two_parts(plan: Plan, update: Update, rest: Rest) -> tuple[float, float]:
    """Seconds and slot-seconds of a step whose rollout stays where it began, or pauses after the update, in small pieces of its work."""
    found, pieces = [], 10_000
    for pauses in (True, False):
        now_s, cost, there = 0.0, 0.0, False
        for _ in range(pieces):
            if pauses and not there and now_s >= update.seconds:
                now_s, cost, there = now_s + rest.pause_s, cost + rest.slots * rest.pause_s, True
            now_s += (rest.seconds if there else plan.time_s) / pieces
            cost += (rest.cost if there else plan.cost) / pieces
        learner_s = update.seconds if there else max(now_s, update.seconds)
        found.append((max(now_s, update.seconds) + update.apart_s, cost + update.slots * (learner_s + update.apart_s)))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_a_partial_rollout_goes_on_with_the_learners_slots(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rest = Rest(8, rng.uniform(0.2, 1.0), rng.uniform(1, 8), rng.uniform(0, 0.2))
    updates = [Update(n, rng.uniform(0.1, 2.0) / n, 0.1, rest) for n in (1, 2, 4)]
    plans = {
        update: [Plan(rng.uniform(1, 3) / e, rng.uniform(1, 3), tuple(np.arange(3) for _ in range(e))) for e in (1, 2, 4)]
        for update in updates
    }
    every = []
    for update, some in plans.items():
        for plan in some:
            step = step_plan(plan, update, MIDDLE)
            seconds, cost = two_parts(plan, update, rest)
            assert step.time_s == pytest.approx(seconds, rel=1e-3) and step.cost == pytest.approx(cost, rel=1e-3)
            every.append((step.time_s, step.cost))
    time_s, cost = np.array(every).T
    score = 0.5 * time_s / time_s.min() + 0.5 * cost / cost.min()
    chosen = step_of(size_together(plans, MIDDLE))
    assert 0.5 * chosen.time_s / time_s.min() + 0.5 * chosen.cost / cost.min() == pytest.approx(score.min(), rel=1e-9)


def test_the_learner_is_kept_small_while_the_rollout_outlasts_it() -> None:
    """Engines make more of the slots while the rollout outlasts the update. An update that outlasts it gets them."""
    rest = Rest(8, 1.0, 8.0, 0.02)
    plans = {
        Update(n, 0.8 / n**0.5, 0.0, rest): [Plan(8.0 / e, 8.0, tuple(np.arange(3) for _ in range(e))) for e in (8 - n,)] for n in (1, 2, 4)
    }
    sizes = size_together(plans, FASTEST)
    assert sizes.update.slots == 1 and "s, the rest on 8 slots: step of" in sizes.reason
    whole = {Update(update.slots, 10 * update.seconds, 0.0, rest): some for update, some in plans.items()}
    assert size_together(whole, FASTEST).update.slots == 4


def test_the_part_that_ends_first_gets_no_further_slots() -> None:
    lengths = np.full(7, 100.0)
    alone_s = SPEED.rollout_s(lengths, np.zeros(7))
    for seconds, engines, slots in ((10 * alone_s, 1, 4), (0.01 * alone_s, 7, 1)):
        updates = [Update(n, seconds / n) for n in (1, 2, 4)]
        plans = {update: frontier(lengths, SPEED, max_actors=8 - update.slots) for update in updates}
        sizes = size_together(plans, FASTEST)
        assert (sizes.plan.actors, sizes.update.slots) == (engines, slots)
        told = f"{slots} slot{'s' * (slots > 1)} for an update of {seconds / slots:.3g} s beside {engines} engine"
        assert told in sizes.reason and "s beside " in sizes.reason.split("(")[1]


def test_the_learner_keeps_its_slots_if_others_save_next_to_nothing() -> None:
    plan = [Plan(1.0, 1.0, (np.arange(3),))]
    plans = {Update(1, 2.0): plan, Update(2, 0.995): plan}  # 2 s for 3, and 1 s for 3
    assert size_together(plans, CHEAPEST).update.slots == size_together(plans, CHEAPEST, 2).update.slots == 2
    assert size_together(plans, FASTEST, 1).update.slots == 2
    near = {Update(1, 2.0): plan, Update(2, 1.01): plan}
    assert size_together(near, CHEAPEST).update.slots == 1
    assert size_together(near, CHEAPEST, 2).update.slots == 2, "2 % more slot-seconds are no reason to move"
    assert size_together(near, CHEAPEST, 3).update.slots == 1, "nobody can keep what is not possible"


def test_without_plans_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="no plans"):
        size_together({Update(1, 1.0): []}, MIDDLE)
