"""A real learner, killed while it works: the run ends where an unbroken one does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.common.fault_injection import FaultInjector, pid_of, step_rows
from rlhfless_ray.recipe import Recipe
from tests.conftest import samples, small_recipe

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(900)]


def test_a_killed_learner_ends_where_an_unbroken_one_does(private_ray: None, tmp_path: Path, uninterrupted: Path) -> None:
    """In the middle of an update, and after one whose state is on its way out of the process."""
    moments = {(2, "update"), (3, "published")}

    def strike(run: FaultInjector, moment: str) -> None:
        if (run.parts.session.step.number, moment) in moments:
            moments.remove((run.parts.session.step.number, moment))
            pid = pid_of(run.parts.stages.learn.worker_group.by_rank[0])
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    tree: dict[str, Any] = small_recipe(tmp_path, run__steps=4, learner__overlap="off")
    with FaultInjector(Recipe.parse(tree), strike) as run:
        for _ in run:
            pass
    rows = step_rows(run.folder.path)
    assert not moments and sum(row["faults/learner_restarts"] for row in rows) == sum(row["faults/bugs"] for row in rows) == 2
    for number in range(1, 5):
        assert samples(run.folder.path, number) == samples(uninterrupted, number)
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (run.folder.path, uninterrupted))
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
