"""The commands that make the simulator's tables run, and `ours (as built)` does what the runtime does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import results
from benchmarks.simulated.cluster_variants import ABLATION, AS_BUILT_POLICY, variant
from benchmarks.simulator_page import TABLES, tables
from placement.simulate import PhaseTimes, Setting, named, simulate
from rlhfless_ray.learn.overlap_rules import inexact
from rlhfless_ray.recipe import Recipe

AS_BUILT: dict[str, Any] = {"without": lambda _, k: k.awake or k.hosted or k.linear or 0 < k.early < k.late, "prewarmed": False}


def small(name: str, **changes: Any) -> Setting:
    return named(name).but(prompts=32, prefer=0.9, epochs=1, **changes)


def step_times(setting: Setting, policy: Any) -> list[float]:
    return [step.time_s for step in simulate(setting, [policy], 2).policies[policy[0]].steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "is_early"),
    [
        (small("qwen7b-gsm8k-grpo"), True),
        (small("qwen3b-gsm8k-grpo", updates=2), False),
        (small("qwen3b-gsm8k-ppo", whiten=False), False),
        (small("qwen7b-gpqa-ppo"), False),
    ],
)
def test_as_built_takes_gradients_early_only_where_the_runtime_does(setting: Setting, is_early: bool) -> None:
    allowed, refused = (variant("l", gradients=early, **AS_BUILT) for early in (True, False))
    found = step_times(setting, AS_BUILT_POLICY)
    assert found == step_times(setting, allowed if is_early else refused)
    if is_early:
        assert found != step_times(setting, refused), "the case must tell both apart"


@pytest.mark.parametrize(
    ("algorithm", "learner", "setting"),
    [
        ({}, {}, small("qwen3b-gsm8k-grpo")),
        ({}, {"zero_stage": 3}, small("qwen7b-gsm8k-grpo")),
        ({"updates_per_step": 2}, {}, small("qwen3b-gsm8k-grpo", updates=2)),
        ({"advantage": {"estimator": "gae"}}, {}, small("qwen3b-gsm8k-ppo")),
        ({"advantage": {"estimator": "gae", "whiten": False}}, {}, small("qwen3b-gsm8k-ppo", whiten=False)),
    ],
)
def test_simulator_and_runtime_refuse_the_same_early_gradients(
    algorithm: dict[str, Any], learner: dict[str, Any], setting: Setting
) -> None:
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": algorithm, "learner": learner})
    refused = inexact(recipe.algorithm, recipe.learner, recipe.lora)
    times = PhaseTimes.from_setting(setting)
    sharded = [m for m in times.sizes() if (times.trainer.sharding(m).per_forward > 0) == (recipe.learner.zero_stage == 3)]
    assert sharded, "the setting has no learner of this kind"
    assert all(times.early_gradients(m) == (refused is None) for m in sharded)


@pytest.mark.slow
def test_every_variant_of_the_ablation_runs() -> None:
    setting = named("qwen3b-gsm8k-ppo").but(prompts=8, epochs=1)
    found = simulate(setting, ABLATION, 2).policies
    billed = found["- release (all devices billed)"]
    assert billed.full == pytest.approx(billed.step_s * setting.devices)
    assert found["all parts"].full < billed.full


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_quick_commands_make_every_table_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for command in ("cluster", "rollout_policies", "break_even", "simulated.shared_pool"):
        monkeypatch.setattr(sys, "argv", [command, "--quick"])
        runpy.run_module(f"benchmarks.{command}", run_name="__main__")
    made = tables(tmp_path / "quick")
    assert set(made) == set(TABLES)
    of_fit = {"device model"}  # whose command takes no quick way
    assert [name for name, table in made.items() if name not in of_fit and not (table.startswith("|") and table.count("\n") >= 2)] == []
