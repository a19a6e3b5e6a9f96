"""The number of ranks of an update: tried where it can pay, and kept where it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from placement.planning.objective import Objective
from placement.scaling.learner_ranks import LearnerRanks, RestOfStep
from placement.scaling.resize_policy import Decision, Grow, Hold, Shrink

TOKENS = 1000.0


def taught(times: dict[int, float], current: int) -> LearnerRanks:
    """Ranks with one slot each, of which some have had updates of these seconds."""
    ranks = LearnerRanks([1, 2, 4], 1)
    for count, seconds in times.items():
        for _ in range(3):
            ranks.sizes[count].observe(1, TOKENS, seconds)
    ranks.current = current
    return ranks


def decided(
    ranks: LearnerRanks,
    *,
    step: int = 5,
    left: int = 100,
    room: int = 4,
    change_s: float = 1.0,
    rest: RestOfStep = RestOfStep(),  # noqa: B008 - frozen
    objective: Objective = Objective(prefer=0.9),  # noqa: B008
    value: float = 0.0,
):
    return ranks.decide(TOKENS, step=step, steps_left=left, room=room, rest=rest, objective=objective, value_per_s=value, change_s=change_s)


def settled(ranks: LearnerRanks, **given: Any) -> Decision:
    """Return the decision once the same number of ranks was the best one for many steps."""
    return [decided(ranks, step=step, **given) for step in range(5, 40)][-1]


def test_more_ranks_are_tried_where_they_pay_if_they_scale():
    decision = decided(taught({1: 2.0}, 1))
    assert isinstance(decision, Grow) and decision.actors == 4 and "if they scale" in decision.reason


def test_nothing_is_tried_before_the_present_ranks_are_measured():
    assert isinstance(decided(taught({}, 1)), Hold)


@pytest.mark.parametrize("changes", [{"left": 1}, {"change_s": 1000.0}, {"objective": Objective(prefer=0.0)}, {"room": 1}, {"left": 0}])
def test_a_trial_must_pay_for_the_way_there_and_back(changes: dict[str, float]):
    decision = decided(taught({1: 2.0}, 1), **changes)  # type: ignore[arg-type]
    assert isinstance(decision, Hold) and decision.actors == 1


def test_ranks_that_do_not_scale_are_left_again():
    ranks = taught({1: 1.0, 2: 0.95, 4: 1.4}, 4)
    found = [decided(ranks, step=step) for step in range(5, 30)]
    assert isinstance(found[-1], Shrink) and found[-1].actors == 1


def test_a_small_gain_changes_nothing():
    ranks = taught({1: 1.0, 2: 0.92, 4: 2.0}, 1)
    assert all(isinstance(decided(ranks, step=step), Hold) for step in range(5, 30))


def test_the_whole_step_is_weighed() -> None:
    """The update's own slot-seconds rise by a third. Of the step, its seconds fall by 19 % and its cost rises by 7 %."""
    times = {1: 0.6, 2: 0.4, 4: 0.4}
    alone = settled(taught(times, 1), objective=Objective(prefer=0.4))
    assert isinstance(alone, Hold), "an update by itself is not worth it"
    found = settled(taught(times, 1), objective=Objective(prefer=0.4), rest=RestOfStep(0.45, 1.3), change_s=0.2)
    assert isinstance(found, Grow) and found.actors == 2
    assert found.reason.startswith("2 ranks: step of 0.85 s for 2.1 slot-s (1: 1.05 s for 1.9) saves the worth of")


def test_slots_that_others_hold_during_the_update_are_part_of_its_price() -> None:
    times, cheapest = {1: 0.6, 2: 0.4, 4: 0.4}, Objective(prefer=0.0)
    assert isinstance(settled(taught(times, 1), objective=cheapest, rest=RestOfStep(1.0, 1.0)), Hold)
    found = settled(taught(times, 1), objective=cheapest, rest=RestOfStep(1.0, 1.0, beside=2.0), change_s=0.2)
    assert isinstance(found, Grow) and found.actors == 2, "3 · 0.6 slot-s against 4 · 0.4"


def test_an_update_beside_a_longer_call_gains_nothing_from_more_ranks() -> None:
    """The critic's update on one slot takes 2.5 s in any case. In turn, it takes as long on as many slots as the policy's."""
    beside, in_turn = taught({1: 2.0}, 1), taught({1: 2.0}, 1)
    beside.others = {(count, count): (2.5 - 2.0 / count, 2.5) for count in (1, 2, 4)}
    in_turn.others = {(count, count): (2.0 / count, 2.0) for count in (1, 2, 4)}
    assert isinstance(decided(beside), Hold) and decided(in_turn).actors == 4
    in_turn.others.pop((4, 4))
    assert decided(in_turn).actors == 2, "for 4 there is no room beside the others"


@pytest.mark.parametrize("value", [0.0, 10.0])
def test_seconds_have_the_given_worth_with_a_deadline_or_a_budget_of_the_rollout(value: float) -> None:
    ranks = taught({1: 0.6, 2: 0.4, 4: 0.4}, 1)
    for objective in (Objective(deadline_s=5.0), Objective(budget=5.0)):
        assert settled(ranks, objective=objective, value=value).actors == (2 if value else 1)


def test_equal_numbers_of_ranks_do_not_alternate() -> None:
    """Updates of both numbers vary by a tenth around the same worth of a step."""
    rng, ranks, changes = np.random.default_rng(0), taught({1: 0.6}, 1), 0
    ranks.sizes.pop(4)
    for step in range(5, 205):
        found = decided(ranks, step=step, left=205 - step, objective=Objective(prefer=0.5), rest=RestOfStep(0.5, 1.0), change_s=0.2)
        changes += found.actors != ranks.current
        ranks.current = found.actors
        ranks.size.observe(1, TOKENS, {1: 0.6, 2: 0.4}[found.actors] * rng.normal(1.0, 0.1))
        ranks.settle()
    assert changes <= 3


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
