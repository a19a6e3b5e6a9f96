"""Widths of engines as a lever of every policy, the oracle as the best of all, and `prefer` near 1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.catalog import catalog
from placement.simulate import POLICIES, PhaseTimes, Setting, StepPlanSettings, named, parse, simulate
from placement.simulate.plan_candidates import candidates, neighbours
from placement.simulate.plan_search import Planner
from placement.simulate.simulate_step import StepInput, StepRun, all_phases
from placement.speed.roofline import all_reduce_s, decode_speed, decode_step_s, kv_capacity, possible_widths

QWEN, L40S = catalog.model("qwen2.5-3b"), catalog.device("L40S")


def small(**changes: object) -> Setting:
    tree = {"like": "qwen3b-gsm8k-grpo", "nodes": 1, "prompts": 8, "samples": 4, "epochs": 2}
    return parse({**tree, **changes})


def test_a_wide_engine_reads_a_share_of_the_weights_and_adds_two_all_reduces_per_layer() -> None:
    for width in (2, 4, 8):
        one, wide = (decode_step_s(QWEN, L40S, w, 1, 0.0) for w in (1, width))
        reduced = 2 * QWEN.layers * all_reduce_s(L40S, width, 2 * QWEN.hidden_size)
        assert wide - L40S.seq_s == pytest.approx((one - L40S.seq_s) / width + reduced)
    slower = replace(L40S, reduce_latency_s=70e-6)
    assert decode_speed(QWEN, slower, 4).base_s - decode_speed(QWEN, L40S, 4).base_s == pytest.approx(2 * QWEN.layers * 40e-6)


def test_kv_heads_that_are_fewer_than_the_devices_are_copied() -> None:
    """Two KV heads over four devices: each device reads as much KV as at two, and holds as much of a token."""
    two, four = (decode_speed(QWEN, L40S, w).per_ctx_s for w in (2, 4))
    assert QWEN.kv_heads == 2 and four == pytest.approx(two)
    room = 0.9 * 4 * L40S.memory_bytes - QWEN.weight_bytes
    assert kv_capacity(QWEN, L40S, 4, 0.9) == int(room // (2 * QWEN.kv_bytes_per_token))


def test_widths_share_the_heads_and_a_node_and_hold_the_model() -> None:
    assert possible_widths(catalog.model("qwen2.5-7b"), 8) == [1, 2, 4], "28 heads"
    assert small(tensor_parallel="auto", devices_per_node=6).widths == [1, 2]
    large = PhaseTimes.from_setting(named("llama70b-8-nodes").but(tensor_parallel="auto"))
    assert [t.width for t in large.widths] == [4, 8], "140 GB do not fit two H100 of which 60 % are an engine's"
    with pytest.raises(ValueError, match="must be a whole number of at least 1, not 'wide'"):
        small(tensor_parallel="wide")


def test_every_width_is_tried_and_neighbours_change_it() -> None:
    times = PhaseTimes.from_setting(small(tensor_parallel="auto"))
    assert {k.width for k in candidates(times)} == {1, 2, 4, 8}
    plan = StepPlanSettings(4, 0.9, 0, 8, width=2)
    assert {(k.width, k.engines) for k in neighbours(times, plan) if k.width != 2} == {(1, 8), (4, 2)}


@pytest.mark.slow
def test_every_policy_takes_about_the_best_of_the_widths() -> None:
    names = [name for name in POLICIES if name != "oracle"]
    auto = simulate(small(epochs=1, tensor_parallel="auto", prefer=0.9), names, 3)
    each = [simulate(small(epochs=1, tensor_parallel=w, prefer=0.9), names, 3) for w in (1, 2, 4, 8)]
    base = auto.policies["fixed"]

    def weigh(run, name: str) -> float:
        return 0.9 * run.policies[name].step_s / base.step_s + 0.1 * run.policies[name].full / base.full

    for name in names:
        assert weigh(auto, name) <= 1.1 * min(weigh(run, name) for run in each), name
    assert auto.policies["fixed"].step_s < each[0].policies["fixed"].step_s
    assert auto.bound_s == pytest.approx(np.mean([min(run.bounds[i].time_s for run in each) for i in range(len(auto.bounds))]))


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 1000), prefer=st.sampled_from([0.2, 0.75, 1.0]), width=st.sampled_from([1, 2, "auto"]))
def test_the_oracle_is_at_least_as_good_as_every_policy_in_every_step(seed: int, prefer: float, width: int | str) -> None:
    names = list(POLICIES)
    run = simulate(small(epochs=1, prompts=4, samples=2, devices_per_node=4, prefer=prefer, tensor_parallel=width), names, seed)
    steps = {name: done.steps for name, done in run.policies.items()}
    for i, oracle in enumerate(steps["oracle"]):
        for name in names:
            assert oracle.time_s <= steps[name][i].time_s + 1e-9 or oracle.full <= steps[name][i].full + 1e-9, (name, i)


@pytest.mark.slow
def test_prefer_above_nine_tenths_is_not_dearer_and_slower_at_once() -> None:
    """Means over seeds: a single step may be unlucky."""
    rows = {}
    for prefer in (0.9, 1.0):
        runs = [simulate(small(epochs=1, devices_per_node=4, prefer=prefer), ["ours"], seed).policies["ours"] for seed in range(4)]
        rows[prefer] = np.mean([(run.step_s, run.full) for run in runs], axis=0)
    assert rows[1.0][0] <= 1.001 * rows[0.9][0] or rows[1.0][1] <= 1.001 * rows[0.9][1], rows


def test_a_plan_that_is_fast_by_luck_does_not_replace_the_one_at_nine_tenths() -> None:
    """On the four draws that are searched "lucky" is 2 % faster, on the others it is as fast; it costs a third more."""
    lengths = np.linspace(100, 400, 32)[None, :].repeat(3, axis=0)
    step = StepInput(lengths[:, 0], np.ones(3), np.zeros(3, int), lengths)
    seen: list[float] = []

    def run(gain: float, view: StepInput, plan: StepPlanSettings) -> StepRun:
        lucky = plan.engines == 2
        time_s = 1.0 - lucky * (gain if view.lengths[0] not in seen else 0.02)
        return StepRun("x", time_s, 0.0, 0.0, 0, all_phases(1, 1.3 if lucky else 1.0))

    for gain, engines in ((0.0, 1), (0.02, 2)):
        planner = Planner(step, 1.0, partial(run, 0.0, plan=StepPlanSettings(1, 1.0, 0, 1)))
        seen[:] = [view.lengths[0] for view in planner.views(4)]
        assert not {view.lengths[0] for view in planner.views(8, without=4)} & set(seen)
        plans = [StepPlanSettings(n, 1.0, 0, 1) for n in (1, 2)]
        trial = partial(run, gain)
        assert planner.search("x", trial, trial, plans, lambda plan: []).engines == engines
