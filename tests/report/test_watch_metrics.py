from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.recipe import WatchConfig
from rlhfless_ray.report import metrics
from rlhfless_ray.report.metrics import Metrics, read_jsonl

FILE_ONLY = WatchConfig(tensorboard=False, wandb="off")


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_come_back_as_written_and_are_on_disk_at_once(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/accuracy_sampled": 0.37},
        {"step": 1, "reward/mean": 0.5, "pool/decision": "Grow", "pool/reason": "zu groß", "forecast/spearman": None},
    ]
    with Metrics(tmp_path, FILE_ONLY) as sink:
        for row in rows:
            sink.write(row)
            assert rows_of(tmp_path)[-1] == row  # before close: a crash loses nothing
    assert rows_of(tmp_path) == rows


def test_numpy_values_become_plain_json(tmp_path: Path) -> None:
    with Metrics(tmp_path, FILE_ONLY) as sink:
        sink.write({"step": np.int64(3), "a": np.float32(0.5), "b": np.bool_(True), "c": np.arange(2), "d": Path("x")})
    assert rows_of(tmp_path) == [{"step": 3, "a": 0.5, "b": True, "c": [0, 1], "d": "x"}]


def test_values_that_are_not_finite_become_null_and_are_noted_once_per_metric(tmp_path: Path) -> None:
    said: list[str] = []
    with Metrics(tmp_path, FILE_ONLY, say=said.append) as sink:
        sink.write({"step": 1, "learn/kl": float("nan"), "learn/loss": 1.0, "x": np.float32("inf")})
        sink.write({"step": 2, "learn/kl": math.nan})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = rows_of(tmp_path)
    assert first == {"step": 1, "learn/kl": None, "learn/loss": 1.0, "x": None, "nonfinite": ["learn/kl", "x"]}
    assert second["nonfinite"] == ["learn/kl"]
    assert len(said) == 2 and "learn/kl is nan" in said[0] and "x is inf" in said[1]


def test_resume_drops_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "v": step}) + "\n" for step in range(8)) + '{"step": 8, "v"')
    with Metrics(tmp_path, FILE_ONLY, resume_after_step=4) as sink:
        sink.write({"step": 5, "v": 50})
    assert [(row["step"], row["v"]) for row in rows_of(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl"]  # no temporary file is left


def test_reopening_repairs_a_torn_line_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')  # whole JSON, but its newline never came
    with Metrics(tmp_path, FILE_ONLY) as sink:
        sink.write({"step": 2, "again": True})
    assert rows_of(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 2, "again": True}], "no row is lost"


def lines_of(*steps: int) -> bytes:
    return b"".join(b'{"step":%d,"v":1}\n' % step for step in steps)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            lines_of(0, 1, 2, 3) + b'{"step":4,"v',
            [": line 5 (step 4) not complete and left out, as after a crash", ": no row of step 4, which"],
        ),
        (lines_of(0, 1, 2, 3, 4) + b'{"step":5,"v', [": line 6 (step 5) not complete and left out, as after a crash"]),
        (lines_of(0, 4) + b"\0" * 9, [": line 3 not complete", ": no row of steps 1 to 3, which the checkpoint has done: these metrics"]),
        (lines_of(1, 3, 4) + b'{"step":"x"}\n\xff\xfe\n', [": line 4, line 5 not complete", ": no row of step 2, which"]),
        (b"", [": no row of steps 1 to 4, which"]),
        (None, [" is missing, so the rows of steps 1 to 4 are lost"]),
        (lines_of(0, 1, 2, 3, 4, 5, 6), []),
    ],
)
def test_a_resume_says_which_rows_are_lost(tmp_path: Path, text: bytes | None, messages: list[str]) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    if text is not None:
        path.write_bytes(text)
    with Metrics(tmp_path, FILE_ONLY, resume_after_step=4, say=said.append):
        pass
    assert len(said) == len(messages) and all(one.startswith(f"{path}{start}") for one, start in zip(said, messages, strict=True)), said


def test_read_rows_counts_what_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b'{"a": 1}\n[1]\n\n{"a": \xff\n{"a": 2}\n{"a"')
    assert read_jsonl(tmp_path / "f") == ([{"a": 1}, {"a": 2}], 3)


def test_tensorboard_files_hold_the_scalars_and_a_resume_hides_later_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch = WatchConfig(tensorboard=True, wandb="off")
    with Metrics(tmp_path, watch) as sink:
        for step in range(5):
            sink.write({"step": step, "reward/mean": step / 10, "pool/reason": "text is left out", "bad": math.nan})
    with Metrics(tmp_path, watch, resume_after_step=2) as sink:
        sink.write({"step": 3, "reward/mean": 0.9})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(s.step, round(s.value, 6)) for s in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.9)]


class BrokenSink:
    def write(self, row: dict) -> None:
        raise ConnectionError("no\nroute to host")

    def close(self) -> None:
        raise AssertionError("a failed sink is not touched again")


def test_a_failing_copy_is_said_once_and_the_file_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "WandbRun", lambda run: BrokenSink())
    said: list[str] = []
    with Metrics(tmp_path, WatchConfig(tensorboard=False, wandb="online"), say=said.append) as sink:
        sink.write({"step": 1})
        sink.write({"step": 2})
    assert len(rows_of(tmp_path)) == 2
    assert said == ["Weights & Biases failed and is off from now on: ConnectionError: no route to host"]


def test_a_copy_that_cannot_start_is_said_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    with Metrics(tmp_path, WatchConfig(tensorboard=False, wandb="auto"), say=said.append) as sink:
        sink.write({"step": 1})
    assert rows_of(tmp_path) == [{"step": 1}]
    assert said == ["Weights & Biases is off for this run: ModuleNotFoundError: import of wandb halted; None in sys.modules"]


@dataclass
class Wandb:
    """A stand-in that records calls: the real one takes seconds and starts a process."""

    folder: Path
    logged_in: bool = True
    starts: list[dict[str, Any]] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)
    finished: int = 0
    url: str | None = None

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> Wandb:
        self.starts.append(options)
        if options["mode"] == "online" and not self.logged_in:
            raise ValueError("No API key configured.")
        return self

    @property
    def dir(self) -> str:
        return str(self.folder / "wandb" / "offline-run" / "files")

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        self.logged.append(row)

    def finish(self) -> None:
        self.finished += 1


def test_without_login_what_was_to_be_online_is_kept_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--use_wandb True` asks for this on a machine where nobody is logged in."""
    wandb = Wandb(tmp_path, logged_in=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    said: list[str] = []
    with Metrics(tmp_path, WatchConfig(tensorboard=False, wandb="online"), say=said.append) as sink:
        sink.write({"step": 1})
    assert [start["mode"] for start in wandb.starts] == ["online", "offline"] and wandb.logged == [{"step": 1}]
    assert said[0] == "cannot log to Weights & Biases online (ValueError: No API key configured.)"


def test_wandb_gets_numbers_over_steps_inside_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "recipe.yaml").write_text("run: {steps: 3}\n")
    said: list[str] = []
    watch = WatchConfig(tensorboard=False, wandb="auto", wandb_project="p", run_name="name")
    with Metrics(tmp_path, watch, say=said.append) as sink:
        sink.write({"step": 1, "reward/mean": 0.5, "pool/reason": "text", "learn/kl": math.nan})
    (start,) = wandb.starts
    assert (start["mode"], start["project"], start["name"], start["dir"]) == ("offline", "p", "name", str(tmp_path))
    assert start["group"] == tmp_path.name and start["config"] == {"run": {"steps": 3}} and start["settings"]["silent"] is True
    assert wandb.logged == [{"step": 1, "reward/mean": 0.5}] and wandb.finished == 1
    assert any("wandb sync" in line for line in said)
