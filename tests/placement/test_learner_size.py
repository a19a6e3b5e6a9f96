"""Slots for an update: tried, then chosen by price."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from placement.scaling.learner_size import MIN_TRIALS, LearnerSize
from placement.scaling.resize_policy import Hold, Shrink


def taught(times: dict[int, float], most: int) -> LearnerSize:
    size = LearnerSize(most)
    for tokens in (900.0, 1000.0, 1100.0):
        for count in size.counts:
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


def run(sizes: LearnerSize, seconds: Callable[[int, int], float], updates: int) -> list[int]:
    """Let it choose for so many updates. `seconds`: of an update, by its number and its slots."""
    chosen = []
    for number in range(updates):
        chosen.append(sizes.decide(0, 1000.0, value_per_s=100.0).actors)
        sizes.observe(chosen[-1], 1000.0, seconds(number, chosen[-1]))
    return chosen


def test_a_count_that_was_slow_in_the_first_updates_only_is_chosen_in_the_end():
    """A run's first updates took 0.94 s with two slots, and 0.55 s later on; one slot took 0.88 s. It stayed at one slot."""
    chosen = run(LearnerSize(2), lambda number, slots: 0.88 if slots == 1 else 0.94 if number < 3 else 0.55, 60)
    assert chosen[:4] == [2, 2, 1, 1] and chosen.index(2, 4) <= 8 and chosen[30:].count(2) >= 28


def test_counts_that_are_worse_are_tried_again_for_two_percent_at_most():
    times = {1: 1.0, 2: 0.9, 4: 0.88}
    chosen = run(LearnerSize(4), lambda number, slots: times[slots], 250)[6:]
    worth = {count: (count + 100.0) * times[count] for count in times}
    assert sum(worth[count] for count in chosen) <= (1 + 2 * 0.02) * len(chosen) * min(worth.values())  # two of the three are worse
    assert chosen.count(1) > 1 < chosen.count(2)


def test_the_warm_up_of_a_process_counts_only_until_there_is_another_time():
    sizes = LearnerSize(1)
    sizes.observe(1, 1000.0, 30.0)
    assert sizes.predict(1, 1000.0) == pytest.approx(30.0, rel=0.01)
    sizes.observe(1, 1000.0, 1.0)
    assert sizes.predict(1, 1000.0) == pytest.approx(1.0, rel=0.01)


def test_the_state_of_an_older_run_is_restored():
    sizes = LearnerSize(2)
    sizes.restore({key: value[:2] for key, value in taught({1: 1.0, 2: 0.9}, 2).state().items()})
    assert sizes.tried == {1: 3, 2: 3} and sizes.updates_since == {1: 0, 2: 0}


def test_no_slots_are_refused():
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        LearnerSize(0)
