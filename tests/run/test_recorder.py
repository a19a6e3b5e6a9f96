"""The report of a run that still works."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.functions import ledger as ledger_module
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run import recorder as module
from rlhfless_ray.run.checkpoints import Best
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.recorder import RunRecorder
from rlhfless_ray.runtime.evaluation import Evaluations
from rlhfless_ray.runtime.step_records import StepRecords
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.step import Step, StepProgress
from rlhfless_ray.types import WeightVersion
from tests.conftest import small_recipe


@pytest.fixture
def record(tmp_path: Path) -> RunRecorder:
    recipe = Recipe.parse(small_recipe(tmp_path))
    folder = RunFolder.create(recipe)
    folder.begin(recipe, "machine", 0)
    return RunRecorder(recipe, folder, Ledger("cpu", 1.0), 0)


def test_a_checkpoint_has_a_report_that_a_kill_would_leave(record: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    record.checkpointed()
    assert record.reporter is None, "not in the first minute"
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    record.evaluation(0, {"eval/accuracy_greedy": 0.5})
    record.checkpointed()
    reporter = record.reporter
    record.checkpointed()
    assert record.reporter is reporter, "one at a time"
    assert reporter is not None and reporter.wait(timeout=500) == 0
    text = (record.folder.path / "report.html").read_text()
    assert "it is still working, or it crashed" in text and "50.0%" in text


def test_reports_of_a_long_run_are_as_rare_as_they_are_slow(record: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell of the whole run: once a minute they would cost as the square of its steps."""
    now, took_s, begun, left_s = [1000.0], 20.0, [], [0.0]

    class Reporter:
        def __init__(self, *_: object, **__: object) -> None:
            begun.append(now[0])
            left_s[0] = now[0] + took_s

        def poll(self) -> int | None:
            if now[0] < left_s[0]:
                return None
            path = record.folder.path / "report.html"
            path.touch()
            os.utime(path, (left_s[0], left_s[0]))
            return 0

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    monkeypatch.setattr(module.subprocess, "Popen", Reporter)
    record.reported_s = now[0]
    while now[0] < 3000:
        now[0] += 7.0  # steps of a checkpoint
        record.checkpointed()
    assert 60 <= begun[0] - 1000 < 70 and all(400 <= b - a < 410 for a, b in itertools.pairwise(begun)) and len(begun) == 5
    took_s = 0.5
    while now[0] < 4000:
        now[0] += 7.0
        record.checkpointed()
    assert all(60 <= b - a < 70 for a, b in itertools.pairwise(begun[6:])) and len(begun) > 12


def test_a_machine_that_cannot_start_the_report_goes_on(record: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    said: list[str] = []
    monkeypatch.setattr(record.progress, "message", said.append)
    monkeypatch.setenv("PATH", "/nowhere")
    record.checkpointed()
    assert record.reporter is None and "no report of the run so far" in said[0]


def test_the_last_report_is_not_overwritten_by_an_earlier_one(record: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    record.checkpointed()
    start = time.monotonic()
    record.close("done", "")
    assert record.reporter is not None and record.reporter.returncode is not None and time.monotonic() - start < 200
    assert "The run finished" in (record.folder.path / "report.html").read_text()
    assert {p.name for p in record.folder.path.iterdir()} >= {"report.html", "timeline.json"}


def test_the_time_left_ends_with_the_run(record: RunRecorder) -> None:
    """Also of one that filtered groups end before the recipe's last step."""
    for number, last_step in ((1, 4), (2, 2)):
        step = Step(number, wall_s=3.0, metrics={"tokens/generated": 6})
        step.plan = SimpleNamespace(metrics=dict)  # type: ignore[assignment]
        record.step(step, last_step, 0, 0.0)
        assert step.metrics["time_left_s"] == 3.0 * (last_step - number)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_every_leased_second_after_the_start_is_in_the_costs_of_a_step(record: RunRecorder, monkeypatch, is_resumed: bool) -> None:
    """A step's costs and its wall time are of the same interval: what a checkpoint takes belongs to the next step."""
    now = [record.ledger.started_s]
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(time=lambda: now[0]))
    leases = SimpleNamespace(ledger=record.ledger)
    learn = SimpleNamespace(passes_s=0.0, worker_groups=SimpleNamespace(wait_for_copy=lambda weights: weights))
    phases = StepTimer(lambda _: None)
    context: Any = SimpleNamespace(ledger=record.ledger, leases=leases, recipe=record.recipe, record=record, phases=phases)
    session = RolloutSession.__new__(RolloutSession)
    session.context, session.learn, session.weights = context, learn, WeightVersion(0, ("weights",))  # type: ignore[assignment]
    session.source = SimpleNamespace(dynamic_sampling=SimpleNamespace(state=list))  # type: ignore[assignment]
    session.groups = SimpleNamespace(in_flight=())  # type: ignore[assignment]
    session.stage = SimpleNamespace(begin=lambda *_: None, pool=SimpleNamespace(expect=lambda count: None))  # type: ignore[assignment]
    session.step = Step(0, progress=StepProgress.CLOSED)
    stages: Any = SimpleNamespace(context=context, learn=learn, agreement=None)
    inputs = SimpleNamespace(prompts=SimpleNamespace(heldout=[]))
    state: Any = SimpleNamespace(inputs=inputs, best=Best("none"), steps_done=0, owes_evaluation=not is_resumed)
    records = StepRecords(stages, session, state, dict, dict, False)  # type: ignore[arg-type]
    evaluations = Evaluations(stages, records)
    record.ledger.hold("slot", "node", "0", "learn", "")
    now[0] += 7.0
    evaluations.make_up()
    assert context.phases.take()[1] < 5.0
    found = []
    for number, starts_next in ((1, True), (2, False), (3, False)):
        step = session.upcoming = Step(number, samples=[None])  # type: ignore[list-item]
        session.take(step)
        now[0] += 5.0
        records._count(step, starts_next)
        assert step.ledger["full_slot_s"] == step.metrics["cost/full_slot_s"]
        found.append(step.ledger["full_slot_s"])
        if starts_next:
            session.start_engines(SimpleNamespace(plan=SimpleNamespace(actors=1, pools=())))  # type: ignore[arg-type]
        now[0] += 4.0
    assert found == pytest.approx([5.0, 9.0, 9.0])
