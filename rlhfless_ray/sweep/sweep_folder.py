"""A sweep's folder: `sweep.json`, the recipes and logs of its runs, their run folders and the report over all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.folders import existing, locked, make_numbered
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.changes import changes
from rlhfless_ray.recipe.recipe_file import read_tree
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.report.formatting import finite, percent
from rlhfless_ray.report.metrics import read_jsonl, rows_of
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.sweep.sweep_file import PlannedRun, Sweep

State = Literal["waiting", "running", "done", "ended early", "stopped", "failed"]
COSTS = {"seconds": "time_s", "slot_s": "cost/total_full_slot_s", "money": "cost/total_money"}  # and their metrics
POOL = {"lent_slot_s": "shared/lent_slot_s", "borrowed_slot_s": "shared/borrowed_slot_s"}
FINISHED: tuple[State, ...] = ("done", "ended early")  # runs that a resumed sweep keeps


@dataclass
class RunState:
    """The state of a run.

    Attributes:
        metric: the last value of the sweep's metric.
        seconds, slot_s, money: costs of the run so far, from its ledger.
        lent_slot_s, borrowed_slot_s: slot-seconds that other runs used of its share of the pool, and that it used of theirs.
        alone: seconds, slot_s and money of a run that did this work alone, if the sweep names one.
    """

    name: str
    settings: JsonObject = field(default_factory=dict)
    state: State = "waiting"
    reason: str = ""
    step: int = 0
    steps: int | None = None
    metric: float | None = None
    seconds: float | None = None
    slot_s: float | None = None
    money: float | None = None
    lent_slot_s: float | None = None
    borrowed_slot_s: float | None = None
    alone: dict[str, float] = field(default_factory=dict)

    def read(self, rows: list[JsonObject], metric: str) -> None:
        """Take over the newest values of a run's metrics."""
        for row in rows:
            self.step = int(row["step"])
            value = finite(row.get(metric))
            self.metric = self.metric if value is None else value
            for name, value in _values(row, COSTS | POOL).items():
                setattr(self, name, value)

    @property
    def saved(self) -> dict[str, float]:
        """Shares of time, slot-seconds and money that were saved against the run alone."""
        costs = {name: getattr(self, name) for name in self.alone}
        return {name: 1 - costs[name] / value for name, value in self.alone.items() if costs[name] is not None and value > 0}

    @property
    def saved_text(self) -> str:
        """Return saved time and slot-seconds, as far as they are known."""
        names, saved = {"seconds": "time", "slot_s": "slot-s"}, self.saved
        return ", ".join(f"{percent(saved[key], 0)} {name}" for key, name in names.items() if key in saved)


def best_first(states: Sequence[RunState], direction: str) -> list[RunState]:
    """Return runs by their metric, those without one last in the sweep's order."""
    sign = -1 if direction == "max" else 1
    return sorted(states, key=lambda state: (state.metric is None, sign * (state.metric or 0.0)))


def short_name(metric: str) -> str:
    """Return a metric's name without its group, as words."""
    return metric.rpartition("/")[2].replace("_", " ")


def _values(row: JsonObject, keys: dict[str, str]) -> dict[str, float]:
    return {name: value for name, key in keys.items() if (value := finite(row.get(key))) is not None}


def costs_alone(folder: str) -> dict[str, float]:
    """Return seconds, slot-seconds and money of a whole run. Raises UserError if the folder has none."""
    costs: dict[str, float] = {}
    path = Path(folder) / "metrics.jsonl"
    for row in read_jsonl(path)[0] if path.is_file() else []:
        costs |= _values(row, COSTS)
    if not costs:
        raise UserError(f"runs.alone: {folder} is no run folder with metrics; name one, or leave it out")
    return costs


class GrowingMetrics:
    """A run's metrics file, of which each read returns what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = self._last_row = 0  # bytes up to the end of the last row that was read, and to its beginning

    def new_rows(self) -> list[JsonObject]:
        """Return the rows since the last call, and before them the last one again, to which an evaluation may have been added."""
        if not self.path.is_file() or (size := self.path.stat().st_size) == self._size:
            return []
        begin = self._last_row if size >= self._last_row else 0  # a resumed run drops the rows after its checkpoint
        with self.path.open("rb") as file:
            file.seek(begin)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete yet
        self._size, self._last_row = begin + len(whole), begin + whole.rfind(b"\n", 0, -1) + 1
        return rows_of(whole.splitlines())[0]


class SweepFolder:
    """The folder `<root>/<name>/`, which contains the runs' folders."""

    def __init__(self, path: Path, states: list[RunState]) -> None:
        self.path, self.states = path, states

    @classmethod
    def new(cls, sweep: Sweep) -> SweepFolder:
        """Return a folder that `create` will make."""
        RunFolder.check_root(sweep.runs[0].recipe)
        return cls(Path(sweep.file.root) / sweep.file.name, [_new_state(run) for run in sweep.runs])

    def create(self) -> None:
        """Create `<root>/<name>`, or `<name>-2`, `-3`, … if it exists."""
        self.path = make_numbered(self.path.parent, self.path.name)
        for name in ("recipes", "logs"):
            (self.path / name).mkdir()

    @classmethod
    def resumed(cls, sweep: Sweep) -> SweepFolder:
        """Return the newest folder of this sweep, with its finished runs.

        Raises UserError if there is none, or if a finished run had other settings.
        """
        root, name = Path(sweep.file.root), sweep.file.name
        written = {
            file: content
            for path in existing(root, name)
            if (file := path / "sweep.json").exists()
            if (content := _read_state(file)).get("name") == name  # `a-2` may be a sweep of its own
        }
        if not written:
            raise UserError(f"--resume: no sweep in {root / name}; start it without --resume")
        newest = max(written, key=lambda file: file.stat().st_mtime)
        path, before = newest.parent, {run["name"]: RunState(**run) for run in written[newest]["runs"]}
        folder = cls(path, [])
        for run in sweep.runs:
            state = before.get(run.name)
            if state is not None and state.state == "running" and state.reason:  # the sweep was killed after it had asked the run to end
                state.state = "ended early"
            if state is None or state.state not in FINISHED:
                state = _new_state(run)
            elif changed := _changed_settings(folder.recipe_file(run.name), run.recipe):
                raise UserError(
                    f"--resume: run {run.name} of {path} has finished with other settings ({', '.join(changed)}); set them back, or start "
                    "without --resume"
                )
            folder.states.append(state)
        return folder

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against another process of the same sweep. Raises UserError if there is one."""
        return locked(self.path, self._refuse)

    def _refuse(self) -> None:
        raise UserError(f"--resume: {self.path} is being written by another process; stop that sweep first")

    def recipe_file(self, name: str) -> Path:
        """Return the file with the recipe of a run that was started."""
        return self.path / "recipes" / f"{name}.yaml"

    def write(self, sweep: Sweep, status: str) -> None:
        """Write `sweep.json`."""
        file = sweep.file
        content = {
            "name": file.name,
            "status": status,
            "written_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "metric": file.metric,
            "direction": file.direction,
            "at_most": file.at_most,
            "runs": [asdict(state) for state in self.states],
        }
        replace_file(self.path / "sweep.json", (json.dumps(content, indent=1) + "\n").encode())


def _read_state(file: Path) -> JsonObject:
    """Read a sweep.json. Raises UserError if it is damaged."""
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"--resume: {file} is damaged; remove its folder, or set another name for the sweep") from None


def _new_state(run: PlannedRun) -> RunState:
    alone = costs_alone(run.alone) if run.alone else {}
    return RunState(run.name, dict(run.settings), steps=run.recipe.run.steps, alone=alone)


def _changed_settings(file: Path, recipe: Recipe | SupervisedRecipe) -> list[str]:
    """Return what differs between a finished run's recipe and the one in a file, of what may change its results and costs."""
    before = read_tree(file)
    found = (change.key for change in changes(before, recipe).found)
    return [key for key in found if not key.startswith(("checkpoint.", "cluster.", "watch.", "run.root"))]
