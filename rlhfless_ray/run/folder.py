"""The run folder: a run's files, readable at any time, also after a crash."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import psutil
import yaml

from rlhfless_ray.common.disk_space import DiskFull, Reserve, replace_file, writing
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.folders import existing, locked, make_numbered, numbered
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.changes import Changes
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.yaml_text import read_yaml, write_yaml
from rlhfless_ray.run.checkpoints import Checkpoints, swap_folder
from rlhfless_ray.run.installed_versions import installed_versions
from rlhfless_ray.run.mirror import mirrored, prepare_mirror
from rlhfless_ray.types import UNFINISHED, Sample

STATUS_BYTES, SHORT_REASON = 4096, 1000
NO_CHANGES = Changes()
GROWN = ("metrics.jsonl", "ledger.csv", "samples", "checkpoints")  # what a resumed run appends to
UNPACKED = "working_dir_files"  # where Ray unpacks the working folder of a job


def folders_of(recipe: Recipe | SupervisedRecipe, root: str = "") -> list[Path]:
    """Return the existing folders `<name>`, `<name>-2`, … of the runs of a recipe. They are in `root`, by default `run.root`."""
    return existing(Path(root or recipe.run.root), recipe.run.name)


def status_written_s(folder: Path) -> float:
    """Return when a run folder's status was written last, 0 if it has none."""
    file = folder / "status.json"
    return file.stat().st_mtime if file.exists() else 0.0


class RunFolder:
    """`runs/<name>/`: recipe.yaml, status.json, metrics.jsonl, ledger.csv, timeline.json, samples/, checkpoints/, model/,
    report.html. A run with a KL term also has reference/; a resumed one keeps its earlier recipes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status: JsonObject = {}
        self.is_left = False  # whether the status is another's to write
        self.reserve = Reserve(path / ".reserve")

    @classmethod
    def create(cls, recipe: Recipe | SupervisedRecipe) -> RunFolder:
        """Create `<root>/<name>`, or `<name>-2`, `-3`, … if it exists: runs never overwrite each other. Raises DiskFull."""
        try:
            folder = cls(make_numbered(Path(recipe.run.root), recipe.run.name))
        except OSError as error:
            raise UserError(f"run.root {recipe.run.root}: cannot make a run folder there: {error.strerror}") from None
        try:
            folder.reserve.take()
            replace_file(folder.path / "recipe.yaml", recipe.to_yaml().encode())
        except DiskFull:
            shutil.rmtree(folder.path)  # without a status it would look like the folder of a killed run
            raise
        return folder

    @staticmethod
    def candidates(recipe: Recipe | SupervisedRecipe) -> Iterator[Path]:
        """Yield `<root>/<name>`, `<name>-2`, `-3`, …; a new run takes the first that does not exist."""
        return numbered(Path(recipe.run.root), recipe.run.name)

    @staticmethod
    def check_root(recipe: Recipe | SupervisedRecipe, *, resumes: bool = False) -> None:
        """Check before the start that a run folder can be created, and leave nothing. Raises UserError.

        With `run.mirror` also check that, and fetch from there what a run that `resumes` goes on from.
        """
        root = Path(recipe.run.root).absolute()
        try:
            there = next(path for path in (root, *root.parents) if path.exists() or path.is_symlink())
            with tempfile.TemporaryDirectory(dir=there) as folder:
                try_to_write(Path(folder), root)
        except DiskFull as error:
            error.resumable = False
            raise
        except OSError as error:
            raise UserError(f"run.root {recipe.run.root}: cannot make a run folder there: {error.strerror}") from None
        if isinstance(recipe, Recipe):
            prepare_mirror(recipe, resume=resumes)

    def check_resumable(self) -> None:
        """Check before the start that a run can go on in this folder. Raises UserError."""
        grown = [self.path / name for name in GROWN if (self.path / name).exists()]
        try:
            try_to_write(self.path, self.path)
            for path in grown:
                if not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        except OSError as error:
            where = error.filename if error.filename in map(str, grown) else self.path
            raise UserError(
                f"--resume: {where} cannot be written to: {error.strerror}; make it writable, or copy the run to another run.root"
            ) from None

    def deletion_note(self, recipe: Recipe | SupervisedRecipe) -> str:
        """Return a message if Ray will delete results, because they are in the package that Ray unpacked for the job, or else ""."""
        places = {"run.root": str(self.path), "checkpoint.path": recipe.checkpoint.path, "save.path": recipe.save.path}
        lost = {key: place for key, place in places.items() if place and UNPACKED in Path(place).resolve().parts}
        if not lost:
            return ""
        return (
            f"{', '.join(lost)}: {', '.join(lost.values())} in the working folder that Ray unpacked for this job will be deleted after the "
            "job; name a folder that stays"
        )

    @classmethod
    def latest(cls, recipe: Recipe, *, previous: bool = False) -> RunFolder | None:
        """Return the most recent of `<name>`, `<name>-2`, … with a checkpoint.

        With checkpoints elsewhere, this is the folder of the run that wrote the chosen one. It may no longer exist.
        """
        if recipe.checkpoint.path:
            checkpoints = Checkpoints(recipe.checkpoint, Path(recipe.run.root))
            chosen = checkpoints.chosen(previous=previous)
            return None if chosen is None else cls(Path(str(checkpoints.driver(chosen[0]).get("run_folder", ""))))
        with_any = [path for path in folders_of(recipe) if Checkpoints(recipe.checkpoint, path).newest()]
        return cls(max(with_any, key=status_written_s)) if with_any else None

    @classmethod
    def resumed(
        cls, recipe: Recipe, check: Callable[[JsonObject, RunFolder], None] = lambda state, folder: None, *, previous: bool = False
    ) -> RunFolder:
        """Return the latest folder, or a new one if only its checkpoints are left.

        `check`: raises UserError for a driver's state that cannot be continued, before a folder is made. `previous`: see `Checkpoints`.
        Raises UserError if there is none, or if this recipe cannot continue it.
        """
        folder = cls.latest(recipe, previous=previous)
        checkpoints = Checkpoints(recipe.checkpoint, folder.path if folder else Path())
        chosen = checkpoints.chosen(previous=previous) if folder else None
        if folder is None or chosen is None:
            where = recipe.checkpoint.path or Path(recipe.run.root) / recipe.run.name
            raise UserError(f"--resume: no run with a checkpoint in {where}; start it without --resume")
        done, state = chosen[0], checkpoints.driver(chosen[0])
        if recipe.run.steps < done:
            raise UserError(
                f"run.steps: {folder.path} has done {done} steps already, more than {recipe.run.steps}; raise it, or start without --resume"
            )
        groups = state.get("in_flight", ()) if recipe.rollout.partial == "off" else ()
        if in_flight := sum(not _is_complete(group) for group in groups):
            raise UserError(
                f"rollout.partial: the checkpoint of step {done} has {in_flight} groups in flight, which would be lost; set it to continue "
                "or restart, or start without --resume"
            )
        if recipe.checkpoint.path and not (folder.path / "status.json").is_file():
            check(state, folder)  # a folder without a status would look like that of a killed run
            return cls.create(recipe)
        folder.check_same_policy(recipe)
        if recipe.algorithm.kl.coefficient > 0 and recipe.keeps_start and not (folder.path / "reference").is_dir():
            raise UserError(
                f"algorithm.kl.coefficient: {folder.path} began with 0 and kept no reference policy, so it must stay 0; start "
                "without --resume to have one"
            )
        return folder

    def check_same_policy(self, recipe: Recipe | SupervisedRecipe) -> None:
        """Raise UserError if the recipe's policy differs from the checkpoint's."""
        before = self.recipe_before() or {}  # without one the learner reports what does not fit
        data = "prompts" if isinstance(recipe, Recipe) else "data"
        shape = [] if recipe.policy.path else [("policy", "hidden_size"), ("policy", "layers"), (data, "task")]
        adapters = [("lora", "alpha"), ("lora", "target_modules")] if recipe.lora.rank else []  # alpha scales what was trained
        for section, key in [("lora", "rank"), *adapters, *shape]:
            was, is_now = (before.get(section) or {}).get(key), getattr(getattr(recipe, section), key)
            if was is not None and was != is_now:
                raise UserError(
                    f"{section}.{key}: {self.path} was trained with {was}, and its checkpoint does not fit {is_now}; set it back, or "
                    "start without --resume"
                )

    def recipe_before(self) -> JsonObject | None:
        """Return the tree of the folder's recipe, None if it cannot be read."""
        try:
            tree = read_yaml((self.path / "recipe.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            return None
        return tree if isinstance(tree, dict) else None

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other runs inside a block. Raises UserError if another process holds the lock."""
        return locked(self.path, self._refuse, self._is_at_work)

    @contextmanager
    def opened(self, mirror: str) -> Iterator[None]:
        """Lock the folder inside a block, and copy it to `mirror` if that is set. Raises UserError if another process holds the lock."""
        with self.locked(), mirrored(self.path, mirror):
            yield

    def _is_at_work(self) -> bool:
        """Whether the process that the status names is there."""
        status = self.read_status()
        is_here = status.get("status") == "running" and status.get("host") == platform.node()
        return is_here and psutil.pid_exists(int(status["pid"]))

    @property
    def is_locked(self) -> bool:
        """Whether another process writes the folder."""
        try:
            with self.locked():
                return False
        except UserError:
            return True

    def _refuse(self) -> NoReturn:
        status = self.read_status()
        raise UserError(
            f"--resume: {self.path} is being written by process {status.get('pid')} on {status.get('host')}; stop that run or "
            "let it end first"
        )

    # ---- status -----------------------------------------------------------------------------------------------

    def begin(
        self,
        recipe: Recipe | SupervisedRecipe,
        machine: str,
        steps_done: int,
        changes: Changes = NO_CHANGES,
        earlier: JsonObject | None = None,
    ) -> None:
        """Mark the run as running. A resume keeps `started_at`, and renames the old recipe if it changed.

        `changes`: those since the checkpoint. `earlier`: the checkpoint's recipe, which a new folder does not have.
        """
        before = self.read_status()
        changed = [{"after_step": steps_done, "changes": [str(change) for change in changes.found]}] if changes else []
        resumed = [*before.get("resumed_at", []), *([_now()] if before else [])]
        self.status = {
            "status": "running",
            "reason": "",
            "started_at": before.get("started_at", _now()),
            "resumed_at": resumed,
            "recipe_changes": [*before.get("recipe_changes", []), *changed],
            "ended_at": None,
            "steps_done": steps_done,
            "steps_total": recipe.run.steps,
            "machine": machine,
            "host": platform.node(),
            "pid": os.getpid(),
            "versions": installed_versions(),
        }
        self.reserve.take()
        self.write_status()
        path, text = self.path / "recipe.yaml", recipe.to_yaml().encode()
        is_new = not path.exists() or path.read_bytes() == text
        kept = self.path / f"recipe_until_step_{steps_done}.yaml"
        if not kept.exists():  # otherwise no step was completed since
            if not is_new:
                os.replace(path, kept)
            elif changes and earlier:
                replace_file(kept, write_yaml(earlier).encode())
        replace_file(path, text)

    def read_status(self) -> JsonObject:
        try:
            status = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    @property
    def is_done(self) -> bool:
        """Whether the run has come to its end."""
        return self.read_status().get("status") == "done"

    def leave_status(self) -> None:
        """Leave the status to the watcher, which writes the run's last words."""
        self.is_left = True

    def write_status(self, **changes: object) -> None:
        self.status.update(changes)
        if self.is_left:
            return
        replace_file(self.path / "status.json", self._status_text())

    def _status_text(self) -> bytes:
        """Return the status as JSON of at least STATUS_BYTES, so that a later status fits into the disk blocks of an earlier one."""
        return (json.dumps(self.status, indent=1) + "\n").encode().ljust(STATUS_BYTES - 1) + b"\n"

    def end(self, status: str, reason: str = "") -> None:
        """Write how the run ended. On a full disk this uses the reserve, or else overwrites the old status in place."""
        self.reserve.release()
        try:
            self.write_status(status=status, reason=reason, ended_at=_now())
        except DiskFull:
            self.status["reason"] = reason[:SHORT_REASON]  # a longer one would not fit into the file's blocks
            with writing(self.path / "status.json"), (self.path / "status.json").open("r+b") as file:
                file.write(self._status_text().ljust(os.fstat(file.fileno()).st_size))

    # ---- samples and model ------------------------------------------------------------------------------------

    def write_samples(self, step: int, samples: Iterable[Sample], answer_column: str, name: str = "step") -> None:
        """Write `samples/<name>_<step>.jsonl`, one line per sample."""
        lines = []
        for s in samples:
            row = {
                "step": step,
                "prompt_index": s.prompt.index,
                "sample": s.id.number,
                "prompt": s.prompt.text,
                "response": s.text,
                **({"turns": s.turns} if s.turns else {}),
                "tokens": s.written_tokens,
                "finish": s.completion.finish_reason,
                "version": s.completion.version,
                **{name: getattr(s, name, None) for name in ("reward", "error", "advantage")},
                "answer": s.prompt.row.get(answer_column),
            }
            lines.append(json.dumps(row, ensure_ascii=False, default=str))
        self._write_below_samples(f"{name}_{step}.jsonl", "\n".join(lines) + "\n")

    def write_order(self, rollout: str, order: JsonObject) -> None:
        """Write `samples/order_<rollout>.json`: the order of completion in a partial rollout, named by its step."""
        self._write_below_samples(f"order_{rollout}.json", json.dumps(order))

    def _write_below_samples(self, name: str, text: str) -> None:
        folder = self.path / "samples"
        with writing(folder):
            folder.mkdir(exist_ok=True)
        replace_file(folder / name, text.encode())

    def write_model(self, write: Callable[[Path], object]) -> Path:
        """Write the final model by one rename, so that it is never partial. `write` fills the folder."""
        return swap_folder(self.path / "model", write)


def check_writable(folder: Path, setting: str) -> None:
    """Create the folder and write to it, so that a run does not fail at its end. Raises UserError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_to_write(folder, folder)
    except OSError as error:
        raise UserError(f"{setting} {folder}: cannot be written to: {error.strerror}") from None


def try_to_write(folder: Path, named: Path) -> None:
    """Write as much to a folder as a run needs at its start, and leave nothing.

    Raises DiskFull, which names `named`, or OSError if that is not possible.
    """
    with writing(named), tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(Reserve.SIZE))


def check_file(file: Path, setting: str) -> None:
    """Raise UserError if a file cannot be written. Creates its folder."""
    check_writable(file.absolute().parent, setting)
    if file.is_dir():
        raise UserError(f"{setting} {file}: it is a folder; name a file")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _is_complete(group: JsonObject) -> bool:
    """Return whether no response of a group in a driver's state is missing."""
    samples = group.get("samples") or []
    return len(samples) > 0 and all(sample["completion"]["finish_reason"] != UNFINISHED for sample in samples)
