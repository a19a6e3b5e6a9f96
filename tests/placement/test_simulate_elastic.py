"""The parts of an elastic step: engines that stay awake, the learner's memory, and the search of its plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from placement.simulate import PhaseTimes, parse, simulate
from placement.simulate.elastic_policy import elastic
from placement.simulate.plan_candidates import candidates, neighbours
from placement.simulate.plan_search import Planner
from placement.simulate.setting import Setting
from placement.simulate.simulate_run import Forecasts, workload_of
from placement.simulate.simulate_step import StepInput, StepPlanSettings, StepRun, all_phases
from tests.placement.held_devices import most_devices


def setting(**changes: object) -> Setting:
    small = {"like": "qwen3b-gsm8k-grpo", "prompts": 8, "samples": 4, "nodes": 1, "steps_per_epoch": 1, "epochs": 2}
    return parse({**small, **changes})


def step_input(of: Setting, seed: int = 0) -> StepInput:
    work = workload_of(of, seed)
    g = work.lengths.shape[2]
    scenarios = Forecasts(of, seed).scenarios(work, 0)
    group = np.repeat(np.arange(of.prompts), g)
    return StepInput(work.lengths[0].ravel(), np.repeat(work.prompt_tokens[0], g), group, scenarios, seed)


# ---- engines that stay awake ------------------------------------------------------------------------------------


def test_an_engine_stays_awake_in_what_the_learner_leaves() -> None:
    """Qwen2.5-3B learning on 8 L40S: 4 bytes of weights and gradients, 2 of the reference, 12/8 of optimizer per parameter in
    80 % of 48 GB; beside it the engine's weights; the rest is KV at 36,864 bytes per token."""
    times = PhaseTimes.from_setting(setting())
    n = times.setting.model.parameters
    room = 0.8 * 48e9 - n * (4 + 2 + 12 / 8) - 2 * n
    assert times.awake_capacity(8) == int(room // 36864) > 3072
    tight = PhaseTimes.from_setting(setting(model="qwen2.5-7b", nodes=2))
    assert tight.awake_capacity(16) == 0, "weights and gradients of 7B leave no room"
    roomy = tight.learner(awake=True)
    assert tight.trainer.sharding(16).name != "all" and roomy.trainer.sharding(16).name == "all", "so it shards more"
    assert roomy.fits(16) and roomy.awake_capacity(16) > 3072


def test_awake_engines_only_wait_for_weights() -> None:
    of = setting(prompts=32)  # learns for longer than a wake-up takes
    times, view = PhaseTimes.from_setting(of), step_input(of)
    plan = StepPlanSettings(8, 0.9, 0, 8)
    awake, asleep = (elastic(times, replace(view, cache={}), plan, rollout="random", prewarmed=p) for p in (True, False))
    assert asleep.rollout_s - awake.rollout_s == pytest.approx(times.wake_s)


def test_a_start_longer_than_the_learning_delays_the_step() -> None:
    """A cold start of 59 s cannot hide beside a second of learning, whoever's devices it takes."""
    of = setting(cold=True)
    times, view = PhaseTimes.from_setting(of), step_input(of)
    for plan in (StepPlanSettings(4, 0.9, 4, 4), StepPlanSettings(8, 0.9, 0, 8)):
        assert elastic(times, replace(view, cache={}), plan).time_s >= 59.0


def test_no_plan_takes_more_memory_than_there_is() -> None:
    times = PhaseTimes.from_setting(setting(algorithm="ppo", model="qwen2.5-7b", nodes=2, samples=1, prompts=32))
    room = 0.8 * 48e9
    tried = candidates(times)
    assert any(k.hosted for k in tried)
    for plan in {*tried, *(near for k in tried[::7] for near in neighbours(times, k))}:
        learner = times.learner(awake=plan.awake, hosted=plan.hosted)
        assert all(learner.trainer.held_bytes(m) <= room for m in (plan.early, plan.late) if m)
        assert 1 <= plan.engines <= 16 and plan.early <= 15 and plan.late <= 16 and 0 <= plan.prefer <= 1


def test_a_hosted_optimizer_leaves_room_for_whole_weights_and_is_waited_for() -> None:
    """Qwen2.5-7B on 8 L40S: 4 bytes of whole weights (its own, the reference) and 14/8 of the rest per parameter are more than
    80 % of 48 GB, so everything is sharded; without the optimizer's 12/8 only gradients are. Each update fetches those."""
    times = PhaseTimes.from_setting(setting(model="qwen2.5-7b", nodes=2))
    n, hosted = times.setting.model.parameters, times.learner(hosted=True)
    assert n * (4 + 14 / 8) > 0.8 * 48e9 > n * (4 + 2 / 8)
    assert times.trainer.sharding(8).name == "all" and hosted.trainer.sharding(8).name == "optimizer and gradients"
    assert hosted.trainer.held_bytes(8) == pytest.approx(n * (4 + 2 / 8))
    three, one = (replace(kind.trainer, half_efficiency_tokens=0.0).train_s(1e3, 8) for kind in (times, hosted))
    assert one == pytest.approx(three / 3)  # transfers
    fetched = 12 * n / 8 / times.setting.device.host_bytes_per_s
    assert hosted.update_s(8, 0.0) == pytest.approx(times.update_s(8, 0.0) + fetched)
    two = PhaseTimes.from_setting(setting(model="qwen2.5-7b", nodes=2, algorithm="ppo", samples=1)).learner(hosted=True)
    kind = two.trainer.sharding(16)  # policy and critic whole, the reference gathered in one of three forward passes
    assert kind.per_forward == pytest.approx(1 / 3) and kind.per_training == 1
    assert two.trainer.held_bytes(16) == pytest.approx(n * (4 + 6 / 16)) and two.fits(16)


# ---- the search ---------------------------------------------------------------------------------------------------


def test_the_search_goes_on_from_the_best_candidate_to_better_plans_beside_it() -> None:
    """On a made-up step whose time and cost fall towards 5 engines and 6 devices that learn, neither of which is a candidate."""
    times, view = PhaseTimes.from_setting(setting(nodes=2)), step_input(setting(nodes=2))

    def made(_: StepInput, k: StepPlanSettings) -> StepRun:
        off = 1.0 + abs(k.engines - 5) + abs(k.early - 6) + abs(k.late - 6)
        return StepRun("made", off, 0.0, 0.0, 0, all_phases(1, off))

    tried = candidates(times)
    assert not any((k.engines, k.early, k.late) == (5, 6, 6) for k in tried)
    planner = Planner(view, 0.75, lambda view: StepRun("base", 10.0, 0.0, 0.0, 0, all_phases(1, 10.0)))
    found = planner.search("ours", made, made, tried, partial(neighbours, times))
    assert (found.engines, found.early, found.late) == (5, 6, 6) and planner.expected == (1.0, 1.0)


# ---- devices held where starts are dear ---------------------------------------------------------------------------


def test_devices_are_held_only_where_a_lease_taken_anew_costs_more_than_waking() -> None:
    assert not any(k.held for k in candidates(PhaseTimes.from_setting(setting())))
    assert {k.held for k in candidates(PhaseTimes.from_setting(setting(cold=True)))} == {0, 4, 6, 8}


def test_a_held_step_is_that_of_a_smaller_cluster_of_warm_engines_and_bills_every_second() -> None:
    cold, small = PhaseTimes.from_setting(setting(cold=True)), PhaseTimes.from_setting(setting(devices_per_node=4))
    view, plan = step_input(setting()), StepPlanSettings(4, 0.9, 2, 4, 0.7)
    held, leased = (elastic(t, replace(view, cache={}), k) for t, k in ((cold, replace(plan, held=4)), (small, plan)))
    assert held.time_s == pytest.approx(leased.time_s) and held.busy == pytest.approx(leased.busy)
    assert held.full == pytest.approx(4 * held.time_s) and most_devices(held) == 4


@pytest.mark.slow
def test_cold_starts_are_avoided_by_holding() -> None:
    """Leases that start cold take a minute each: giving devices back loses to `fixed` on both axes, holding does not."""
    done = simulate(setting(cold=True, prefer=0.75, prompts=4, samples=2, epochs=1), ["fixed", "ours"]).policies
    assert all("held throughout" in step.reason for step in done["ours"].steps)
    assert done["ours"].step_s < 1.05 * done["fixed"].step_s and done["ours"].full < done["fixed"].full
