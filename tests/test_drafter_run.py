"""A run whose drafter is trained on the slot that one engine leaves while the other still works."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from benchmarks.common.fault_injection import pid_of
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.functions.ledger import read_ledger_lines
from rlhfless_ray.rollout.live_rollout import LiveRollout
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.step.rollout_plan import RolloutPlan
from tests.conftest import small_recipe
from tests.run_files import rows
from tests.test_overlap import HeldPage, uneven

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def test_a_drafter_learns_in_the_tail_dies_and_goes_on_after_a_resume(
    private_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolloutPlan, "shares", uneven)
    monkeypatch.setattr(LiveRollout, "tail_s", lambda self: 1000.0)
    more = {
        "run__steps": 5,
        "rollout__min_actors": 2,
        "rollout__migrate": "off",
        "rollout__stream_interval_s": 0.02,
        "rollout__speculation": "on",
        "rollout__drafter_train": "on",
        "evaluate__prompts": 0,
        "learner__overlap": "off",
        "cluster__cpus": 2,
    }
    recipe = Recipe.parse(small_recipe(tmp_path, **more))
    killed: list[int] = []
    waiting: list[int] = []  # the process before its update begins: Ray takes a moment to tell, in which an update may end

    def enough(tail: EarlyWork) -> bool:
        """The second rollout has time until there is a new version. In the third the process is killed while it makes one. The fourth
        has time until a new process has worked."""
        (drafter,) = tail.drafters
        if run.parts.session.step.number == 3 and not drafter.running and drafter.pool.parked and not waiting:
            waiting.extend(filter(None, [pid_of(drafter.pool.parked[0])]))
        if run.parts.session.step.number == 3 and drafter.running and not killed:
            killed.append(waiting[0] if waiting else pid_of(drafter.pool.working[0]) or 0)
            os.kill(killed[0], signal.SIGKILL)
        if run.parts.session.step.number == 3:
            return drafter.failures == 1
        return drafter.failures == 0 and drafter.version > (run.parts.session.step.number == 4)

    with HeldPage(recipe, enough) as run:
        for step in run:
            drafter = run.parts.stages.rollout.drafter
            assert drafter is not None
            ray.get(list(drafter.imported.values()), timeout=60)
            if step.number == 4:
                break
        folder = run.folder.path
    with Runtime(recipe, resume=True) as resumed:
        assert resumed.parts.stages.rollout.drafter is not None and resumed.parts.stages.rollout.drafter.version >= 2, "of the checkpoint"
        steps = list(resumed)
    assert [step.number for step in steps] == [5] and steps[0].metrics["rollout/model_drafted"] > 0
    told = rows(folder)
    assert [row["drafter/failures"] for row in told] == [0, 0, 1, 0, 0] and not any(row["faults/bugs"] for row in told)
    assert told[1]["drafter/version"] >= 1 and told[3]["drafter/version"] >= 2
    assert all(row["drafter/kl"] > 0 for row in told if row["drafter/updates"])
    held = [row for row in read_ledger_lines(folder / "ledger.csv")[0] if row.kind == "drafter" and row.slots]
    assert {row.what for row in held} >= {"train the drafter"} and sum(row.money for row in held) > 0
