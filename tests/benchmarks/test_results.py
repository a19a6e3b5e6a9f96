"""Spreads, targets, charts and the JSON file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.charts import sparkline
from benchmarks.common.results import Spread, Target


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4, 1, 2, 3, 100]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([]).count == 0


@pytest.mark.parametrize(
    ("value", "least", "most", "met"),
    [
        (5.0, 5.0, None, True),
        (4.9, 5.0, None, False),
        (0.03, None, 0.03, True),
        (0.031, None, 0.03, False),
        (float("nan"), 1.0, None, False),
        (float("nan"), None, 1.0, False),
    ],
)
def test_a_target_is_met_or_missed(value: float, least: float | None, most: float | None, met: bool) -> None:
    target = Target("x", value, least=least, most=most)
    assert target.met is met
    assert ("pass" if met else "miss") in target.row()[3]


def test_the_file_says_where_it_was_measured_and_names_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "benchmarks" / "results")
    content = {"times": Spread.of([1.0, 2.0]), "array": np.arange(2), "none": float("inf")}
    path = results.save("trial", content, [Target("t", 1.0, least=2.0)], console=Console(quiet=True), quick=True)
    assert path == tmp_path / "benchmarks" / "results" / "quick" / "trial.json"
    text = path.read_text()
    found = json.loads(text)
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gb"] > 0 and found["machine"]["cpu"]
    assert set(found["git"]) in ({"commit", "dirty"}, set())
    assert found["times"] == {"median": 1.5, "low": 1.25, "high": 1.75, "count": 2}
    assert found["array"] == [0, 1] and found["none"] is None
    assert found["targets"][0]["met"] is False
    assert str(tmp_path) not in text and str(Path.home()) not in text


def test_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1], 0, 1) == "▁█"
    assert len(sparkline(list(range(100)), 0, 99, width=20)) == 20
    assert sparkline([2, 2], 2, 2) == "▁▁"
