"""A run finds out whether a measure pays: it takes it if so, hardly ever if they do not, and follows a change."""

from __future__ import annotations

import json

import numpy as np
import pytest

from placement.measurements.trial import FEW, Trial


def play(trial: Trial, saving: float, rollouts: int, noise: float, seed: int) -> float:
    """Return the share of rollouts with moves, where these save a part of the rollout."""
    rng, made = np.random.default_rng(seed), 0
    for _ in range(rollouts):
        moves = trial.decide()
        made += moves
        trial.observe(moves, float(np.exp(rng.normal(0, noise))) * (1 - saving if moves else 1.0))
    return made / rollouts


def shares(saving: float, noise: float) -> float:
    return float(np.mean([play(Trial(), saving, 90, noise, seed) for seed in range(20)]))


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_a_measure_that_pays_is_taken_and_others_are_not(noise: float) -> None:
    assert shares(0.15, noise) > 0.7
    assert shares(-0.1, noise) < 0.2
    assert shares(0.0, noise) < 0.4, "without evidence it is not taken"


def test_a_change_of_what_it_saves_is_noticed() -> None:
    later = []
    for seed in range(10):
        trial = Trial()
        play(trial, -0.15, 40, 0.05, seed)
        play(trial, 0.25, 120, 0.05, 100 + seed)
        later.append(play(trial, 0.25, 40, 0.05, 200 + seed))
    assert np.mean(later) > 0.7


def test_both_kinds_are_tried_first() -> None:
    trial = Trial()
    kinds = []
    for _ in range(2 * FEW):
        kinds.append(trial.decide())
        trial.observe(kinds[-1], 1.0)
    assert sum(kinds) == FEW and kinds[0], "the planner's own wish comes first"
    assert "on trial" in Trial().reason and "saved at least" in trial.reason


def test_state_survives_json_and_what_is_no_ratio_is_ignored() -> None:
    trial, copy = Trial(), Trial()
    play(trial, 0.1, 30, 0.1, 0)
    trial.observe(True, 0.0)
    trial.observe(True, float("nan"))
    copy.restore(json.loads(json.dumps(trial.state())))
    assert copy.saving == trial.saving and copy.decide() == trial.decide() and len(copy.values) == 30
