"""Metrics: one flat row per step to `metrics.jsonl`, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhfless_ray.errors import typed_line
from rlhfless_ray.recipe import Watch
from rlhfless_ray.watch.openrlhf_names import SAMPLE, Shown, renamed, step_line

SAID_CHARACTERS = 400  # of an error


class Sink(Protocol):
    """Somewhere a cleaned row goes besides the file."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes the row of every step; open it once per process on the run folder.

    The file is the record: an error writing it is raised. TensorBoard and Weights & Biases are copies: when one fails, one
    line goes to `say` and the run continues without it.

    run_folder: the run's folder; it exists. name: shown in Weights & Biases. resume_after_step: rows of later steps are
    dropped from the file (they will be repeated) and hidden in TensorBoard. say: takes one line of text; default stderr.
    """

    def __init__(
        self,
        run_folder: Path,
        watch: Watch,
        name: str,
        *,
        resume_after_step: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say or _to_stderr
        self._watch = watch
        self._noted: set[str] = set()
        self.path = Path(run_folder) / "metrics.jsonl"
        _drop_after(self.path, resume_after_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._sinks: dict[str, Sink] = {}
        for label, is_on, make in (
            ("TensorBoard", watch.tensorboard, _tensorboard),
            ("Weights & Biases", watch.wandb != "off", _wandb),
        ):
            if is_on:
                try:
                    self._sinks[label] = make(Path(run_folder), watch, name, resume_after_step, self._say)
                except (
                    Exception
                ) as error:  # their failure modes are many (network, login, a missing package): none may end a run
                    self._say(f"{label} is off for this run: {typed_line(error, SAID_CHARACTERS)}")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, and copy it to wherever else it goes."""
        self.copy(self.keep(row))

    def keep(self, row: dict[str, Any], sample: Shown | None = None) -> dict[str, Any]:
        """Append one row (`step` and flat keys). NaN and infinities become null and are listed under `nonfinite`. Returns what `copy`
        takes; with OpenRLHF's names the sample too, which is not in the file."""
        row, bad = _clean(row)
        if bad:
            row["nonfinite"] = sorted(bad)
            for key in sorted(set(bad) - self._noted):
                self._noted.add(key)
                self._say(f"step {row.get('step')}: {key} is {bad[key]}, written as null (said once per metric)")
        self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n")
        self._file.flush()
        told = self._for_sinks(row)
        return {**told, SAMPLE: sample} if sample is not None and "train/policy_loss" in told else told

    def copy(self, told: dict[str, Any]) -> None:
        """To TensorBoard and Weights & Biases, as far as they are on."""
        for label in list(self._sinks) if told else ():
            self._guard(label, lambda sink: sink.write(told))

    def _for_sinks(self, row: dict[str, Any]) -> dict[str, Any]:
        """What of a row goes on, and under which names; empty: nothing."""
        step, ours = row.get("step"), self._watch.metric_names == "own"
        if not ours and "learn/policy_loss" in row:
            self._say(step_line(row))
        if isinstance(step, int) and step % self._watch.every_steps:
            row = {name: value for name, value in row.items() if name.startswith("eval/")}
            if not row:
                return {}
            row["step"] = step
        return row if ours else {"step": step, **renamed(row)}

    def amend(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append the row, or join it to the last one if that is of the same step, whose values stay; returns it whole."""
        last: dict[str, Any] = next(reversed(read_rows(self.path)[0]), {})
        if last.get("step") == row["step"]:
            row = {**row, **last}
            self._file.close()
            _drop_after(self.path, row["step"] - 1)
            self._file = self.path.open("a", encoding="utf-8")
        self.write(row)
        return row

    def close(self) -> None:
        """Flush and close everything; calling it twice is harmless."""
        for label in list(self._sinks):
            self._guard(label, lambda sink: sink.close())
        self._sinks.clear()
        self._file.close()

    def _guard(self, label: str, act: Callable[[Sink], None]) -> None:
        try:
            act(self._sinks[label])
        except Exception as error:  # see __init__: a copy may fail, the run may not
            self._sinks.pop(label, None)
            self._say(f"{label} failed and is off from here on: {typed_line(error, SAID_CHARACTERS)}")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a JSONL file and the number of lines that are not whole JSON objects (a crash tears the last one)."""
    rows: list[dict[str, Any]] = []
    torn = 0
    for line in path.read_bytes().splitlines():
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


def _drop_after(path: Path, step: int | None) -> None:
    """Leave only whole rows of steps up to `step` (None: every step), in one atomic replacement."""
    if not path.exists():
        return
    text = path.read_bytes()
    kept = []
    for line in text.splitlines(keepends=True):
        try:
            at = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash: its step is repeated or lost, and appending behind it would tear the next row too
        if line.endswith(b"\n") and (step is None or at <= step):
            kept.append(line)
    whole = b"".join(kept)
    if whole != text:
        fresh = path.with_suffix(".jsonl.new")
        fresh.write_bytes(whole)
        os.replace(fresh, path)


def _clean(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """JSON values only, and the keys whose value was NaN or infinite."""
    bad: dict[str, float] = {}

    def plain(key: str, value: Any) -> Any:
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


def _tensorboard(folder: Path, watch: Watch, name: str, resume_after_step: int | None, say: Callable[[str], None]) -> Sink:
    from rlhfless_ray.watch.tensorboard_sink import TensorBoard

    path = Path(watch.tensorboard_path) / (watch.run_name or name) if watch.tensorboard_path else folder / "tensorboard"
    return TensorBoard(path, resume_after_step=resume_after_step)


def _wandb(folder: Path, watch: Watch, name: str, resume_after_step: int | None, say: Callable[[str], None]) -> Sink:
    from rlhfless_ray.watch.wandb_sink import WandbRun

    def made(mode: Literal["auto", "online", "offline", "off"]) -> Sink:
        return WandbRun(
            folder, mode=mode, project=watch.wandb_project, name=watch.run_name or name, entity=watch.wandb_entity,
            group=watch.wandb_group or name, openrlhf_names=watch.metric_names == "openrlhf", say=say,
        )

    try:
        return made(watch.wandb)
    except Exception as error:  # no login, no network: what was asked to be logged is kept for later
        if watch.wandb != "online":
            raise
        say(f"Weights & Biases cannot be logged to online ({typed_line(error, SAID_CHARACTERS)})")
        return made("offline")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
