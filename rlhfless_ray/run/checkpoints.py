"""A run's checkpoints: where they are, which are kept, and which one a resumed run loads.

They are in the run folder's `checkpoints/step_<n>/`, or below `checkpoint.path` in OpenRLHF's layout: `_actor/global_step<n>/`,
`_actor/latest` with the name of the newest, `_actor/best_global_step<n>/`, and Hugging Face models in `global_step<n>_hf/`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhfless_ray.common.disk_space import replace_file, writing
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.run_sections import CheckpointConfig
from rlhfless_ray.report.openrlhf_names import renamed
from rlhfless_ray.run.checkpoint_files import CHECKSUMS, DRIVER, LISTED, DamagedCheckpoint, driver_state, read_checkpoint, write_checksums
from rlhfless_ray.weights.remote_folder import StoredFiles, Writer, writer
from rlhfless_ray.weights.tensor_file import Files

METRIC, LATEST = "metric.json", "latest"
BEST = "best_"
ASIDE = "aside_"  # a checkpoint that --resume=previous left out
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of renameat2(2)


class Checkpoints:
    """Checkpoints, each created and removed by one rename: a killed process never leaves a partial one."""

    def __init__(self, section: CheckpointConfig, run_folder: Path) -> None:
        self.section = section
        self.elsewhere = Path(section.path) if section.path else None
        self.folder = self.elsewhere / "_actor" if self.elsewhere else run_folder / "checkpoints"
        self.prefix = "global_step" if self.elsewhere else "step_"
        self.note = ""  # message for the user about the checkpoint that was loaded

    def list(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of every complete checkpoint but the best, oldest first."""
        if not self.folder.is_dir():
            return []
        named = [(path.name.removeprefix(self.prefix), path) for path in self.folder.iterdir() if path.name.startswith(self.prefix)]
        return sorted((int(number), path) for number, path in named if number.isdigit())

    @property
    def exports(self) -> bool:
        """Whether models for others are written beside checkpoints."""
        return self.elsewhere is not None and (self.section.save_hf or not self.section.resumable)

    def save(
        self, step: int, learner: Writer, driver: JsonObject, metric: tuple[str, float] | None = None, model: Writer | None = None
    ) -> None:
        """Write a checkpoint, and remove others beyond the recipe's limits.

        `learner`: writes the learner's files. `metric`: name and value of the evaluation at this step. `model`: writes a Hugging Face
        folder, which is written too if the recipe asks for it.
        """
        name = f"{self.prefix}{step}"
        list(self._write(name, learner, driver, metric, model))
        if not self.section.resumable:
            return
        if self.elsewhere is not None:
            replace_file(self.folder / LATEST, name.encode())
        self._evict(self.folder / name)
        for left_over in self.folder.glob(f".{self.prefix}*"):  # left by a killed process
            shutil.rmtree(left_over, ignore_errors=True)

    def save_best(self, step: int, learner: Writer, driver: JsonObject, metric: tuple[str, float], model: Writer | None) -> None:
        """Write the best checkpoint, and remove the former best one: its model before the state is written, because disks fill up."""
        for path in self._write(f"{BEST}{self.prefix}{step}", learner, driver, metric, model):
            for old in path.parent.glob(f"{BEST}{self.prefix}*"):
                if old != path:
                    _remove(old)

    def _write(
        self, name: str, learner: Writer, driver: JsonObject, metric: tuple[str, float] | None, model: Writer | None
    ) -> Iterator[Path]:
        """Write a checkpoint's model and state, each if the recipe asks for it, and yield each folder once it is there."""

        def write(folder: Path) -> None:
            own: Files = {DRIVER: json.dumps({**driver, LISTED: CHECKSUMS}).encode()}
            if metric is not None:
                own[METRIC] = json.dumps({"metric_key": metric[0], "metric_value": metric[1]}).encode()
            write_checksums(folder, learner(folder) | writer(own)(folder))

        if self.elsewhere is not None and model is not None and self.exports:
            yield swap_folder(self.elsewhere / f"{name}_hf", model)
        if self.section.resumable:
            yield swap_folder(self.folder / name, write)

    def _evict(self, stays: Path) -> None:
        """Remove surplus checkpoints: those without a metric first, then the worst, then the oldest."""
        others = sorted((path for _, path in self.list() if path != stays), key=_worth)
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in [*others, stays]}
        while others and (len(others) >= self.section.keep or sum(sizes.values()) > self.section.max_gib * 2**30):
            victim = others.pop(0)
            del sizes[victim]
            _remove(victim)

    def check(self) -> None:
        """Raise UserError if the folder has checkpoints of another program, which this run would remove."""
        for step, path in self.list():
            if self.elsewhere is not None and not any((path / name).is_file() for name in (DRIVER, CHECKSUMS)):
                raise UserError(
                    f"checkpoint.path: {path} is a checkpoint of DeepSpeed, which is not read here; set another folder, and policy.path "
                    f"to the checkpoint's Hugging Face export ({self.elsewhere / f'global_step{step}_hf'}) if there is one"
                )

    def newest(self) -> tuple[int, Path] | None:
        """Return the checkpoint that `latest` names, or the last one. Raises UserError if any is another program's."""
        self.check()
        checkpoints = self.list()
        latest = self.folder / LATEST
        if self.elsewhere is not None and latest.is_file():
            name = latest.read_text(errors="replace").strip()
            checkpoints = [(step, path) for step, path in checkpoints if path.name == name] or checkpoints
        if not checkpoints:
            return None
        return checkpoints[-1]

    def chosen(self, *, previous: bool) -> tuple[int, Path] | None:
        """Return the newest checkpoint or, if `previous`, the newest undamaged one before it. Raises UserError if there is none before."""
        newest = self.newest()
        if newest is None or not previous:
            return newest
        for step, path in reversed(self.list()):
            if step < newest[0]:
                with suppress(DamagedCheckpoint):
                    read_checkpoint(path)
                    return step, path
        raise UserError(f"--resume=previous: there is no undamaged checkpoint before {newest[1]}; start without --resume")

    def set_aside_after(self, step: int) -> str:
        """Set the checkpoints aside that --resume=previous left out, and make that of `step` the newest. Returns a message for the user."""
        newest = self.newest()
        if newest is None or newest[0] <= step:
            return ""
        aside = [path for number, path in self.list() if step < number <= newest[0]]
        for path in aside:
            target = self.folder / f"{ASIDE}{path.name}"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier --resume=previous
            os.rename(path, target)
        if self.elsewhere is not None:
            replace_file(self.folder / LATEST, f"{self.prefix}{step}".encode())
        names = ", ".join(f"{ASIDE}{path.name}" for path in aside)
        return f"--resume=previous: going on after step {step}; what came after it is in {names} of {self.folder}, which may be removed"

    def driver(self, step: int) -> JsonObject:
        """Return the driver's state in the checkpoint of a step. Raises DamagedCheckpoint."""
        with self._naming_what_is_before(step):
            return driver_state(self.folder / f"{self.prefix}{step}")

    def load(self, *, previous: bool = False) -> tuple[int, StoredFiles, JsonObject]:
        """Load a checkpoint, see `chosen`: step, the learner's files, which are mapped, and the driver's state.

        Raises DamagedCheckpoint if a file is not as it was written.
        """
        found = self.chosen(previous=previous)
        if found is None:
            raise UserError(f"--resume: no checkpoint in {self.folder}; start without --resume")
        step, path = found
        with self._naming_what_is_before(step):
            files, driver, is_covered = read_checkpoint(path)
            if driver.get("step", step) != step:
                raise DamagedCheckpoint(path / DRIVER, f"is of step {driver['step']}")
        self.note = "" if is_covered else f"{path} has no {CHECKSUMS} (of an earlier version), so its {DRIVER} is taken unverified"
        learner = {name: content for name, content in files.items() if name not in (DRIVER, METRIC)}
        return step, StoredFiles(path, learner), driver

    @contextmanager
    def _naming_what_is_before(self, step: int) -> Iterator[None]:
        """Make DamagedCheckpoint offer what there is before a checkpoint."""
        try:
            yield
        except DamagedCheckpoint as error:
            if any(number < step for number, _ in self.list()):
                raise
            raise DamagedCheckpoint(error.path, error.what, "there is no checkpoint before it, so start without --resume") from None


class Best:
    """The best evaluation so far by the recipe's metric."""

    def __init__(self, name: str) -> None:
        self.name = name  # "none": off; "": the first pass1 metric
        self.value: float | None = None
        self.known = False  # whether an evaluation had the metric

    def read_metric(self, evaluation: dict[str, float]) -> tuple[str, float] | None:
        """Return name and value of the metric in an evaluation.

        None if only earlier evaluations had it, because no response to its prompts could be scored now. Raises UserError if none
        had it.
        """
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
        self.known, self.name = True, wanted  # the metric stays the same, because different sources cannot be compared
        return wanted, float(known[wanted])

    def improved(self, metric: tuple[str, float] | None) -> bool:
        """Return whether the metric is the best so far, and remember it if so."""
        if metric is None or (self.value is not None and metric[1] <= self.value):
            return False
        self.value = metric[1]
        return True


def _worth(path: Path) -> tuple[bool, float, int]:
    written_ns = path.stat().st_mtime_ns  # step numbers do not tell: an earlier run may have got further in the same folder
    try:
        return True, float(json.loads((path / METRIC).read_text())["metric_value"]), written_ns
    except (OSError, ValueError, KeyError, TypeError):
        return False, 0.0, written_ns


def _remove(path: Path) -> None:
    gone = path.with_name(f".{path.name}.gone")  # renamed first, so that no partial checkpoint is visible
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def swap_folder(path: Path, write: Callable[[Path], object]) -> Path:
    """Replace a folder in one step. `write` fills the new one. Raises DiskFull and leaves the old folder.

    A killed process leaves the old folder or the new one. Only where folders cannot be exchanged (NFS) there is neither for a moment,
    between two renames. The old one is then kept with the suffix `.old-<pid>` until the next call has written a new one.
    """
    # the name is unique, so that a process that sees it sees this file system
    temporary, old = (path.with_name(f".{path.name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}") for kind in ("tmp", "old"))
    for left_over in path.parent.glob(f".{path.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with writing(path):
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            if not _exchange(temporary, path):
                if path.exists():
                    os.rename(path, old)
                os.replace(temporary, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.rename(old, path)
            shutil.rmtree(temporary, ignore_errors=True)  # frees space that others need now
            raise
    for replaced in path.parent.glob(f".{path.name}.*-*"):
        shutil.rmtree(replaced, ignore_errors=True)
    return path


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders. Returns False if the second does not exist, or if the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux; Python has no function for it
    return renameat2 is not None and renameat2(AT_FDCWD, bytes(first), AT_FDCWD, bytes(second), RENAME_EXCHANGE) == 0
