"""Plans with lanes against brute force: wide engines beside narrow ones, and survivors that move into them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from placement import Objective, Speed, choose, frontier
from placement.planning.lanes import LanePlan, lane_frontier, with_survivors
from placement.planning.partition import pareto
from placement.planning.plan import Plan, Pool
from placement.planning.workload import RolloutWorkload

pytestmark = pytest.mark.pure
NARROW, WIDE = Speed(0.02, 4e-4, 1e-6, 1e-4), Speed(0.011, 2e-4, 5e-7, 5e-5)


def pools(slots: int = 4, **changes: float) -> list[Pool]:
    return [Pool(speed, max_actors=slots // width, devices=width, **changes) for width, speed in ((1, NARROW), (2, WIDE))]


def every_mix(lengths: np.ndarray, prompts: np.ndarray, slots: int) -> list[Plan]:
    """Return each split of the sequences over each mix of engines, with at most two wide ones beside narrow ones."""
    found = []
    for wide in range(slots // 2 + 1):
        speeds = [WIDE] * wide + [NARROW] * (slots - 2 * wide)
        price = [2.0] * wide + [1.0] * (slots - 2 * wide)
        for dealt in itertools.product(range(len(speeds)), repeat=len(lengths)):
            groups = [np.flatnonzero(np.array(dealt) == k) for k in range(len(speeds))]
            seconds = [speed.rollout_s(lengths[g], prompts[g]) for speed, g in zip(speeds, groups, strict=True)]
            found.append(Plan(max(seconds), float(np.dot(price, seconds)), ()))
    return pareto(found)


@pytest.mark.parametrize("seed", range(8))
def test_no_mix_of_widths_beats_the_frontier(seed):
    rng = np.random.default_rng(seed)
    lengths, prompts = rng.lognormal(5, 1, 5).round() + 1, rng.integers(1, 50, 5).astype(float)
    plans = lane_frontier(lengths, pools(), 4, prompts=prompts)
    for best in every_mix(lengths, prompts, 4):
        assert any(plan.time_s <= best.time_s * (1 + 1e-9) and plan.cost <= best.cost * (1 + 1e-9) for plan in plans)


def test_slots_are_shared_by_both_widths_and_every_sequence_has_one_engine():
    rng = np.random.default_rng(3)
    lengths, given = rng.lognormal(5, 1, 40).round() + 1, pools(6)
    plans = lane_frontier(lengths, given, 6, thin=0.01)
    lanes = [plan for plan in plans if isinstance(plan, LanePlan)]
    assert {plan.survivors > 0 for plan in lanes} == {True, False}
    for plan in plans:
        assert sum(given[k].devices for k in plan.pools) <= 6
        assert sorted(np.concatenate(plan.groups).tolist()) == list(range(40))


def test_plans_of_one_width_stay_candidates_to_the_bit():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, (20, 8)).round() + 1
    for width, pool in zip((1, 2), pools(), strict=True):
        alone = lane_frontier(lengths, [pool], 4)
        assert [(p.time_s, p.cost) for p in alone] == [(p.time_s, p.cost) for p in frontier(lengths, pools=[pool])]
        mixed = lane_frontier(lengths, pools(), 4)
        for plan in alone:
            assert any(one.time_s <= plan.time_s and one.cost <= plan.cost for one in mixed), (width, plan.time_s)


def decode(engines: list[list[list[float]]], speeds: list[Speed], setups: list[float], until, dt: float = 0.002):
    """Advance engines of [prompt, length, made] in small slices of time until `until(engines)`. Returns (time, ends)."""
    clock, ends = 0.0, [0.0] * len(engines)
    ready = [setup + speed.prefill_s * sum(one[0] for one in engine) for engine, speed, setup in zip(engines, speeds, setups, strict=True)]
    while not until(engines):
        clock += dt
        for k, (engine, speed) in enumerate(zip(engines, speeds, strict=True)):
            live = [one for one in engine if one[2] < one[1]]
            if clock < ready[k] or not live:
                continue
            step = speed.step_s(len(live), sum(one[0] + one[2] for one in live))
            for one in live:
                one[2] = min(one[1], one[2] + dt / step)
            if all(one[2] >= one[1] for one in live):
                ends[k] = clock
    return clock, ends


@pytest.mark.parametrize("lane", [(), (0,)])
def test_survivors_take_what_decoding_in_small_slices_takes(lane):
    lengths, prompts = np.array([260.0, 200, 90, 70, 40, 30]), np.array([30.0, 5, 10, 20, 5, 5])
    given = pools(start_s=0.3)
    work = RolloutWorkload.from_arguments(lengths, pools=given, prompts=prompts)
    groups = [*([np.array(lane)] if lane else []), np.array([1, 2]), np.array([3, 4, 5] if lane else [0, 3, 4, 5])]
    moved = with_survivors(work, Plan(0.0, 0.0, tuple(groups), (1,) * len(lane) + (0, 0)), 1, 1)
    engines = [[[prompts[i], lengths[i], 0.0] for i in group] for group in groups]
    speeds = [WIDE] * len(lane) + [NARROW, NARROW]
    setups = [0.3] * len(engines)

    def one_left(now) -> bool:
        return sum(one[2] < one[1] for engine in now[len(lane) :] for one in engine) <= 1

    at_s, ends = decode(engines, speeds, setups, one_left)
    joined = [one for engine in engines[len(lane) :] for one in engine if one[2] < one[1]]
    own = [one for one in engines[0] if one[2] < one[1]] if lane else []
    again_s = WIDE.prefill_s * sum(one[0] + one[2] for one in joined)
    lane_setup = [again_s + (0.0 if lane else 0.3)]
    end_s, _ = decode([[*joined, *own]], [replace(WIDE, prefill_s=0.0)], lane_setup, lambda now: all(one[2] >= one[1] for one in now[0]))
    end_s += at_s
    narrow = sum(end or at_s for end in ends[len(lane) :])
    assert moved is not None and moved.time_s == pytest.approx(end_s, rel=0.01)
    assert moved.cost == pytest.approx(2 * (end_s if lane else end_s - at_s) + narrow, rel=0.01)


def test_a_lane_wins_where_few_responses_are_long_and_the_reason_names_it():
    lengths, given, goal = np.concatenate(([900.0], np.full(31, 90.0))), pools(8), Objective(prefer=0.8)
    plans = lane_frontier(lengths, given, 8)
    one_width = [plan for pool in given for plan in frontier(lengths, pools=[pool])]
    plan = choose(plans, goal).plan
    assert isinstance(plan, LanePlan) and choose([*one_width, plan], goal).plan is plan
    assert plan.reason(given) == "a lane of 1 engine of 2 slots for 1 likely-long response, and 1 engine of 1 slot for the rest"
    later = replace(plan, groups=plan.groups[1:], pools=(0,), survivors=1)
    assert later.reason(given) == "a lane of 1 engine of 2 slots for the last 1 of the others, and 1 engine of 1 slot for the rest"


def test_a_lane_that_cannot_hold_the_survivors_is_left_out():
    lengths = np.array([100.0, 90, 80, 10])
    given = [Pool(NARROW, max_actors=4), Pool(WIDE, max_actors=2, devices=2, capacity=150)]
    work = RolloutWorkload.from_arguments(lengths, pools=given)
    spread = Plan(0.0, 0.0, tuple(np.array([k]) for k in range(4)), (0,) * 4)
    assert with_survivors(work, spread, 1, 1) is not None
    assert with_survivors(work, spread, 1, 3) is None, "270 tokens in 150"
    assert with_survivors(work, spread, 1, 4) is None, "no more than these are outside"
