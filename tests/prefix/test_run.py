"""A whole run with prefix KV in every step makes the samples that a run without makes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rlhfless_ray import Recipe, Runtime
from tests.conftest import samples, small_recipe

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def test_a_run_with_the_service_on_makes_the_same_samples(no_ray: None, tmp_path: Path, uninterrupted: Path) -> None:
    """`uninterrupted` is `auto`, which is off for prompts this short."""
    with Runtime(Recipe.parse(small_recipe(tmp_path, run__steps=2, rollout__prefix_kv="on"))) as run:
        for step in run:
            found = step.metrics
            assert found["prefix/on"] == 1 and found["prefix/loaded"] > 0 and found["prefix/lost"] == found["prefix/damaged"] == 0
            assert found["prefix/computed_tokens"] == found["prefix/distinct_tokens"]
    for number in (1, 2):
        assert [s["response"] for s in samples(run.folder.path, number)] == [s["response"] for s in samples(uninterrupted, number)]
    with (run.folder.path / "ledger.csv").open() as file:
        assert any(row["kind"] == "prefill" and row["activity"] == "work" and float(row["money"]) > 0 for row in csv.DictReader(file))
