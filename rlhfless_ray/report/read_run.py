"""Read a run folder, complete or not, and collect sentences about files that could not be read."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import yaml

from rlhfless_ray.common.errors import shortened
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.yaml_text import read_yaml
from rlhfless_ray.report.formatting import finite
from rlhfless_ray.report.metrics import read_jsonl, step_ranges

LEDGER_NUMBERS = ("step", "from_s", "to_s", "seconds", "slots", "memory_mb", "money", "repeated")


@dataclass
class RunRecord:
    """A run folder's content, finished or not: the data of report and timeline.

    Attributes:
        metrics: one row per step, in order; step 0 is the evaluation before training.
        ledger: rows in order of `from_s`. The columns in `LEDGER_NUMBERS` are numbers, or None if empty.
        samples: step → file.
        problems: one sentence for each file or line that could not be read.
    """

    folder: Path
    status: JsonObject = field(default_factory=dict)
    recipe: str = ""
    metrics: list[JsonObject] = field(default_factory=list)
    ledger: list[JsonObject] = field(default_factory=list)
    samples: dict[int, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the folder as it is now. Missing or incomplete files become sentences in `problems`."""
        record = cls(folder=Path(folder))
        record._read_status()
        record.recipe = record._text("recipe.yaml", "the recipe is not shown") or ""
        record._read_metrics()
        record._read_ledger()
        record._find_samples()
        return record

    @property
    def is_supervised(self) -> bool:
        """Whether this is a supervised stage, which generates nothing."""
        return "task" in self.settings

    @cached_property
    def settings(self) -> JsonObject:
        """The recipe's sections by name; empty if it cannot be read."""
        try:
            tree = read_yaml(self.recipe)
        except yaml.YAMLError:
            return {}
        return tree if isinstance(tree, dict) else {}

    @property
    def steps(self) -> list[JsonObject]:
        """Rows of training steps (from step 1 on)."""
        return [row for row in self.metrics if row["step"] >= 1]

    def read_samples(self, step: int) -> list[JsonObject]:
        """Return a step's stored samples, without incomplete lines."""
        return self._jsonl(f"samples/{self.samples[step].name}") if step in self.samples else []

    def _problem(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems.append(sentence)

    def _text(self, name: str, without: str) -> str | None:
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self._problem(f"{name} is missing, so {without}.")
        except OSError as error:
            self._problem(f"{name} cannot be read ({error.strerror or error}), so {without}.")
        return None

    def _jsonl(self, name: str) -> list[JsonObject]:
        """Return the complete rows of a file that exists."""
        try:
            rows, torn = read_jsonl(self.folder / name)
        except OSError as error:
            self._problem(f"{name} cannot be read: {error.strerror or error}.")
            return []
        if torn:
            self._problem(f"{name}: {_lines(torn)} not whole and left out, as after a crash.")
        return rows

    def _read_status(self) -> None:
        text = self._text("status.json", "how the run ended is unknown")
        if text is None:
            return
        try:
            status = json.loads(text)
        except ValueError:
            self._problem("status.json is not whole JSON, so how the run ended is unknown.")
            return
        if isinstance(status, dict):
            self.status = status

    def _read_metrics(self) -> None:
        if not (self.folder / "metrics.jsonl").is_file():
            self._problem("metrics.jsonl is missing, so there are no curves: the run ended before its first step did.")
            return
        # A step that was repeated after a resume counts once: the run continued from its last row.
        by_step: dict[int, JsonObject] = {}
        for row in self._jsonl("metrics.jsonl"):
            if finite(row.get("step")) is not None:
                row["step"] = int(row["step"])
                by_step[row["step"]] = row
        self.metrics = [by_step[step] for step in sorted(by_step)]
        done = finite(self.status.get("steps_done")) or 0
        if self.metrics and (lost := [step for step in range(1, int(min(done, len(by_step) + 10**5)) + 1) if step not in by_step]):
            self._problem(f"metrics.jsonl has no row of {step_ranges(lost)}.")
        if not self.metrics:
            self._problem("metrics.jsonl has no whole row yet.")

    def _read_ledger(self) -> None:
        text = self._text("ledger.csv", "the lease timeline and the costs are not shown")
        if text is None:
            return
        lines = text.split("\n")
        header = lines[0].rstrip("\r").split(",")
        if header == [""]:
            self._problem("ledger.csv is empty.")
            return
        broken: list[str] = []
        words: dict[str, str] = {}  # shares equal cell texts, because a long run has hundreds of thousands of rows
        for number, line in enumerate(lines[1:], 2):
            if not line.strip():
                continue
            cells = _cells(line.rstrip("\r"))
            row: JsonObject = {name: words.setdefault(cell, cell) for name, cell in zip(header, cells, strict=False)}
            for key in LEDGER_NUMBERS:
                row[key] = finite(row.get(key))
            if len(cells) != len(header) or row["from_s"] is None or row["to_s"] is None or row["to_s"] < row["from_s"]:
                broken.append(f"line {number}")
                continue
            if row["seconds"] is None:
                row["seconds"] = row["to_s"] - row["from_s"]
            row["step"] = None if row["step"] is None else int(row["step"])
            self.ledger.append(row)
        if broken:
            self._problem(f"ledger.csv: {shortened(broken)} not whole and left out, as after a crash.")
        self.ledger.sort(key=lambda row: row["from_s"])

    def _find_samples(self) -> None:
        for path in (self.folder / "samples").glob("step_*.jsonl"):
            match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
            if match:
                self.samples[int(match[1])] = path
        self.samples = dict(sorted(self.samples.items()))
        if not self.samples and not self.is_supervised:
            self._problem("There are no files in samples/, so no texts and no length histogram are shown.")


def _cells(line: str) -> list[str]:
    """Return the cells of one line of a CSV file. A quote that was never closed takes no further lines."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]))
    except csv.Error:
        return []


def _lines(count: int) -> str:
    return "1 line is" if count == 1 else f"{count} lines are"
