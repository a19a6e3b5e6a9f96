"""Layouts: what fits a device, and what a call takes in them, before and after measurements."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from placement.calls import GENERATE, REFERENCE, TRAIN_POLICY, Features, Kind, step_graph
from placement.catalog import catalog
from placement.layouts import Devices, Layout, NoLayout, layouts_of
from placement.memory import parameter_count
from placement.speed.call_seconds import CallSeconds, CallWork
from placement.step_problem import CallModel, allowed_layouts, seconds_of, step_problem
from tests.placement.test_memory import LLAMA_70B, QWEN_05B, QWEN_7B

pytestmark = pytest.mark.pure
NODE = Devices(1, 8, 68e9)
WORK = CallWork(512, 256, 512, 1024)
GRAPH = step_graph(Features(reference=True))
SEVEN = CallModel.of("7b", QWEN_7B)


def seconds(**changes: float) -> CallSeconds:
    return CallSeconds(catalog.device("H100"), 8, {**catalog.values(catalog.read("phases")), **changes})


@pytest.mark.parametrize("config", [QWEN_05B, QWEN_7B, LLAMA_70B])
@pytest.mark.parametrize("kind", list(Kind))
def test_layouts_fit_memory_heads_and_nodes(kind: Kind, config: dict) -> None:
    cluster = Devices(4, 8, 68e9)
    found = layouts_of(kind, config, parameter_count(config) or 0, cluster, 1024)
    assert found
    for one in found:
        layout = one.layout
        assert one.device_bytes <= cluster.room_bytes
        assert config["num_attention_heads"] % layout.tensor == 0 and layout.tensor <= cluster.slots_per_node
        assert layout.slots <= 8 or layout.slots % 8 == 0
        assert one.micro_batch_tokens >= 1024
    # a device of less memory has no layout that this one lacks
    fewer = layouts_of(kind, config, parameter_count(config) or 0, replace(cluster, room_bytes=60e9), 1024)
    assert {one.layout for one in fewer} <= {one.layout for one in found}


def test_what_fits_no_device_names_the_nearest() -> None:
    with pytest.raises(
        NoLayout, match=r"no layout fits 8 devices with room for 68\.0 GB each; the nearest is 8 slots \(.*\) with \d+\.\d GB"
    ):
        layouts_of(Kind.TRAIN, LLAMA_70B, parameter_count(LLAMA_70B) or 0, NODE, 1024)
    with pytest.raises(NoLayout, match=r"policy update of 7b: no layout with 6 slots fits; the nearest that does is \d+ slots"):
        allowed_layouts(GRAPH[TRAIN_POLICY], SEVEN, WORK, NODE, slots=6)
    with pytest.raises(NoLayout, match=r"generate of 7b: no layout with tensor parallelism of 8 fits; the nearest that does is"):
        allowed_layouts(GRAPH[GENERATE], SEVEN, WORK, NODE, width=8)


def test_more_devices_are_faster_but_not_in_proportion() -> None:
    model, timed = SEVEN.sizes, seconds(half_efficiency_tokens=4000.0)
    few = CallWork(16, 256, 256, 1024)
    took = [timed.infer_s(model, few, Layout(count), 8192) for count in (1, 2, 4, 8)]
    assert all(0.5 * a < b < a for a, b in itertools.pairwise(took))
    constant = seconds(half_efficiency_tokens=0.0)
    assert constant.infer_s(model, WORK, Layout(2), 8192) == pytest.approx(constant.infer_s(model, WORK, Layout(1), 8192) / 2)
    # weights that are gathered for every micro-batch cost time, and more so across nodes
    small = CallWork(8, 16, 16, 1024)
    assert constant.train_s(model, small, Layout(8, zero_stage=3), 1024) > constant.train_s(model, small, Layout(8, zero_stage=1), 1024)
    assert constant.train_s(model, small, Layout(2, 8, zero_stage=3), 1024) > constant.train_s(
        model, small, Layout(1, 8, zero_stage=1), 1024
    )


def test_a_step_has_the_fastest_layouts_of_each_number_of_slots() -> None:
    models = dict.fromkeys((call.model for call in GRAPH.calls), SEVEN)
    timed = seconds()
    layouts = {call.name: allowed_layouts(call, SEVEN, WORK, NODE) for call in GRAPH.calls}
    problem = step_problem(GRAPH, models, WORK, NODE, timed, layouts)
    for call in GRAPH.calls:
        by_slots: dict[int, float] = {}
        for one in layouts[call.name]:
            took = seconds_of(call, SEVEN.sizes, WORK, timed, one)
            by_slots[one.layout.slots] = min(took, by_slots.get(one.layout.slots, math.inf))
        kept = {count: min(o.seconds for o in problem.options[call.name] if o.layout.slots == count) for count in by_slots}
        assert kept == by_slots
    reference, update = GRAPH[REFERENCE], GRAPH[TRAIN_POLICY]
    assert problem.change_s(reference, Layout(2), update, Layout(2)) == 0
    assert problem.change_s(reference, Layout(2), update, Layout(1, 2)) == pytest.approx(timed.reshard_s(SEVEN.sizes))
    assert problem.change_s(GRAPH[GENERATE], Layout(2), update, Layout(1, 2)) == 0, "engines have their own copy"
