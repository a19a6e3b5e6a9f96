"""A run finds out whether moves pay: it makes them if they do, hardly ever if they do not, and follows a change."""

from __future__ import annotations

import json

import numpy as np
import pytest

from placement.migration.move_trial import FEW, MoveTrial


def play(trial: MoveTrial, saving: float, rollouts: int, noise: float, seed: int) -> float:
    """Return the share of rollouts with moves, where these save a part of the rollout."""
    rng, made = np.random.default_rng(seed), 0
    for _ in range(rollouts):
        moves = trial.decide()
        made += moves
        trial.observe(moves, float(np.exp(rng.normal(0, noise))) * (1 - saving if moves else 1.0))
    return made / rollouts


def shares(saving: float, noise: float) -> float:
    return float(np.mean([play(MoveTrial(), saving, 90, noise, seed) for seed in range(20)]))


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_moves_that_pay_are_made_and_others_are_not(noise: float) -> None:
    assert shares(0.15, noise) > 0.7
    assert shares(-0.1, noise) < 0.2
    assert shares(0.0, noise) < 0.4, "without evidence they are not made"


def test_a_change_of_what_moves_save_is_noticed() -> None:
    later = []
    for seed in range(10):
        trial = MoveTrial()
        play(trial, -0.15, 40, 0.05, seed)
        play(trial, 0.25, 120, 0.05, 100 + seed)
        later.append(play(trial, 0.25, 40, 0.05, 200 + seed))
    assert np.mean(later) > 0.7


def test_both_kinds_are_tried_first() -> None:
    trial = MoveTrial()
    kinds = []
    for _ in range(2 * FEW):
        kinds.append(trial.decide())
        trial.observe(kinds[-1], 1.0)
    assert sum(kinds) == FEW and kinds[0], "the planner's own wish comes first"
    assert "on trial" in MoveTrial().reason and "saved at least" in trial.reason


def test_state_survives_json_and_what_is_no_ratio_is_ignored() -> None:
    trial, copy = MoveTrial(), MoveTrial()
    play(trial, 0.1, 30, 0.1, 0)
    trial.observe(True, 0.0)
    trial.observe(True, float("nan"))
    copy.restore(json.loads(json.dumps(trial.state())))
    assert copy.saving == trial.saving and copy.decide() == trial.decide() and len(copy.values) == 30
