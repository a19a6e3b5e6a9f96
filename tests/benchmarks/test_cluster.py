"""The commands that make the simulator's tables run, and `ours (as built)` does what the runtime does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.simulated.cluster_variants import ABLATION
from benchmarks.simulator_page import TABLES, tables
from placement.simulate import named, simulate


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
