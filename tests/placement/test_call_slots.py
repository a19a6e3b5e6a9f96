"""How many slots calls get, beside each other or in turn: by hand, and against all possibilities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from placement.call_slots import CallOptions, choose_call_slots
from placement.calls import OLD, REFERENCE, TRAIN_CRITIC, TRAIN_POLICY, VALUES, Features, step_graph
from placement.measurements.call_times import CallTimes
from placement.measurements.registry import Measurements

GRAPH = step_graph(Features(values=True, reference=True, pass_before=True, kl_in_reward=True))


def one(seconds: dict[int, float], ranks: int = 1) -> CallOptions:
    return CallOptions(ranks, seconds)


def test_two_updates_on_a_slot_each_take_the_longer_ones_time() -> None:
    updates = {TRAIN_CRITIC: one({1: 0.7}), TRAIN_POLICY: one({1: 0.9})}
    for room, together, seconds in ((2, True, 0.9), (1, True, 1.6), (2, False, 1.6)):
        plan = choose_call_slots(GRAPH, updates, room, 1.0, together=together)
        assert (plan.seconds, plan.slot_seconds) == (pytest.approx(seconds), pytest.approx(1.6))


def test_two_slots_each_in_turn_are_weighed_against_one_each_side_by_side() -> None:
    updates = {TRAIN_CRITIC: one({1: 1.0, 2: 0.6}), TRAIN_POLICY: one({1: 1.0, 2: 0.6})}
    beside = choose_call_slots(GRAPH, updates, 2, 1.0, together=True)
    assert beside.slots == {TRAIN_CRITIC: 1, TRAIN_POLICY: 1} and beside.seconds == 1.0
    assert choose_call_slots(GRAPH, updates, 4, 10.0, together=True).slots == {TRAIN_CRITIC: 2, TRAIN_POLICY: 2}
    assert choose_call_slots(GRAPH, updates, 4, 10.0, together=False).seconds == pytest.approx(1.2)


def test_calls_of_one_model_never_run_at_once() -> None:
    passes = {OLD: one({1: 1.0}), VALUES: one({1: 1.0}), REFERENCE: one({1: 1.5})}
    assert choose_call_slots(GRAPH, passes, 9, 1.0, together=True).seconds == 1.5
    both = {**passes, TRAIN_POLICY: one({1: 2.0}), TRAIN_CRITIC: one({1: 2.0})}
    assert choose_call_slots(GRAPH, both, 9, 1.0, together=True).seconds == 3.5, "updates follow the passes that they need"
    assert choose_call_slots(GRAPH, passes, 2, 1.0, together=True).seconds == 2.0, "the third call waits for a slot"


def test_no_other_number_of_slots_is_better() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        names = [TRAIN_CRITIC, TRAIN_POLICY]
        options = {name: one({n: float(rng.uniform(0.5, 2) / n ** rng.uniform(0, 1)) for n in (1, 2, 4)}) for name in names}
        room, value = int(rng.integers(1, 9)), float(rng.uniform(0, 5))
        found = choose_call_slots(GRAPH, options, room, value, together=True)
        for a, b in itertools.product((1, 2, 4), repeat=2):
            a_s, b_s = options[names[0]].seconds[a], options[names[1]].seconds[b]
            seconds = max(a_s, b_s) if a + b <= room else a_s + b_s
            assert found.value(value) <= a * a_s + b * b_s + value * seconds + 1e-9


def test_times_of_calls_scale_like_an_update_where_they_were_not_measured_and_survive_a_resume() -> None:
    times = CallTimes()
    update_s = {1: 4.0, 2: 3.0}.__getitem__
    assert times.predict(VALUES, 2, 10.0, update_s) == 3.0 and not times.knows(VALUES)
    for seconds in (9.0, 2.0, 2.0):  # the first one has the warm-up of a process
        times.observe(VALUES, 1, 10.0, seconds)
    assert times.predict(VALUES, 1, 10.0, update_s) == pytest.approx(2.0, rel=0.05)
    assert times.predict(VALUES, 2, 10.0, update_s) == pytest.approx(1.5, rel=0.05)
    measured, again = Measurements(), Measurements()
    measured.calls = times
    measured.settle()
    again.restore(measured.state())
    assert again.calls.predict(VALUES, 2, 10.0, update_s) == times.predict(VALUES, 2, 10.0, update_s)
    old = {name: state for name, state in measured.state().items() if name not in ("calls", "side_by_side")}
    Measurements().restore(old)  # of a checkpoint from before there were such times
