"""Passes over groups that are complete while an engine still works say what they would say after the rollout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.fault_injection import pid_of
from rlhfless_ray import Recipe
from rlhfless_ray.functions.ledger import read_ledger_lines
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.step_calls import StepCalls
from rlhfless_ray.rollout.live_rollout import LiveRollout
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample
from tests.conftest import small_recipe
from tests.run_files import HookedRun
from tests.run_files import rows as rows_of

pytestmark = [pytest.mark.ray, pytest.mark.engine]
GROUPS = 2  # of eight: all that the first engine gets


def uneven(plan: RolloutPlan, engines: int, expected: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """So that the first engine is done long before the second."""
    return [np.flatnonzero(groups < GROUPS), np.flatnonzero(groups >= GROUPS)] if engines == 2 else [np.arange(len(groups))]


class HeldPage(HookedRun):
    """One engine is stopped as the second step's rollout begins, until `enough` has been done on the slot that the other one leaves: a
    tail that no other load on the machine makes too short."""

    def __init__(self, recipe: Recipe, enough: Callable[[EarlyWork], bool]) -> None:
        super().__init__(recipe)
        self.enough = enough

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        if step.number == 1:
            return roll_out()
        pid = pid_of(self.parts.stages.rollout.pool.working[1])
        assert pid is not None
        poll = EarlyWork.poll

        def until_enough(tail: EarlyWork, seconds: float) -> None:
            poll(tail, seconds)
            if self.enough(tail):
                os.kill(pid, signal.SIGCONT)

        os.kill(pid, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(EarlyWork, "poll", until_enough)
            return roll_out()


def trained(folder: Path, enough: Callable[[EarlyWork], bool], **more: Any) -> Path:
    folder.mkdir()
    tree: dict[str, Any] = small_recipe(
        folder,
        run__steps=2,
        rollout__min_actors=2,
        rollout__max_tokens=160,
        rollout__migrate="off",
        rollout__stream_interval_s=0.02,
        rollout__max_running=16,
        evaluate__prompts=0,
        learner__micro_batch_tokens=64,
        reward__function=f"{folder / 'reward_file.py'}:shorter",
        cluster__cpus=2,
        **more,
    )
    with HeldPage(Recipe.parse(tree), enough) as run:
        for _ in run:
            pass
        return run.folder.path


def test_passes_of_reference_learner_and_critic_go_ahead_and_say_what_they_would_say_later(
    private_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolloutPlan, "shares", uneven)
    monkeypatch.setattr(LiveRollout, "tail_s", lambda self: 1000.0)
    run_passes, ahead = StepCalls.run_passes, dict.fromkeys(("reference", "logprobs", "values"), 0)

    def compared(self: StepCalls, samples: list[Sample], batch: Batch, wanted: list[str]) -> dict[str, np.ndarray]:
        found = run_passes(self, samples, batch, wanted)
        for one in self.passes.each:
            ahead[one.what] += len(one.known)
            self.groups.turn(one.worker_group)
            whole = one.worker_group.compute(one.what, batch, *one.arguments)
            for name in one.names:
                np.testing.assert_allclose(found[name], whole[name], rtol=1e-4, atol=2e-5, err_msg=name)
        return found

    monkeypatch.setattr(StepCalls, "run_passes", compared)
    kl = {"coefficient": 0.1, "estimator": "k2", "place": "reward"}
    run = trained(
        tmp_path / "ahead",
        lambda tail: all(one.known for one in tail.learning.passes.each),
        algorithm__kl=kl,
        algorithm__advantage={"estimator": "gae"},
        critic__learning_rate=1e-3,
    )
    rows = rows_of(run)
    assert {what: sum(row[f"overlap/{what}"] for row in rows) for what in ahead} == ahead
    ledger = read_ledger_lines(run / "ledger.csv")[0]
    work = [row for row in ledger if row.kind == "rollout" and row.activity == "work"]
    for kind, what in (("reference", "log-probabilities"), ("learn", "log-probabilities"), ("critic", "values")):
        passes = [row for row in ledger if (row.kind, row.what) == (kind, what)]
        assert any(o.step == row.step and o.to_s > row.from_s for row in passes for o in work), f"{what} while an engine worked"
