"""What the driver of a supervised stage makes of its ranks' reports."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.local.memory_watch import MemoryWatch
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.report.metrics import read_jsonl
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.supervise.leased_ranks import LeasedRanks
from rlhfless_ray.supervise.rank_recorder import RankRecorder

SLOTS = cast(LeasedRanks, SimpleNamespace(assign=lambda *_: [], expect=lambda _: None, metrics=dict))


def test_a_stage_ends_after_too_many_skipped_steps_in_a_row(tmp_path: Path) -> None:
    recipe = SupervisedRecipe.parse(
        {
            "task": "sft",
            "run": {"steps": 9},
            "data": {"task": "chain"},
            "learner": {"max_skipped_updates": 1},
            "watch": {"tensorboard": False, "wandb": "off"},
        }
    )
    recorder = RankRecorder(recipe, RunFolder(tmp_path), ProgressDisplay("off", 9, title=""), Ledger("cpu"), SLOTS)
    recorder.open(None)
    for step, skipped in enumerate(["the gradient norm is nan", "", "the gradient norm is inf"], 1):
        recorder.record("step", (step, {"step_s": 1.0}, skipped, time.time()))
    with pytest.raises(
        RunError, match=r"^2 optimizer steps in a row were skipped \(learner.max_skipped_updates = 1\): the loss is not finite;"
    ):
        recorder.record("step", (4, {"step_s": 1.0}, "the loss is not finite", time.time()))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")[0]] == [1, 2, 3, 4]


def test_a_row_has_the_memory_of_all_nodes(tmp_path: Path) -> None:
    recipe = SupervisedRecipe.parse({"task": "sft", "data": {"task": "chain"}, "watch": {"tensorboard": False, "wandb": "off"}})
    recorder = RankRecorder(recipe, RunFolder(tmp_path), ProgressDisplay("off", 9, title=""), Ledger("cpu"), SLOTS)
    recorder.memory = cast(MemoryWatch, SimpleNamespace(take=lambda: {"learner": 500.0, "driver": 100.0, "total": 600.0}))
    recorder.expected_mb = {"learner": 7.0}, {"learner": 610.0, "total": 1110.0}
    recorder.open(None)
    peaks = {"learner": 400.0, "total": 450.0}
    for step, reported in enumerate((peaks, {}, {"learner": 300.0, "total": 350.0}, {}), 1):
        if step in (1, 4):  # a group of ranks starts
            recorder.begin_ranks()
        for rank in (1, 2):
            recorder.record("memory", (rank, reported))
        recorder.record("step", (step, {"step_s": 1.0}, "", time.time()))
    rows = read_jsonl(tmp_path / "metrics.jsonl")[0]
    names = [f"memory/{name}_peak_mb" for name in ("learner", "driver", "total")]
    expected = [rows[0][f"memory/{name}_mb"] for name in ("learner_least", "learner_predicted", "total_predicted")]
    assert expected == [7, 610, 1110]
    assert [[row[name] for name in names] for row in rows] == [[1300, 100, 1500], [1300, 100, 1500], [1100, 100, 1300], [500, 100, 600]]
