"""Runs whose engine works on two cores: tokens, leases and a lost member."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from benchmarks.common.fault_injection import pid_of
from placement.planning.plan import Plan
from placement.scaling.engine_width import WidthDecision
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample
from tests.conftest import small_recipe
from tests.run_files import HookedRun

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

WIDE = {"rollout__tensor_parallel": 2}
SHORT = {"rollout__max_tokens": 120, "rollout__stream_interval_s": 0.02, "evaluate__prompts": 0}


def member_of(engine: int) -> int:
    """Process id of an engine's further member. The engine's child only waits for it; both have the connection as standard input."""
    (child,) = [one.pid for one in psutil.Process(engine).children() if "engine_member" in " ".join(one.cmdline())]
    connection, found = os.readlink(f"/proc/{child}/fd/0"), []
    for pid in psutil.pids():
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/0") == connection and pid != child:
                found.append(pid)
    (member,) = found
    return member


class Killing(HookedRun):
    """A run that stops a further member of its engine in the middle of the second rollout, and kills one in the third."""

    ended: ClassVar[list[int]] = []

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        stage = self.parts.stages.rollout
        on_progress = stage._on_progress

        def look(done: int, total: int) -> None:
            if len(self.ended) < step.number - 1 and 0 < done < total:
                self.ended.append(member_of(pid_of(self.parts.stages.rollout.pool.working[0])))
                os.kill(self.ended[-1], signal.SIGSTOP if step.number == 2 else signal.SIGKILL)
            on_progress(done, total)

        stage._on_progress = look  # type: ignore[method-assign]
        return roll_out()


def run(folder: Path, kind: type[Runtime] = Runtime, **overrides: Any) -> tuple[list[Step], Runtime]:
    folder.mkdir()
    tree = small_recipe(folder, **SHORT, **overrides)
    with kind(Recipe.parse(tree)) as running:
        return list(running), running


def assert_same(found: list[Step], wanted: list[Step]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(one.samples, other.samples, strict=True):
            np.testing.assert_array_equal(mine.completion.token_ids, theirs.completion.token_ids)
            np.testing.assert_allclose(mine.completion.logprobs, theirs.completion.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def wanted(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """The steps of a run whose engine has one slot."""
    return run(tmp_path_factory.mktemp("narrow") / "one", run__steps=3)[0]


def test_the_width_changes_between_steps_and_the_tokens_do_not(tmp_path: Path, wanted: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    def alternate(current: int, stay: Plan, width: int, chosen: Plan, **figures: Any) -> WidthDecision:
        return WidthDecision(3 - current, f"engines of {3 - current} slots instead of {current}")

    monkeypatch.setattr("rlhfless_ray.autoscaler.autoscaler.decide_width", alternate)
    auto = {"run__steps": 2, "rollout__tensor_parallel": "auto", "rollout__max_actors": 2, "cluster__cpus": 2}
    found, _ = run(tmp_path / "auto", **auto)
    assert [step.metrics["plan/width"] for step in found] == [2, 1]
    assert "engines of 2 slots instead of 1" in found[0].metrics["pool/reason"]
    assert_same(found, wanted[:2])
    rows = read_ledger(tmp_path / "auto" / "runs" / "small" / "ledger.csv")
    engines = [{row.instance for row in rows if (row.step, row.what) == (step, "generate")} for step in (1, 2)]
    assert len(engines[0]) == 1 and not engines[0] & engines[1], "the wide engine works at the narrow width"


def test_two_slots_give_the_tokens_of_one_also_after_a_member_hangs_or_is_lost(tmp_path: Path, wanted: list[Step]) -> None:
    """Nothing is lost in the first step. Prompts are prefilled by an instance of two slots."""
    found, _ = run(tmp_path / "lost", Killing, **WIDE, run__steps=3, rollout__silence_s=6, rollout__prefix_kv="on")
    assert found[0].metrics["prefix/loaded"] > 0
    assert len(Killing.ended) == 2 and [step.metrics["rollout/orphans"] > 0 for step in found] == [False, True, True]
    assert_same(found, wanted)
    rows = read_ledger(tmp_path / "lost" / "runs" / "small" / "ledger.csv")
    decoding = {(row.device, row.slots) for row in rows if (row.step, row.what) == (1, "generate")}
    assert decoding == {("0", 1), ("1", 1)}, "the engine is not billed for both of its slots"
    assert not any(psutil.pid_exists(pid) for pid in Killing.ended), "a hung member outlives its engine"
