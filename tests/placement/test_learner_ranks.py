"""The number of ranks of an update: tried where it can pay, and kept where it does."""

from __future__ import annotations

import pytest

from placement.scaling.learner_ranks import LearnerRanks
from placement.scaling.resize_policy import Grow, Hold, Shrink

TOKENS = 1000.0


def taught(times: dict[int, float], current: int) -> LearnerRanks:
    """Ranks with one slot each, of which some have had updates of these seconds."""
    ranks = LearnerRanks([1, 2, 4], 1)
    for count, seconds in times.items():
        for _ in range(3):
            ranks.sizes[count].observe(1, TOKENS, seconds)
    ranks.current = current
    return ranks


def decided(ranks: LearnerRanks, *, step: int = 5, left: int = 100, room: int = 4, value: float = 10.0, change_s: float = 1.0):
    return ranks.decide(TOKENS, step=step, steps_left=left, room=room, value_per_s=value, change_s=change_s)


def test_more_ranks_are_tried_where_they_pay_if_they_scale():
    decision = decided(taught({1: 2.0}, 1))
    assert isinstance(decision, Grow) and decision.actors == 4 and "if they scale" in decision.reason


def test_nothing_is_tried_before_the_present_ranks_are_measured():
    assert isinstance(decided(taught({}, 1)), Hold)


@pytest.mark.parametrize("changes", [{"left": 1}, {"change_s": 1000.0}, {"value": 0.0}, {"room": 1}, {"left": 0}])
def test_a_trial_must_pay_for_the_way_there_and_back(changes: dict[str, float]):
    decision = decided(taught({1: 2.0}, 1), **changes)  # type: ignore[arg-type]
    assert isinstance(decision, Hold) and decision.actors == 1


def test_ranks_that_do_not_scale_are_left_again():
    ranks = taught({1: 1.0, 2: 0.95, 4: 1.4}, 4)
    found = [decided(ranks, step=step) for step in range(5, 30)]
    assert isinstance(found[-1], Shrink) and found[-1].actors == 1


def test_a_small_gain_changes_nothing():
    ranks = taught({1: 1.0, 2: 0.92, 4: 2.0}, 1)
    assert all(isinstance(decided(ranks, step=step, value=10.0), Hold) for step in range(5, 30))


def test_fewer_ranks_are_those_that_there_are_slots_for():
    ranks = taught({}, 4)
    assert [ranks.fewer(room) for room in (0, 1, 2, 3, 4)] == [None, 1, 2, 2, 2]
    assert LearnerRanks([2], 1).fewer(8) is None, "the recipe gives the number"


def test_the_state_survives_and_other_limits_are_left_out():
    ranks = taught({1: 1.0, 2: 0.6}, 1)
    again = LearnerRanks([1, 2], 1)
    again.restore(ranks.state())
    assert [again.sizes[count].predict(1, TOKENS) for count in (1, 2)] == [ranks.sizes[count].predict(1, TOKENS) for count in (1, 2)]


def test_no_candidates_are_refused():
    with pytest.raises(ValueError, match="at least one number of ranks"):
        LearnerRanks([], 1)
