"""PPO whose critic and policy learn at the same time, on slots of their own, ends where the run ends in which they take turns."""

from __future__ import annotations

import os
import signal
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.fault_injection import pid_of
from placement.calls import TRAIN_CRITIC, StepGraph
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.functions.ledger import Row, read_ledger
from rlhfless_ray.learn.call_runner import CallRunner
from tests.conftest import samples, small_recipe
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]
STEPS = 3


def ppo(folder: Path, search: str) -> Path:
    folder.mkdir()
    tree: dict[str, Any] = small_recipe(
        folder,
        run__steps=STEPS,
        rollout__max_tokens=96,
        rollout__max_running=16,
        evaluate__prompts=0,
        policy__layers=4,
        learner__overlap="off",
        learner__micro_batch_tokens=64,  # so that updates take longer than it takes to start them
        algorithm__advantage={"estimator": "gae"},
        algorithm__kl={"coefficient": 0.1, "estimator": "k2", "place": "reward"},
        critic__learning_rate=1e-3,
        plan__search=search,
        cluster__cpus=4,
    )
    with Runtime(Recipe.parse(tree)) as run:
        for _ in run:
            pass
        return run.folder.path


def overlaps(run: Path, one: tuple[str, str], other: tuple[str, str]) -> set[int]:
    """Return the steps in which these works, each of a kind, ran at the same time under other leases."""
    ledger = [row for row in read_ledger(run / "ledger.csv") if row.activity == "work"]

    def both(a: Row, b: Row) -> bool:
        return (a.kind, a.what) == one and (b.kind, b.what) == other and a.lease != b.lease and a.from_s < b.to_s and b.from_s < a.to_s

    return {a.step for a in ledger for b in ledger if both(a, b)}


UPDATES = ("critic", "update"), ("learn", "update")
PASSES = ("critic", "values"), ("reference", "log-probabilities"), ("learn", "log-probabilities")  # of which two slots make two at a time


def test_critic_and_policy_learn_at_once_and_nothing_else_changes_also_if_one_is_killed(
    private_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn = ppo(tmp_path / "fixed", "fixed")
    beside = ppo(tmp_path / "auto", "auto")
    killed: list[int] = []
    start, begun = CallRunner.start, list[int]()

    def start_and_kill(self: CallRunner, calls: Any, planned: StepGraph) -> None:
        start(self, calls, planned)
        begun.append(TRAIN_CRITIC in calls)
        if sum(begun) == 2 and not killed:
            assert self.groups.critic is not None and len(self.running) == 2
            pid = pid_of(self.groups.critic.by_rank[0])
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    monkeypatch.setattr(CallRunner, "start", start_and_kill)
    lossy = ppo(tmp_path / "killed", "auto")
    assert not overlaps(in_turn, *UPDATES) and not any(overlaps(in_turn, *pair) for pair in combinations(PASSES, 2))
    assert {1, 2} <= overlaps(beside, *UPDATES), "the third may go without, on trial"
    assert any(overlaps(beside, *pair) for pair in combinations(PASSES, 2))
    assert killed and [row["faults/bugs"] for row in rows(lossy, 1)] == [0, 1, 0]
    for row in rows(beside, 1):
        taken = "side by side" in row["pool/learn_reason"].split("(")[0]
        assert (row["learn/overlap_s"] > 0) == taken == (row["step"] in overlaps(beside, *UPDATES)), row["pool/learn_reason"]
        assert row["learn/call_s/critic_update"] > 0 and row["learn/call_s/policy_update"] > 0
    assert all(row["learn/overlap_s"] < 1e-3 and "take turns" in row["pool/learn_reason"] for row in rows(in_turn, 1))
    from safetensors.numpy import load_file

    for other in (beside, lossy):
        for number in range(1, STEPS + 1):
            assert [s["response"] for s in samples(in_turn, number)] == [s["response"] for s in samples(other, number)]
        for name, weights in load_file(in_turn / "model" / "model.safetensors").items():
            np.testing.assert_allclose(load_file(other / "model" / "model.safetensors")[name], weights, rtol=0, atol=1e-5, err_msg=name)
        for one, row in zip(rows(in_turn, 1), rows(other, 1), strict=True):
            for name in ("learn/loss", "learn/kl", "learn/grad_norm", "critic/loss", "critic/grad_norm"):
                assert one[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name
