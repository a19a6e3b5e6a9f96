"""Write metrics: one flat row per step to `metrics.jsonl`, TensorBoard, Weights & Biases, MLflow, trackio and Prometheus."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlhfless_ray.common.disk_space import append, replace_file
from rlhfless_ray.common.errors import one_line_with_type, shortened
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import WatchConfig
from rlhfless_ray.report.openrlhf_names import SAMPLE, Shown, renamed, step_line
from rlhfless_ray.report.sinks import MAX_ERROR_CHARS, MlflowRun, Prometheus, Sink, SinkRun, TensorBoard, TrackioRun, WandbRun

RENAMED = ("TensorBoard", "Weights & Biases")  # destinations that get OpenRLHF's names; the dashboard for Prometheus asks for ours


class Metrics:
    """Write the row of every step. Open it once per process on the run folder.

    Errors in writing the file are raised. If another destination fails, one line goes to `say` and the run continues
    without it.

    Args:
        run_folder: the run's existing folder.
        resume_after_step: rows of later steps are removed from the file (they will be repeated) and hidden in TensorBoard.
        say: takes one line of text; default stderr.
    """

    def __init__(
        self, run_folder: Path, watch: WatchConfig, *, resume_after_step: int | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._say = say or _to_stderr
        self._watch = watch
        self._noted: set[str] = set()
        self.path = Path(run_folder) / "metrics.jsonl"
        for message in _drop_after(self.path, resume_after_step):
            self._say(message)
        self._owed = b""  # rows for which there was no space
        self._append()
        self._sinks: dict[str, Sink] = {}
        run = SinkRun(Path(run_folder), watch, resume_after_step, self._say)
        known: tuple[tuple[str, object, Callable[[SinkRun], Sink]], ...] = (
            ("TensorBoard", watch.tensorboard, TensorBoard),
            ("Weights & Biases", watch.wandb != "off", WandbRun),
            ("MLflow", watch.mlflow, MlflowRun),
            ("trackio", watch.trackio, TrackioRun),
            ("Prometheus", watch.prometheus, Prometheus),
        )
        for label, is_on, sink in known:
            if is_on:
                try:
                    self._sinks[label] = sink(run)
                except Exception as error:  # network, login, a missing package, …: none of these may end a run
                    self._say(f"{label} is off for this run: {one_line_with_type(error, MAX_ERROR_CHARS)}")

    def write(self, row: JsonObject) -> None:
        """Append one row, and copy it to the other destinations."""
        self.copy(self.keep(row))

    def keep(self, row: JsonObject, sample: Shown | None = None) -> JsonObject:
        """Append one row (`step` and flat keys). NaN and infinities become null and are listed under `nonfinite`.

        Returns the argument of `copy`. Where OpenRLHF's names are wanted it contains the sample, which is not in the file.
        """
        copied = self._for_sinks(self._record(row))
        return {**copied, SAMPLE: sample} if sample is not None and self._renames and "learn/policy_loss" in copied else copied

    def _record(self, row: JsonObject) -> JsonObject:
        """Append one row to the file, and return it as it is there."""
        row, bad = _clean(row)
        if bad:
            row["nonfinite"] = sorted(bad)
            for key in sorted(set(bad) - self._noted):
                self._noted.add(key)
                self._say(f"step {row.get('step')}: {key} is {bad[key]}, written as null (reported once per metric)")
        self._owed += json.dumps(row, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        self._append()
        return row

    @property
    def _renames(self) -> bool:
        return self._watch.metric_names == "openrlhf"

    def _append(self) -> None:
        """Write the rows that are not in the file yet, or keep them for the end of the run. Raises DiskFull."""
        append(self.path, self._owed)
        self._owed = b""

    def copy(self, copied: JsonObject) -> None:
        """Send a row to the other destinations that are on."""
        if not copied:
            return
        theirs = {"step": copied.get("step"), **renamed(copied)} if self._renames else copied
        for label in list(self._sinks):
            self._send(label, theirs if label in RENAMED else copied)

    def _send(self, label: str, row: JsonObject) -> None:
        self._guard(label, lambda sink: sink.write(row))

    def _for_sinks(self, row: JsonObject) -> JsonObject:
        """Return the part of a row for other destinations; empty if there is none."""
        step = row.get("step")
        if self._renames and "learn/policy_loss" in row:
            self._say(step_line(row))
        if isinstance(step, int) and step % self._watch.every_steps:
            row = {name: value for name, value in row.items() if name.startswith("eval/")}
            if not row:
                return {}
            row["step"] = step
        return row

    def amend(self, row: JsonObject) -> JsonObject:
        """Append the row, or merge it into the last row of the same step, whose values stay. Returns the complete row.

        Other destinations get what is new.
        """
        last: JsonObject = next(reversed(read_jsonl(self.path)[0]), {})
        if last.get("step") != row["step"]:
            self.write(row)
            return row
        _drop_after(self.path, row["step"] - 1)
        new = {name: value for name, value in row.items() if name == "step" or name not in last}
        row = {**row, **last}
        self._record(row)
        self.copy(self._for_sinks(_clean(new)[0]))
        return row

    def close(self) -> None:
        """Flush and close everything. May be called twice."""
        for label in list(self._sinks):
            self._guard(label, lambda sink: sink.close())
        self._sinks.clear()
        self._append()

    def _guard(self, label: str, act: Callable[[Sink], None]) -> None:
        try:
            act(self._sinks[label])
        except Exception as error:  # see __init__: this must not end the run
            self._sinks.pop(label, None)
            self._say(f"{label} failed and is off from now on: {one_line_with_type(error, MAX_ERROR_CHARS)}")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_jsonl(path: Path) -> tuple[list[JsonObject], int]:
    """Read the rows of a JSONL file, and the number of lines that are not complete JSON objects, such as after a crash."""
    return rows_of(path.read_bytes().splitlines())


def rows_of(lines: Iterable[bytes]) -> tuple[list[JsonObject], int]:
    """Parse lines of a JSONL file as `read_jsonl` does."""
    rows: list[JsonObject] = []
    torn = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            torn += 1
    return rows, torn


def _drop_after(path: Path, step: int | None) -> list[str]:
    """Keep only complete rows of steps up to `step` (None: every step), in one atomic replacement.

    Returns messages for the user: lines that are not complete, and steps up to `step` that have no row.
    """
    if not path.exists():
        return [f"{path} is missing, so the rows of steps 1 to {step} are lost"] if step else []
    text = path.read_bytes()
    kept, steps, torn = [], set(), []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            at = json.loads(line)["step"]
            in_time = step is None or at <= step
        except (ValueError, KeyError, TypeError):  # appending to a line that a crash cut off would damage the next row too
            if line.strip():
                torn.append(f"line {number}{_torn_step(line)}")
            continue
        if in_time:
            steps.add(at)
            kept.append(line + b"\n")
    whole = b"".join(kept)
    if whole != text:
        replace_file(path, whole)
    messages = [f"{path}: {shortened(torn)} not complete and left out, as after a crash"] if torn else []
    if missing := [number for number in range(1, (step or 0) + 1) if number not in steps]:
        messages.append(f"{path}: no row of {step_ranges(missing)}, which the checkpoint has done: these metrics are lost")
    return messages


def _torn_step(line: bytes) -> str:
    """Return the step that an incomplete row names, if it is still there: ` (step 4)`."""
    found = re.match(rb'\s*\{"step":\s*(\d+)\s*,', line)
    return f" (step {int(found[1])})" if found else ""


def step_ranges(steps: Iterable[int]) -> str:
    """Format sorted steps, with runs of them shortened: `steps 2, 5 to 9`."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    shown = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
    return f"step{'' if len(spans) == 1 and spans[0][0] == spans[0][1] else 's'} {shown}"


def _clean(row: JsonObject) -> tuple[JsonObject, dict[str, float]]:
    """Convert to JSON values, and return the keys whose value was NaN or infinite."""
    bad: dict[str, float] = {}

    def plain(key: str, value: object) -> Any:
        if value is None or isinstance(value, (str, bool, int)):
            return value
        if isinstance(value, float):  # numpy's float64 is one too
            if math.isfinite(value):
                return float(value)
            bad[key] = float(value)
            return None
        if isinstance(value, (list, tuple)):
            return [plain(key, item) for item in value]
        if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
            return plain(key, value.tolist())
        return str(value)

    return {key: plain(key, value) for key, value in row.items()}, bad


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
