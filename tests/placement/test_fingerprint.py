"""Results of the planner and the simulators, compared with hashes that an earlier version left.

Where results change on purpose, record new hashes: `python -m tests.placement.test_fingerprint`. Length forecasts are kept in single
precision, whose last digits differ between processors. So their figures are compared with a tolerance instead, and simulated steps are
planned by other scenarios.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fingerprint import PARTS as COMPUTE
from benchmarks.fingerprint import fingerprint

HASHES = Path(__file__).with_name("fingerprint.json")
PARTS = ("planner", "scaling", "fits", "moves", "rollouts", "steps grpo", "steps ppo")
FIGURES = "forecast figures"


def forecast_figures() -> dict[str, list[float]]:
    """{entry: mean, standard deviation and three quantiles of each array, or the number itself} of the forecasts of seed 0."""
    return {name: [float(f"{figure:.6g}") for figure in _figures(value)] for name, value in COMPUTE["forecasts"](0).items()}


def _figures(value: Any) -> list[float]:
    if isinstance(value, tuple):
        return [figure for part in value for figure in _figures(part)]
    if hasattr(value, "__dataclass_fields__"):
        return [figure for name in value.__dataclass_fields__ for figure in _figures(getattr(value, name))]
    if isinstance(value, dict):
        return [figure for part in value.values() for figure in _figures(part)]
    array = np.asarray(value, float)
    return [float(array)] if array.ndim == 0 else [float(x) for x in (array.mean(), array.std(), *np.quantile(array, (0.1, 0.5, 0.9)))]


@pytest.mark.parametrize("part", [*PARTS[:-1], pytest.param(PARTS[-1], marks=pytest.mark.slow)])
def test_results_are_those_of_before(part: str) -> None:
    before = {name: value for name, value in json.loads(HASHES.read_text()).items() if name.startswith(f"{part},")}
    assert before and fingerprint([part], [0]) == before, "results changed; see the head of this file if that is meant"


def test_forecasts_are_those_of_before() -> None:
    before = json.loads(HASHES.read_text())[FIGURES]
    found = forecast_figures()
    assert found.keys() == before.keys()
    for name, figures in found.items():
        assert figures == pytest.approx(before[name], rel=1e-3, abs=1e-3), f"{name}; see the head of this file if that is meant"


if __name__ == "__main__":
    HASHES.write_text(json.dumps({**fingerprint(list(PARTS), [0]), FIGURES: forecast_figures()}, indent=1) + "\n")
