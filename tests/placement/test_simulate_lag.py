"""Steps with a bound on the lag: synchronous ones unchanged, times by hand, what is billed, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placement.simulate import POLICIES, PhaseTimes, Setting, StepPlanSettings, parse, policies_of, simulate
from placement.simulate.ahead import step_ahead
from placement.simulate.one_step_off import as_built, fixed_split
from placement.simulate.partial_rollout import InFlight, PartialGeneration
from placement.simulate.simulate_run import workload_of
from placement.simulate.simulate_step import StepInput
from tests.placement.held_devices import most_devices

RECORDED = Path(__file__).parent / "recorded" / "simulated_steps.json"


def small(**changes: object) -> Setting:
    tree = {"like": "qwen3b-gsm8k-grpo", "prompts": 4, "samples": 4, "nodes": 1, "steps_per_epoch": 1, "epochs": 2, "prefer": 0.7}
    return parse({**tree, **changes})


def one_response(setting: Setting) -> tuple[PhaseTimes, StepInput]:
    """Two responses to one prompt, 100 and 50 tokens after 10; 1,000 tokens are learned beside them."""
    given = StepInput(np.array([100.0, 50.0]), np.array([10.0, 10.0]), np.zeros(2, int), np.full((2, 4), 75.0), learned_tokens=1000.0)
    return PhaseTimes.from_setting(setting), given


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_without_a_lag_every_step_is_the_one_of_before(algorithm: str) -> None:
    """Time, cost and work of each step, as recorded with the same device model."""
    run = simulate(small(algorithm=algorithm), seed=3)
    found = {name: [[s.time_s, s.full, s.busy] for s in done.steps] for name, done in run.policies.items()}
    assert found == json.loads(RECORDED.read_text())[algorithm]
    assert all(s.lag == (1.0,) for done in run.policies.values() for s in done.steps)


def test_fixed_one_step_off_takes_as_long_as_the_slower_pool() -> None:
    times, given = one_response(small())
    for m in (2, 7):
        done = fixed_split(times, given, StepPlanSettings(times.devices - m, 1.0, 0, m))
        alone = times.prefill_s(10, 2) + times.broadcast_s + times.speed.rollout_s(np.array([100.0]), np.array([10.0]))
        learn = times.broadcast_s + times.prepare_s(1000, m) + times.learn_s(1000, m)
        assert done.time_s == pytest.approx(max(alone if m == 2 else done.rollout_s, learn))
        assert done.full == pytest.approx(times.devices * done.time_s)
        assert done.lag == (0.0, 1.0)


def test_ours_computes_what_the_update_needs_before_the_rollout_begins() -> None:
    times, given = one_response(small())
    done = as_built(times, given, StepPlanSettings(1, 1.0, 0, 4), "random")
    before = times.state_s(4) + times.trainer.forward_s(1000, 4)
    rollout = times.wake_s + times.broadcast_s + times.prefill_s(10, 1) + times.speed.rollout_s(given.lengths, given.prompts)
    update = times.trainer.forward_s(1000, 4) + times.learn_s(1000, 4)
    assert rollout > update
    assert done.time_s == pytest.approx(before + rollout + times.state_s(4))
    assert done.full == pytest.approx(5 * done.time_s), "the learner, and one engine that works until the rollout ends"
    critic = PhaseTimes.from_setting(small(algorithm="ppo"))
    done = as_built(critic, given, StepPlanSettings(1, 1.0, 0, 4), "random")
    before = critic.state_s(4) + critic.prepare_s(1000, 4) + critic.learn_s(1000, 4) / 2
    assert done.time_s == pytest.approx(before + rollout + critic.state_s(4))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("width", [1, "auto"])
def test_costs_are_those_of_the_holds_which_fit_the_cluster_and_no_policy_beats_the_bounds(algorithm: str, width: int | str) -> None:
    run = simulate(small(algorithm=algorithm, max_lag_steps=1, tensor_parallel=width), seed=3)
    assert list(run.policies) == ["fixed", "ours"]
    for name, done in run.policies.items():
        for step, bound in zip(done.steps, run.bounds, strict=True):
            assert step.full == pytest.approx(sum(h.devices * (h.to_s - h.from_s) for h in step.holds)), name
            assert all(0 <= h.from_s <= h.to_s <= step.time_s + 1e-9 for h in step.holds), name
            assert most_devices(step) <= run.setting.devices and step.busy <= step.full + 1e-9, name
            assert step.time_s >= bound.time_s - 1e-9 and step.full >= bound.cost - 1e-9, name
            assert sum(step.lag) == pytest.approx(1) and len(step.lag) <= run.setting.max_lag_steps + 1, name


def test_every_batch_is_learned_once() -> None:
    setting = small(max_lag_steps=1, epochs=3)
    work, learned = workload_of(setting, 3), []

    def spy(times: PhaseTimes, given: StepInput, planner: object):
        learned.append(given.learned_tokens)
        return fixed_split(times, given, StepPlanSettings(6, 1.0, 0, 2))

    simulate(setting, [("spy", spy)], 3)
    tokens = work.lengths.sum((1, 2)) + setting.samples * work.prompt_tokens.sum(1)
    assert learned == [tokens[2], tokens[0], tokens[1]]


@pytest.mark.parametrize(
    ("change", "policies", "said"),
    [
        ({"max_lag_steps": 2}, None, "responses that end within their step are at most 1 step old, not 2; set `partial` to true"),
        ({"max_lag_steps": -1}, None, "`max_lag_steps` must be a whole number from 0 to 8, not -1"),
        ({"partial": True}, None, "a response that outlives a step is trained one step late; set `max_lag_steps` to 1 or more"),
        ({"partial": "on"}, None, "`partial` must be true or false, not 'on'"),
        ({"max_lag_steps": True}, None, "not True"),
        ({"max_lag_steps": 1}, ["oracle"], "policy `oracle` knows no lag; simulate `fixed`, `ours`"),
        ({"max_lag_steps": 1, "devices_per_node": 2}, ["fixed"], "2 devices to learn and 1 to generate at once are more than the 2"),
        ({"max_lag_steps": 1, "devices_per_node": 2}, ["ours"], "2 devices to learn and 1 to generate at once are more than the 2"),
    ],
)
def test_a_lag_that_cannot_be_simulated_is_one_sentence(change: dict, policies: list[str] | None, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        simulate(small(**change), policies)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_every_policy_of_a_lag_says_what_it_is() -> None:
    assert policies_of(small()) is POLICIES
    assert all((policy.__doc__ or "").strip() for policy in policies_of(small(max_lag_steps=1)).values())


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_partial_rollouts_keep_the_bound_and_bill_what_they_hold(lag: int) -> None:
    """Shares have one entry for each lag that the bound allows, and the whole batch is among them."""
    run = simulate(small(max_lag_steps=lag, partial=True, prompts=8), seed=3)
    for name, done in run.policies.items():
        for step in done.steps:
            assert len(step.lag) == lag + 1 and sum(step.lag) == pytest.approx(1), name
            assert step.full == pytest.approx(sum(h.devices * (h.to_s - h.from_s) for h in step.holds)), name
            assert most_devices(step) <= run.setting.devices and step.busy <= step.full + 1e-6, name


def test_a_rollout_beside_the_update_continues_under_its_weights() -> None:
    """One response: its first tokens are one version old, and its context is computed again when the update ends."""
    times = PhaseTimes.from_setting(small())
    given = StepInput(np.array([400.0]), np.array([10.0]), np.zeros(1, int), np.full((1, 4), 400.0))
    state = InFlight.empty(given, 0, 2).begin(given)
    generation = PartialGeneration(state)
    done = step_ahead(times, given, StepPlanSettings(1, 1.0, 0, 4), generation, 100_000.0, "fixed")
    update = times.trainer.forward_s(100_000, 4) + times.learn_s(100_000, 4)
    begin = times.state_s(4) + times.trainer.forward_s(100_000, 4)
    old = 400 * generation.last.lag[1]
    assert 0 < old < 400 and generation.last.trained.lengths == pytest.approx([400.0])
    beside = times.wake_s + times.broadcast_s + times.prefill_s(10, 1) + times.speed.rollout_s(np.array([old]), np.array([10.0]))
    after = times.broadcast_s + times.prefill_s(10 + old, 1) + times.speed.rollout_s(np.array([400 - old]), np.array([10.0 + old]))
    assert beside == pytest.approx(update) and done.time_s == pytest.approx(begin + update + after)
    wide = step_ahead(times, given, StepPlanSettings(times.engines, 1.0, 0, times.devices - 1), PartialGeneration(state), 40_000.0, "fixed")
    assert most_devices(wide) <= times.devices, "engines on the learner's devices wait until its state has left"


def test_a_rollout_that_ends_beside_the_update_waits_for_it() -> None:
    times, given = one_response(small())
    generation = PartialGeneration(InFlight.empty(given, 0, 2).begin(given))
    done = step_ahead(times, generation.state.step_input(given, 2048), StepPlanSettings(1, 1.0, 0, 4), generation, 1e6, "fixed")
    update = times.trainer.forward_s(1e6, 4) + times.learn_s(1e6, 4)
    assert generation.last.lag == pytest.approx((0.0, 1.0)) and len(generation.last.after.lengths) == 0
    assert done.time_s == pytest.approx(2 * times.state_s(4) + times.trainer.forward_s(1e6, 4) + update)


def test_an_update_that_ends_within_the_rounding_of_the_last_token_leaves_no_rest() -> None:
    times, given = one_response(small())
    state = InFlight.empty(given, 0, 2).begin(given)
    how = {"engines": 1, "prefer": 1.0, "wake_s": 0.0, "transfer_s": 0.0}
    end_s = PartialGeneration(state)(times, given, "fixed", **how).end_s
    cut, just = (PartialGeneration(state)(times, given, "fixed", **how, until_s=end_s * share) for share in (0.9, 1 - 1e-9))
    assert cut.trained is None and cut.rest.lengths.tolist() == pytest.approx(
        cut.after.lengths[cut.after.live] - cut.after.generated[cut.after.live]
    )
    assert just.rest is None and just.trained is not None and just.finish_s.max() == pytest.approx(end_s)


def test_a_group_that_may_not_outlive_another_step_is_waited_for() -> None:
    """Two groups of one response: the batch is one of them. The long one, begun before, is trained though the short one ends first."""
    times = PhaseTimes.from_setting(small())
    long, short = (StepInput(np.array([x]), np.array([10.0]), np.zeros(1, int), np.full((1, 4), x)) for x in (400.0, 50.0))
    state = InFlight.empty(short, 1, 2).begin(long)
    state = replace(state, drawn=np.array([[100.0, 0.0]]), age=np.array([1])).begin(short)
    generation = PartialGeneration(state)
    run = generation(times, state.step_input(short, 2048), "fixed", engines=2, prefer=1.0, wake_s=0.0, transfer_s=0.0)
    alone = times.speed.rollout_s(np.array([300.0]), np.array([110.0]))
    assert run.end_s == pytest.approx(times.prefill_s(120, 2) + alone), "300 tokens are left, and 110 of context are computed again"
    assert run.trained is not None and run.trained.lengths == pytest.approx([400.0])
    assert run.lag == pytest.approx((0.75, 0.25)) and run.after.age.tolist() == [1]
