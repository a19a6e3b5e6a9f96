"""How many groups are at work, decided from what a run has measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from placement import Speed
from placement.forecast.forecaster import Scenarios
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.oversample import StaleCost, choose_oversample
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Prompt

pytestmark = pytest.mark.pure


def test_what_old_tokens_teach_less_is_fitted_per_version() -> None:
    cost = StaleCost()
    assert cost.per_version == 0
    for lag in (0.5, 1.0, 2.0):
        cost.observe(lag, math.exp(-0.1 * lag))
    assert cost.per_version == pytest.approx(0.1)


def test_a_long_tail_begins_more_groups_once_speeds_are_known_and_stale_tokens_do_not() -> None:
    rollout = {"samples_per_prompt": 4, "partial": "continue", "max_lag_steps": 2, "max_tokens": 1000}
    recipe = Recipe.parse({"prompts": {"task": "chain", "batch_prompts": 8}, "reward": {"function": "task"}, "rollout": rollout})
    autoscaler, run = Autoscaler(recipe, Speed(1e-3, 1e-4)), GroupsInFlight(recipe)
    prompts = [Prompt(i, "", (1, 2)) for i in range(8)]
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 100, (32, 16)), 1000).astype(float)
    step = Step(1, prompts, forecast=Scenarios.from_matrix(lengths))
    run.resize(autoscaler, step)
    assert run.at_work == 12 and not run.reason, "nothing is measured yet"
    running = np.arange(1, 32)
    autoscaler.engines.fit.observe(running, 5e-3 + 1e-5 * running)
    autoscaler.actors = 2
    run.resize(autoscaler, step)
    assert run.at_work > 8 and "against a synchronous step, bound 1: 0." in run.reason
    stale = choose_oversample(autoscaler, step, stale_cost=5.0)
    assert stale is not None and stale.share == 1 and not autoscaler.troubles
