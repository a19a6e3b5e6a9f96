"""A run whose spot nodes come and go at random makes the samples and the weights of an undisturbed run, on replayed engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.changing_cluster import CHANGES, replayed

pytestmark = pytest.mark.ray

EVENTS, SEED = 6, 48  # one of each kind, four of them inside a rollout


def test_random_changes_of_the_cluster_change_no_sample_and_no_weight(no_ray: None, tmp_path: Path) -> None:
    told: list[str] = []
    found = replayed(tmp_path, EVENTS, SEED, told.append)
    assert sum(found["faults"].values()) == EVENTS and set(found["faults"]) <= set(CHANGES) and not found["not_done"], told
    assert not any(found["wrong"].values()), (found["wrong"], told)
    assert found["compared"]["versions"] == found["steps"] and found["compared"]["samples"] > 0
    assert not any(found["left"].values()), found["left"]
    assert found["faults/bugs"] == 0, told
