"""The tables of docs/simulator.md, made from benchmarks/results/."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import cluster
from benchmarks.common import results
from benchmarks.common.results import FOLDER
from benchmarks.simulated.cluster_parts import PARTS, Part, measure
from benchmarks.simulator_page import TABLES, best
from docs.blocks import ROOT
from docs.hooks import on_page_markdown
from placement.simulate import named

SMALL = named("qwen3b-gsm8k-grpo").but(prompts=8, epochs=1)


def test_figures_are_over_fixed_of_the_same_and_of_the_first_variant() -> None:
    found = measure({"as it is": (SMALL, ["fixed", "rlhfless-paper"]), "slow": (SMALL.but(learn_scale=3.0), ["fixed"])}, [2, 3])
    first, slow = found["as it is"], found["slow"]["fixed"]
    assert first["fixed"]["same"] == first["fixed"]["plain"] == {"speedup": 1.0, "saving": 0.0} == slow["same"]
    assert slow["plain"]["speedup"] == pytest.approx(first["fixed"]["step_s"] / slow["step_s"], rel=0.02) and slow["plain"]["saving"] < 0
    assert first["rlhfless-paper"]["same"]["saving"] > 0 and first["rlhfless-paper"]["tokens_by_lag"] == [1.0]


def test_rows_of_settings_that_are_run_later_join_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "benchmarks" / "results")
    part = Part(["a", "b"], lambda name: {"as it is": (SMALL, ["fixed"])})
    monkeypatch.setitem(PARTS, "best", part)
    for name in ("b", "a"):
        monkeypatch.setattr(sys, "argv", ["cluster", "--seeds", "1", "--only", "best", "--settings", name])
        cluster.main()
    content = json.loads((tmp_path / "benchmarks" / "results" / "cluster.json").read_text())
    assert list(content["parts"]["best"]) == ["a", "b"]


def test_a_table_averages_over_settings() -> None:
    def entry(speedup: float) -> dict:
        row = {"same": {"speedup": speedup, "saving": speedup / 10}, "step_s": 20.0, "rollout_s": 10.0}
        policies = ("fixed", "fixed+", "global-cut", "rlhfless-paper", "ours (as built)", "ours")
        return {"seeds": 2, "commit": "abcdef012", "rows": {"as it is": dict.fromkeys(policies, row)}}

    lines = best({"one": entry(1.0), "two": entry(2.0)}).splitlines()
    assert lines[2].startswith("| one | 20 s | 50% | 1.00×, −10 % |")
    assert lines[4].startswith("| **average** |  |  | 1.50×, −15 % |") and lines[-1] == "Seeds a row: 2; at commit abcdef0."


def test_the_page_has_every_table_once() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    assert sorted(re.findall(r"<!-- generate: (simulator-[\w-]+) -->", page)) == sorted(
        f"simulator-{name.replace(' ', '-')}" for name in TABLES
    )
    assert "| step | used for |" in on_page_markdown(page) and "<!-- generate" not in on_page_markdown(page)
    for name in ("rollout_policies", "shared_pool_simulated"):
        for target in json.loads((FOLDER / f"{name}.json").read_text())["targets"]:
            assert target["met"] or target["why"], f"{target['name']} was missed and its result does not say why"
