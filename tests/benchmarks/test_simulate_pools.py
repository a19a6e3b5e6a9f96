"""Steps on own and preemptible devices: what is held and billed, losses, seeding, fallback, and RLBoost's rule."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated.instance_counts import InstanceCounts
from benchmarks.simulated.pool_rollout import Instances
from benchmarks.simulated.pool_run import Course, MixedPoolRun, PoolFigures, at_equal, fixed_figures, inputs_of
from benchmarks.simulated.pool_steps import PoolMarket, PoolPlan, PoolStep, RLBoost, TriedPlans, run_step
from placement.simulate import PhaseTimes, Setting, StepPlanSettings, parse
from placement.simulate.one_step_off import fixed_split
from placement.simulate.simulate_step import StepInput

TRACE = InstanceCounts(np.array([0.0, 100.0, 250.0]), np.array([3, 1, 2]), 400.0)
NONE = InstanceCounts.constant(0)


def small(lag: int = 1, **changes: object) -> Setting:
    tree = {"like": "qwen3b-gsm8k-grpo", "prompts": 4, "samples": 4, "nodes": 1, "max_lag_steps": lag, "tensor_parallel": 1}
    return parse({**tree, **changes})


def two_responses() -> StepInput:
    """Of 100 and 50 tokens after 10; 1,000 tokens are learned beside them."""
    return StepInput(np.array([100.0, 50.0]), np.array([10.0, 10.0]), np.zeros(2, int), np.full((2, 4), 75.0), learned_tokens=1000.0)


def test_an_availability_repeats() -> None:
    assert [TRACE.at(t) for t in (0, 99, 100, 300, 400, 520)] == [3, 3, 1, 2, 3, 1]
    assert [TRACE.next_change(t) for t in (0, 100, 260, 420)] == [100, 250, 400, 500]
    assert TRACE.scaled(6).at(120) == 2 and InstanceCounts.constant(4).next_change(1e9) == math.inf


def test_instances_are_billed_while_they_are_held() -> None:
    held = Instances(TRACE, 0.0, 2, 59.0, np.random.default_rng(0))
    assert held.advance(50.0) == [] and held.held_s == 100.0
    lost = held.advance(200.0)
    assert len(lost) == 1 and held.held_s == 2 * 100.0 + 100.0
    held.advance(300.0)
    assert len(held.since) == 2 and held.since[lost[0]] == 250.0 and held.losses == 1
    held.use(1)
    assert list(held.since.values()) == [-math.inf], "the newest is given up"


def test_own_engines_beside_the_learner_are_one_step_off() -> None:
    times, given = PhaseTimes.from_setting(small()), two_responses()
    market = PoolMarket(8, 8, NONE, 0, 0.3)
    done = run_step(times, given, PoolPlan(6, 2, 0, 1, 0.0), market, market.holdings(1, 0.0, 0))
    fixed = fixed_split(times, given, StepPlanSettings(2, 1.0, 0, 6))
    assert done.time_s == pytest.approx(fixed.time_s) and done.money == pytest.approx(fixed.full) and done.stall_s == 0


def test_preemptible_engines_cost_their_price() -> None:
    times, given = PhaseTimes.from_setting(small()), two_responses()
    market = PoolMarket(8, 8, InstanceCounts.constant(2), 2, 0.25)
    done = run_step(times, given, PoolPlan(6, 0, 2, 1, 0.0), market, market.holdings(1, 0.0, 0))
    assert done.money == pytest.approx((6 + 2 * 0.25) * done.time_s) and done.lost == 0


def test_what_a_lost_instance_had_goes_on_elsewhere() -> None:
    times, given = PhaseTimes.from_setting(small()), two_responses()
    market = PoolMarket(8, 8, InstanceCounts.constant(2), 2, 0.25)
    plan = PoolPlan(6, 0, 2, 1, 0.0)
    whole = run_step(times, given, plan, market, market.holdings(1, 0.0, 0))
    at_s = whole.rollout_s - 0.2
    shrinks = replace(market, trace=InstanceCounts(np.array([0.0, at_s]), np.array([2, 1]), 1e6))
    costs = {seed: run_step(times, given, plan, shrinks, shrinks.holdings(1, 0.0, seed)) for seed in range(6)}
    assert {done.lost for done in costs.values()} == {0, 1}, "either engine may be lost; the short response has ended"
    for done in costs.values():
        assert done.moves == done.lost and (done.rollout_s > whole.rollout_s) == bool(done.lost)
    late = next(done for done in costs.values() if done.lost)
    warned = replace(shrinks, notice_s=5.0)
    seed = next(seed for seed, done in costs.items() if done.lost)
    assert run_step(times, given, plan, warned, warned.holdings(1, 0.0, seed)).rollout_s < late.rollout_s, "nothing is generated again"


@pytest.mark.parametrize("lag", [0, 1])
def test_the_learner_s_devices_go_on_when_everything_preemptible_is_gone(lag: int) -> None:
    times, given = PhaseTimes.from_setting(small(lag)), two_responses()
    market = PoolMarket(8, 8, InstanceCounts(np.array([0.0, 2.4]), np.array([2, 0]), 1e6), 2, 0.25)
    done = run_step(times, given, PoolPlan(6, 0, 2, 1, 0.0), market, market.holdings(1, 0.0, 0))
    assert done.lost == 2 and done.stall_s > 0 and math.isfinite(done.time_s)
    alone = run_step(times, given, PoolPlan(6, 0, 0, 1, 1.0), market, market.holdings(1, 10.0, 0))
    assert alone.stall_s == 0 and alone.lost == 0


def test_seeding_takes_the_learner_s_time_and_shortens_the_rollout() -> None:
    setting = small(0, prompts=32, samples=8)
    times, given = PhaseTimes.from_setting(setting), inputs_of(setting, 1, 0)[0]
    market = PoolMarket(8, 12, InstanceCounts.constant(4), 4, 0.25)
    steps = [run_step(times, given, PoolPlan(8, 0, 4, 1, share), market, market.holdings(1, 0.0, 0)) for share in (0.0, 0.9, 1.0)]
    assert steps[0].rollout_s > steps[1].rollout_s and steps[0].rollout_s > steps[2].rollout_s
    assert steps[0].moves == 0 < steps[2].moves < steps[1].moves, "engines that join take over, and those that leave hand over"


def test_rlboost_moves_its_seeding_by_a_third_of_the_waits() -> None:
    policy = RLBoost(1, seed_s=60.0)
    step = PoolStep(time_s=100.0, rollout_s=70.0, money=0.0, learner_idle_s=90.0, lost=0, moves=0, stall_s=0.0)
    policy._adjust(step, 2, 10.0)
    assert policy.seed_s == pytest.approx(60 + (90 - 30) / 3)
    policy._adjust(step, 2, 12.0)
    assert policy.peak_s == pytest.approx(80.0)
    policy._adjust(step, 2, 11.0)  # slower: the best time so far is remembered
    assert policy.best[2] == pytest.approx(80.0)
    policy._adjust(step, 3, 11.0)
    policy._adjust(step, 2, 11.0)
    assert policy.seed_s == policy.best[2]
    policy._adjust(replace(step, learner_idle_s=0.0, rollout_s=-1e6), 5, 1.0)
    assert policy.seed_s == 5.0


def test_plans_know_no_length_of_the_step() -> None:
    setting = small(prompts=16)
    times, given = PhaseTimes.from_setting(setting), inputs_of(setting, 1, 0)[0]
    swapped = replace(given, lengths=given.lengths[::-1] * 2)
    market = PoolMarket(8, 8, InstanceCounts.constant(3), 3, 0.3)
    plans = [TriedPlans(times, market).best(one, {1: 3}, 0.75) for one in (given, swapped)]
    assert plans[0] == plans[1]


def test_runs_repeat_and_cheap_devices_save_money() -> None:
    setting, course = small(prompts=16, nodes=2), Course(moments=2, steps=1)
    trace = InstanceCounts(np.array([0.0, 300.0]), np.array([8, 4]), 600.0)
    base = fixed_figures(setting, course, 1)
    runs = [MixedPoolRun(setting, PoolMarket(16, 16, trace, 8, 1 / 3), course, 1).ours(0.5) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0].over(base)["saving"] > 0.1
    assert MixedPoolRun(setting, PoolMarket(16, 16, trace, 8, 1 / 3), course, 1).rlboost().step_s > 0
    with pytest.raises(ValueError, match="the learner needs"):
        MixedPoolRun(setting, PoolMarket(16, 16, trace, 15, 1 / 3), course, 1)


def test_equal_money_and_equal_time_are_chosen_apart() -> None:
    base = PoolFigures(10.0, 100.0, 50.0)
    found = [PoolFigures(5.0, 110.0, 100.0), PoolFigures(8.0, 99.0, 62.5), PoolFigures(10.02, 60.0, 49.9), PoolFigures(20.0, 30.0, 25.0)]
    assert at_equal(found, base) == pytest.approx({"speedup": 1.25, "saving": 0.4})
    assert math.isnan(at_equal(found[:1], base)["speedup"])
