"""Where a run's checkpoints lie, which of them stay, and which one a resumed run begins with.

In the run folder: `checkpoints/step_<n>/`. With `checkpoint.path` as OpenRLHF's users expect them there: `_actor/global_step<n>/`,
`_actor/latest` with the name of the newest, `_actor/best_global_step<n>/`, and models for others in `global_step<n>_hf/`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import xxhash

from rlhfless_ray.errors import UserError
from rlhfless_ray.recipe.running import Checkpoint
from rlhfless_ray.watch.openrlhf_names import renamed
from rlhfless_ray.weights.folder import write_folder

DRIVER, METRIC, LATEST = "driver.json", "metric.json", "latest"
BEST = "best_"
SUMS = "xxh3"  # in DRIVER: a checksum of each of the learner's files. A machine that loses power may keep a name without its content


class Checkpoints:
    """One rename makes a checkpoint, and one takes it away: each is whole or not there, whenever the process is killed."""

    def __init__(self, section: Checkpoint, run_folder: Path) -> None:
        self.section = section
        self.elsewhere = Path(section.path) if section.path else None
        self.folder = self.elsewhere / "_actor" if self.elsewhere else run_folder / "checkpoints"
        self.prefix = "global_step" if self.elsewhere else "step_"

    def list(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete one but the best, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(path.name.removeprefix(self.prefix), path) for path in self.folder.iterdir() if path.name.startswith(self.prefix)]
        return sorted((int(number), path) for number, path in found if number.isdigit())

    def save(
        self, step: int, learner: dict[str, bytes], driver: dict[str, Any], metric: tuple[str, float] | None = None,
        model: dict[str, bytes] | None = None,
    ) -> None:
        """Write one, then take others away until what the recipe lets stay is left. `metric`: name and value of the evaluation
        at this step. `model`: files of a Hugging Face folder, written too where the recipe asks for it."""
        if self.elsewhere is not None and model is not None and (self.section.save_hf or not self.section.resumable):
            swap_folder(self.elsewhere / f"global_step{step}_hf", model)
        if not self.section.resumable:
            return
        self._write(self.folder / f"{self.prefix}{step}", learner, driver, metric)
        if self.elsewhere is not None:
            replace_file(self.folder / LATEST, f"{self.prefix}{step}".encode())
        self._evict(self.folder / f"{self.prefix}{step}")
        for left_over in self.folder.glob(f".{self.prefix}*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)

    def save_best(
        self, step: int, learner: dict[str, bytes], driver: dict[str, Any], metric: tuple[str, float], model: dict[str, bytes]
    ) -> None:
        """Beside the others, in the place of the one that was best before."""
        path = self.folder / f"{BEST}{self.prefix}{step}"
        if self.elsewhere is not None and (self.section.save_hf or not self.section.resumable):
            swap_folder(self.elsewhere / f"{BEST}global_step{step}_hf", model)
            for old in self.elsewhere.glob(f"{BEST}global_step*_hf"):
                if old.name != f"{BEST}global_step{step}_hf":
                    _remove(old)
        if self.section.resumable:
            self._write(path, learner, driver, metric)
            for old in self.folder.glob(f"{BEST}{self.prefix}*"):
                if old != path:
                    _remove(old)

    def _write(self, path: Path, learner: dict[str, bytes], driver: dict[str, Any], metric: tuple[str, float] | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        named = {} if metric is None else {"metric_key": metric[0], "metric_value": metric[1]}
        told = {METRIC: json.dumps(named).encode()} if named else {}
        sums = {name: _sum(content) for name, content in learner.items()}
        swap_folder(path, {**learner, DRIVER: json.dumps({**driver, SUMS: sums}).encode(), **told})

    def _evict(self, stays: Path) -> None:
        """Those without a metric go first, then those of the worst, then the oldest."""
        others = sorted((path for _, path in self.list() if path != stays), key=_worth)
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in [*others, stays]}
        while others and (len(others) >= self.section.keep or sum(sizes.values()) > self.section.max_gib * 2**30):
            victim = others.pop(0)
            del sizes[victim]
            _remove(victim)

    def check(self) -> None:
        """Raises UserError where another program's checkpoints lie in our place: ours would take theirs away."""
        for step, path in self.list():
            if self.elsewhere is not None and not (path / DRIVER).is_file():
                raise UserError(
                    f"checkpoint.path: {path} is a checkpoint of DeepSpeed, as OpenRLHF writes it, which is not read here; begin with "
                    f"its Hugging Face export as the model to train ({self.elsewhere / f'global_step{step}_hf'}, where there is one) and "
                    "with another folder for checkpoints"
                )

    def newest(self) -> tuple[int, Path] | None:
        """The one that `latest` names, or of the last step. Raises UserError where any is another program's."""
        self.check()
        found = self.list()
        latest = self.folder / LATEST
        if self.elsewhere is not None and latest.is_file():
            name = latest.read_text().strip()
            found = [(step, path) for step, path in found if path.name == name] or found
        if not found:
            return None
        return found[-1]

    def load(self) -> tuple[int, dict[str, bytes], dict[str, Any]]:
        """The newest one: step, the learner's files, the driver's state."""
        found = self.newest()
        if found is None:
            raise UserError(f"--resume: no checkpoint in {self.folder}; start without --resume")
        step, path = found
        files = {file.name: file.read_bytes() for file in path.iterdir() if file.name not in (DRIVER, METRIC)}
        driver = driver_state(path)
        for name, told in driver.pop(SUMS, {}).items():  # older checkpoints have none
            if _sum(files.get(name, b"")) != told:
                raise UserError(
                    f"--resume: {path / name} is not what was written there (did the machine lose power, or the disk fail?); remove "
                    f"{path} to continue from the one before"
                )
        return step, files, driver


class Best:
    """The best evaluation so far, by the metric that the recipe names."""

    def __init__(self, name: str) -> None:
        self.name = name  # "none": nobody asks; empty: the first pass1
        self.value: float | None = None
        self.known = False  # an evaluation had it

    def of(self, evaluation: dict[str, float]) -> tuple[str, float] | None:
        """Name and value of the metric in an evaluation; None where one before had it: this time no response to its prompts could be
        scored. Raises UserError where none had it."""
        if self.name == "none" or not evaluation:
            return None
        known = {name.removeprefix("eval/"): value for name, value in renamed(evaluation).items() if name.startswith("eval/")}
        known.pop("global_step", None)
        known |= {name.removeprefix("eval/"): value for name, value in evaluation.items()}
        wanted = self.name.removeprefix("eval/") or next((name for name in known if name.endswith("_pass1")), "accuracy_sampled")
        if wanted not in known:
            if self.known or self.value is not None:
                return None
            raise UserError(
                f"checkpoint.best_metric: the evaluation has no `{wanted}`, only {', '.join(f'`{name}`' for name in sorted(known))}"
            )
        self.known, self.name = True, wanted  # the same from now on: sources are not compared with one another
        return wanted, float(known[wanted])

    def improved(self, metric: tuple[str, float] | None) -> bool:
        """Whether this is better than all before; it is what others are compared with then."""
        if metric is None or (self.value is not None and metric[1] <= self.value):
            return False
        self.value = metric[1]
        return True


def _worth(path: Path) -> tuple[bool, float, int]:
    step = int("".join(filter(str.isdigit, path.name)))
    try:
        return True, float(json.loads((path / METRIC).read_text())["metric_value"]), step
    except (OSError, ValueError, KeyError):
        return False, 0.0, step


def driver_state(path: Path) -> dict[str, Any]:
    """What the driver wrote into the checkpoint in this folder. Raises UserError where that is not there, or not whole."""
    try:
        return dict(json.loads((path / DRIVER).read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"--resume: {path} is not a complete checkpoint; remove it to continue from the one before") from None


def _sum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _remove(path: Path) -> None:
    gone = path.with_name(f".{path.name}.gone")  # whole or not there at all, also while it is removed
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def swap_folder(path: Path, files: dict[str, bytes]) -> Path:
    """Write beside it and rename: a process that is killed leaves the old folder or the new one, or, between two renames, the old one
    under its name with `.old-` behind it. Where there was none, one rename makes it."""
    temporary, old = (path.with_name(f".{path.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    for left_over in path.parent.glob(f".{path.name}.*-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    write_folder(temporary, files)
    if path.exists():
        os.rename(path, old)
    os.replace(temporary, path)
    shutil.rmtree(old, ignore_errors=True)
    return path


def replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
