from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Pool, Speed, frontier, rollout_bounds
from placement.planning.bounds import CostBound
from placement.planning.workload import RolloutWorkload


def cost_bound(lengths: np.ndarray, speed: Speed, time_s: float, **arguments: float) -> float:
    """The least cost of any plan within `time_s`, by filling actors with fractions of sequences."""
    work = RolloutWorkload.from_arguments(lengths, speed, **arguments)
    return CostBound(work, 0, work.kinds[0]).cost(time_s)


LENGTHS = st.lists(st.integers(1, 1500), min_size=1, max_size=60).map(lambda values: np.array(values, float))
SPEED = st.builds(Speed, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.sampled_from([0.0, 1e-6]))


@given(LENGTHS, SPEED, st.integers(1, 12), st.sampled_from([0.0, 0.4]), st.one_of(st.none(), st.floats(1, 4)))
@settings(deadline=None, max_examples=60)
def test_no_plan_beats_the_bounds(lengths: np.ndarray, speed: Speed, actors: int, transfer_s: float, room: float | None) -> None:
    capacity = None if room is None else math.ceil(room * (lengths.max() + 7))
    given_arguments = {"capacity": capacity, "prompts": 7.0, "transfer_s": transfer_s, "price": 2.0}
    plans = frontier(lengths, speed, max_actors=actors, **given_arguments)
    bounds = rollout_bounds(lengths, speed, actors, **given_arguments)
    assert all(plan.time_s >= bounds.time_s * (1 - 1e-8) and plan.cost >= bounds.cost * (1 - 1e-9) for plan in plans)
    for plan in plans if capacity is None else []:
        least = cost_bound(lengths, speed, plan.time_s, max_actors=actors, prompts=7.0, transfer_s=transfer_s, price=2.0)
        assert plan.cost >= least * (1 - 1e-8)


@given(LENGTHS, SPEED, st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_filling_is_the_sharpest_and_the_simple_ones_are_met(lengths: np.ndarray, speed: Speed, actors: int) -> None:
    bounds = rollout_bounds(lengths, speed, actors)
    alone = max(speed.rollout_s(lengths[i : i + 1]) for i in range(len(lengths)))
    everything = speed.rollout_s(lengths)
    assert bounds.time_s >= max(alone, everything / actors) * (1 - 1e-9)
    assert bounds.cost == pytest.approx(everything)
    assert cost_bound(lengths, speed, bounds.time_s * (1 - 1e-6), max_actors=actors) == math.inf
    assert math.isfinite(cost_bound(lengths, speed, bounds.time_s * (1 + 1e-6), max_actors=actors))


def test_many_short_responses_meet_the_bound() -> None:
    """With hundreds of sequences the frontier comes within a percent of what no partition can beat, at every time."""
    rng = np.random.default_rng(0)
    lengths, speed = rng.lognormal(5.3, 0.4, 2000).round() + 1, Speed(0.0085, 3e-5)
    plans = frontier(lengths, speed, max_actors=16, thin=0.005)
    assert plans[0].time_s < 1.01 * rollout_bounds(lengths, speed, 16).time_s
    for plan in plans:
        assert plan.cost < 1.02 * cost_bound(lengths, speed, plan.time_s, max_actors=16)


def test_waves_are_counted() -> None:
    """Ten equal responses of which a cache holds two: five maxima, wherever they run."""
    lengths = np.full(10, 100.0)
    bounds = rollout_bounds(lengths, Speed(0.01, 0.001), 5, capacity=200)
    assert bounds.cost == pytest.approx(5 * 0.01 * 100 + 0.001 * 1000)
    assert frontier(lengths, Speed(0.01, 0.001), max_actors=5, capacity=200)[-1].cost == pytest.approx(bounds.cost)


def test_scenarios_are_bounded_by_their_mean() -> None:
    rng = np.random.default_rng(1)
    lengths, speed = rng.lognormal(4, 0.6, (9, 20)).round() + 1, Speed(0.02, 0.001)
    each = [rollout_bounds(lengths[:, s], speed, 3) for s in range(20)]
    whole = rollout_bounds(lengths, speed, 3)
    assert whole.time_s == pytest.approx(np.mean([b.time_s for b in each]))
    assert whole.cost == pytest.approx(np.mean([b.cost for b in each]))
    assert all(p.time_s >= whole.time_s and p.cost >= whole.cost * (1 - 1e-9) for p in frontier(lengths, speed, max_actors=3))


@given(LENGTHS, st.lists(st.builds(Pool, SPEED, price=st.floats(0.2, 3), max_actors=st.integers(1, 4)), min_size=2, max_size=3))
@settings(deadline=None, max_examples=25)
def test_several_pools(lengths: np.ndarray, pools: list[Pool]) -> None:
    bounds = rollout_bounds(lengths, pools=pools)
    for plan in frontier(lengths, pools=pools, thin=0.02):
        assert plan.time_s >= bounds.time_s * (1 - 1e-9) and plan.cost >= bounds.cost * (1 - 1e-9)


def test_which_argument_gave_the_bound() -> None:
    assert rollout_bounds(np.array([900.0, 1, 1]), Speed(0.01, 0.001), 3).reason == "longest response alone"
    assert rollout_bounds(np.full(50, 100.0), Speed(0.0, 0.001), 3).reason == "work over actors"
    assert rollout_bounds(np.array([100.0] * 30 + [90.0] * 30), Speed(0.02, 0.001), 3).reason == "filling"
