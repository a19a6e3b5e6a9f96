"""The width of engines: the choice among all frontiers, when it pays back, and speeds of widths that were not measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from placement import Objective, Speed, frontier
from placement.planning.plan import Plan, Pool
from placement.scaling.engine_width import best_width, decide_width, scale_speed

pytestmark = pytest.mark.pure
SPEEDS = {1: Speed(0.02, 4e-4), 2: Speed(0.012, 2e-4), 4: Speed(0.009, 1e-4)}


def frontiers(lengths: np.ndarray, slots: int) -> dict[int, list[Plan]]:
    pools = {width: Pool(speed, max_actors=slots // width, devices=width) for width, speed in SPEEDS.items() if width <= slots}
    return {width: frontier(lengths, pools=[pool]) for width, pool in pools.items()}


def every_plan(lengths: np.ndarray, slots: int) -> list[tuple[float, float]]:
    """Return (time, cost) of each split of the sequences, at each width."""
    found = []
    for width, speed in SPEEDS.items():
        for dealt in itertools.product(range(slots // width), repeat=len(lengths)):
            seconds = [speed.rollout_s(lengths[np.array(dealt) == engine]) for engine in range(slots // width)]
            found.append((max(seconds), width * sum(seconds)))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all_widths_and_splits(seed):
    rng = np.random.default_rng(seed)
    lengths, slots = rng.lognormal(4, 1, 5).round() + 1, 4
    plans, found = frontiers(lengths, slots), every_plan(lengths, slots)
    fastest, cheapest = min(time for time, _ in found), min(cost for _, cost in found)
    for prefer in (0.0, 0.5, 0.8, 1.0):
        width, choice = best_width(plans, Objective(prefer=prefer))
        assert any(choice.plan is plan for plan in plans[width])

        def score(time: float, cost: float, prefer: float = prefer) -> float:
            return prefer * time / fastest + (1 - prefer) * cost / cheapest

        assert score(choice.plan.time_s, choice.plan.cost) == pytest.approx(min(score(*one) for one in found))


def plan(time_s: float, cost: float, engines: int = 1) -> Plan:
    return Plan(time_s, cost, tuple(np.array([k]) for k in range(engines)))


def test_a_change_must_pay_back_and_says_why_not():
    figures = {"value_per_s": 2.0, "gamma": 0.5}
    slow, fast = plan(10.0, 20.0, 2), plan(5.0, 20.0)
    pays = decide_width(1, slow, 2, fast, start_s=4.0, lasts=4, **figures)  # saves 10 a step for (2 + 2) · 4 = 16
    assert (
        pays.width == 2
        and "engines of 2 slots instead of 1" in pays.reason
        and "saves the worth of 10 slot-s a step for 16 once" in pays.reason
    )
    later = decide_width(1, slow, 2, fast, start_s=4.0, lasts=3, **figures)
    assert later.width == 1 and "pays back in 1.6 steps, but must within 1.5" in later.reason
    little = decide_width(1, slow, 2, plan(9.9, 20.0), start_s=0.0, lasts=100, **figures)
    assert little.width == 1 and "saves 0.5% a step, less than 2%" in little.reason
    assert decide_width(1, None, 2, fast, start_s=1e9, lasts=1, **figures).width == 2, "nothing meets the objective at width 1"
    assert decide_width(2, slow, 2, slow, start_s=0.0, lasts=1, **figures).reason == "engines of 2 slots"


def test_the_speed_of_another_width_keeps_what_was_measured():
    measured = Speed(0.1, 1e-3, 0.0, 7e-4)
    same = scale_speed(measured, SPEEDS[1], SPEEDS[1])
    assert same == measured
    wide = scale_speed(measured, SPEEDS[1], SPEEDS[2])
    assert wide.base_s == pytest.approx(0.06) and wide.per_seq_s == pytest.approx(5e-4) and wide.prefill_s == 7e-4
