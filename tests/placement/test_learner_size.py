"""Slots for an update: tried, then chosen by price."""

from __future__ import annotations

import pytest

from placement.scaling.learner_size import MIN_TRIALS, LearnerSize
from placement.scaling.resize_policy import Hold, Shrink


def taught(times: dict[int, float], most: int) -> LearnerSize:
    size = LearnerSize(most)
    for count in size.counts:
        for tokens in (900.0, 1000.0, 1100.0):
            size.observe(count, tokens, times[count] * tokens / 1000)
    return size


def test_every_count_is_tried_before_one_is_chosen_largest_first():
    size, seen = LearnerSize(6), []
    for _ in range(MIN_TRIALS * 4):
        decision = size.decide(0, 1000.0, value_per_s=1.0)
        seen.append(decision.actors)
        size.observe(decision.actors, 1000.0, 1.0)
    assert size.counts == [1, 2, 4, 6] and seen == [6, 6, 4, 4, 2, 2, 1, 1]
    assert size.decide(1, 1000.0, value_per_s=1.0).actors == 1  # more slots brought nothing


@pytest.mark.parametrize(("value_per_s", "wanted"), [(0.0, 1), (1.0, 1), (100.0, 4)])
def test_the_value_of_a_second_decides_how_much_is_paid_for_speed(value_per_s, wanted):
    times = {1: 1.0, 2: 0.7, 4: 0.55}
    decision = taught(times, 4).decide(4, 1000.0, value_per_s=value_per_s)
    by_hand = min(times, key=lambda count: (count + value_per_s) * times[count])
    assert decision.actors == by_hand == wanted
    assert isinstance(decision, Hold if wanted == 4 else Shrink)
    assert decision.time_s == pytest.approx(times[wanted], rel=0.1)


def test_perfect_scaling_is_free_speed():
    assert taught({1: 1.0, 2: 0.49, 4: 0.24}, 4).decide(1, 1000.0, value_per_s=0.01).actors == 4


def test_a_count_that_was_not_chosen_teaches_nothing_and_state_survives():
    size = taught({1: 1.0, 2: 0.9}, 2)
    size.observe(3, 1000.0, 0.01)
    again = LearnerSize(2)
    again.restore(size.state())
    assert again.decide(1, 1000.0, value_per_s=2.0) == size.decide(1, 1000.0, value_per_s=2.0)


def test_no_slots_are_refused():
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        LearnerSize(0)
