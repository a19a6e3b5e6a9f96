"""Lanes in the simulator: against the planner's closed form, within the devices, and only where they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placement.planning.lanes import with_survivors
from placement.planning.plan import Plan, Pool
from placement.planning.workload import RolloutWorkload
from placement.simulate import POLICIES, PhaseTimes, Setting, StepPlanSettings, parse, simulate
from placement.simulate.elastic_policy import elastic
from placement.simulate.lane_policy import LANES, is_possible, ours_with_lanes
from placement.simulate.rollout.fixed import random_split
from placement.simulate.rollout_with_lane import roll_out_with_lane
from placement.simulate.simulate_step import Lane, StepInput


def small(**changes: object) -> Setting:
    tree = {"like": "qwen3b-gsm8k-grpo", "nodes": 1, "prompts": 8, "samples": 4, "epochs": 1, "tensor_parallel": "auto"}
    return parse({**tree, **changes})


def step(seed: int = 0, n: int = 32) -> StepInput:
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.6, n).round() + 1
    return StepInput(lengths, np.full(n, 100.0), np.arange(n) // 4, np.repeat(lengths[:, None], 4, axis=1), seed)


@pytest.mark.parametrize(("started", "survivors"), [(0, 5), (6, 0), (6, 3)])
def test_a_static_rollout_takes_what_the_planner_expects(started: int, survivors: int) -> None:
    """Nothing moves before the survivors do, which the simulator notices a decision later at most."""
    times, given, lane = PhaseTimes.from_setting(small()), step(), Lane(4, 1, started, survivors)
    wide = times.at(4)
    done = roll_out_with_lane(wide, lane, times.at(1), given, "random", engines=8, prefer=1.0, wake_s=0.0, transfer_s=0.0)
    order = np.argsort(-given.lengths, kind="stable")
    inside, outside = order[:started], np.sort(order[started:])
    split = random_split(len(outside), 4 if started else 8, given.seed)
    groups = [outside[split == a] for a in range(split.max() + 1)]
    opens_s = wide.wake_s + wide.reshard_s
    pools = [
        Pool(times.speed, max_actors=8),
        Pool(replace(wide.speed, prefill_s=wide.prefill_s(1.0, 1)), devices=4, start_s=0.0 if started else opens_s),
    ]
    work = RolloutWorkload.from_arguments(given.lengths, pools=pools, prompts=given.prompts)
    plan = Plan(0.0, 0.0, tuple([*([inside] if started else []), *groups]), (1,) * bool(started) + (0,) * len(groups))
    prefilled_s = wide.prefill_s(1.0, 1) * given.prompts[inside].sum()  # the simulator counts the prompts' prefill once for all
    if survivors:
        moved = with_survivors(work, plan, 1, survivors)
        assert moved is not None
        expected_s = moved.time_s
    else:
        expected_s = work.evaluate(plan.groups, plan.pools)[0]
    late_s = 0.02 * times.setting.response_limit * times.speed.base_s + times.setting.phases["migration_pause_s"]
    assert expected_s - prefilled_s - 1e-6 <= done.result.time_s <= expected_s + late_s


@pytest.mark.parametrize("lane", [Lane(4, 1, 6, 4), Lane(4, 1, 0, 8), Lane(2, 2, 4, 2)])
def test_a_step_with_a_lane_holds_no_more_than_its_devices(lane: Lane) -> None:
    times, given = PhaseTimes.from_setting(small()), step(1)
    plan = StepPlanSettings(times.devices, 0.9, 0, times.devices, width=1, lane=lane)
    done = elastic(times, given, plan)
    assert done.most_devices <= times.devices
    assert done.moves >= (lane.survivors if not lane.started else 0)
    alone = [wide.speed.rollout_s(given.lengths[[k]], given.prompts[[k]]) for wide in (times.at(lane.width),) for k in range(32)]
    assert done.rollout_s >= max(alone)
    assert f"a lane of {lane.engines} of {lane.width} devices" in plan.reason


def test_lanes_are_wider_and_leave_room_for_others() -> None:
    times = PhaseTimes.from_setting(small())
    plan = StepPlanSettings(8, 0.9, 0, 8, width=1, lane=Lane(4, 1, 6, 4))
    assert is_possible(times, plan)
    for wrong in (Lane(4, 2, 6, 4), Lane(1, 1, 6, 4), Lane(4, 1, 0, 0), Lane(4, 1, 30, 4)):
        assert not is_possible(times, replace(plan, lane=wrong)), wrong
    assert not is_possible(times, replace(plan, narrow=True))


@pytest.mark.slow
def test_lanes_are_taken_where_they_pay_and_are_not_said_to_be_built() -> None:
    assert LANES not in POLICIES and "not built" in LANES
    setting = small(prefer=0.3)
    slower = setting.but(device=replace(setting.device, reduce_latency_s=70e-6))
    for one, with_lane in ((setting, 0), (slower, 1)):
        run = simulate(one, ["ours", (LANES, ours_with_lanes)], 2)
        own, laned = run.policies["ours"].steps, run.policies[LANES].steps
        assert sum("with a lane" in step.reason for step in laned) == with_lane
        for a, b in zip(own, laned, strict=True):
            assert "with a lane" in b.reason or (a.time_s, a.full) == (b.time_s, b.full), "without a lane it is the plan of `ours`"
