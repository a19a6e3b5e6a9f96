"""A run whose engines are vLLM as it is: it trains, loses vLLM's process, and resumes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from benchmarks.common.fault_injection import pid_of
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample
from tests.conftest import small_recipe
from tests.run_files import HookedRun, rows

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.long, pytest.mark.usefixtures("private_ray")]


class Killing(HookedRun):
    """A run that kills vLLM's process in the middle of the second rollout."""

    killed: ClassVar[list[int]] = []

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        stage = self.parts.stages.rollout
        on_progress = stage._on_progress

        def look(done: int, total: int) -> None:
            if step.number == 2 and not self.killed and 0 < done < total:
                core = next(one for one in psutil.Process(pid_of(stage.pool.working[0])).children() if "EngineCore" in one.name())
                self.killed.append(core.pid)
                os.kill(core.pid, signal.SIGKILL)
            on_progress(done, total)

        stage._on_progress = look  # type: ignore[method-assign]
        return roll_out()


def test_a_run_with_stock_engines_trains_loses_one_and_resumes(tmp_path: Path) -> None:
    settings = {"rollout__engine": "stock", "rollout__max_tokens": 120, "rollout__stream_interval_s": 0.02, "checkpoint__every_steps": 1}
    tree = small_recipe(tmp_path, **settings, run__steps=3)
    with Killing(Recipe.parse(tree)) as run:
        steps = list(run)
    assert len(run.killed) == 1 and run.parts.stages.rollout.pool.replacements == 1
    assert [len(step.samples) for step in steps] == [32, 32, 32]
    folder = tmp_path / "runs" / "small"
    told = rows(folder, 1)
    assert all(row["learn/mismatch_mean"] < 1e-4 for row in told), "engines and learner compute the same log-probabilities"
    tree["run"]["steps"] = 4
    with Runtime(Recipe.parse(tree), resume=True) as run:
        assert [step.number for step in run] == [4]
