"""`run.mirror`: keep a copy of a run folder on s3://, gs:// or another remote file system, from which a run can go on elsewhere.

A thread copies what has changed every few seconds, in an order that makes any copy resumable: first metrics and the ledger, then the
files of checkpoints, then each checkpoint's checksums.json, which marks it as whole, and last removals. A run is never stopped by it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.folders import existing, numbered
from rlhfless_ray.common.remote_files import file_system, refusal
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run.checkpoint_files import CHECKSUMS
from rlhfless_ray.run.checkpoints import Checkpoints, swap_folder

KEY, PROBE, CHECKPOINTS = "run.mirror", ".rlhfless-probe", "checkpoints"
EVERY_S, LAST_S = 10.0, 600.0  # between two looks for changes; deadline of the last copy
Stamp = tuple[int, int]  # size and time of change, in ns


class Mirror:
    """The remote copy of one run folder."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, f"{url}/{folder.name}"
        self.system, self.path = file_system(self.url, KEY)
        self.sent: dict[str, Stamp | None] = {}  # None: was there before
        self.folders: set[str] = set()  # made there
        with suppress(FileNotFoundError):
            self.sent = dict.fromkeys(name[len(self.path) + 1 :] for name in self.system.find(self.path))

    def copy(self) -> None:
        """Copy what has changed since the last call. Raises what the file system raises; the next call continues."""
        found = {}
        for file in self.folder.rglob("*"):
            name = file.relative_to(self.folder).as_posix()
            if any(part.startswith(".") for part in name.split("/")):
                continue  # temporary files
            with suppress(FileNotFoundError):
                stamp = file.stat()
                if file.is_file():
                    found[name] = (stamp.st_size, stamp.st_mtime_ns)
        torn = set()  # folders of checkpoints that were removed meanwhile
        changed = {name for name, stamp in found.items() if self.sent.get(name) != stamp}
        marked = {f"{name.rpartition('/')[0]}/{CHECKSUMS}" for name in changed if _order(name)[0] == 1}
        for name in sorted(changed | (marked & found.keys()), key=_order):
            parent = name.rpartition("/")[0]
            if parent in torn:
                continue
            marker = f"{parent}/{CHECKSUMS}"
            if _order(name)[0] == 1 and marker in self.sent:
                self._remove(marker)
            try:
                if parent not in self.folders:  # an object store has none, and creates nothing
                    self.system.makedirs(f"{self.path}/{parent}".rstrip("/"), exist_ok=True)
                    self.folders.add(parent)
                self.system.put_file(str(self.folder / name), f"{self.path}/{name}")
            except FileNotFoundError:
                if (self.folder / name).exists():  # what is missing is remote
                    raise
                torn.add(parent)
                continue
            self.sent[name] = found[name]
        for name in sorted(self.sent.keys() - found.keys(), key=_order, reverse=True):  # markers first
            self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm_file(f"{self.path}/{name}")
        self.sent.pop(name, None)

    def fetch(self, target: Path) -> None:
        """Copy the run into a folder, without checkpoints that are not whole."""
        for name in self._whole_files():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.system.get_file(f"{self.path}/{name}", str(target / name))

    def _whole_files(self) -> list[str]:
        return [
            name for name in self.sent if not name.startswith(f"{CHECKPOINTS}/") or f"{name.rpartition('/')[0]}/{CHECKSUMS}" in self.sent
        ]

    @property
    def newest_step(self) -> int:
        """Step of the newest whole checkpoint, -1 without one."""
        steps = [name.split("/")[1].removeprefix("step_") for name in self._whole_files() if name.startswith(f"{CHECKPOINTS}/step_")]
        return max((int(step) for step in steps if step.isdigit()), default=-1)

    @property
    def started_at(self) -> str:
        """When the run started, "" if that is not known. The times of one machine sort as texts."""
        try:
            return str(json.loads(self.system.cat_file(f"{self.path}/status.json"))["started_at"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def _order(name: str) -> tuple[int, str]:
    kind = 0 if not name.startswith(f"{CHECKPOINTS}/") else 2 if name.endswith(f"/{CHECKSUMS}") else 1
    return kind, name


@contextmanager
def mirrored(folder: Path, url: str) -> Iterator[None]:
    """Copy a folder to `url` while the block runs, and once more at its end. Does nothing without a URL."""
    if not url:
        yield
        return
    mirror, over = Mirror(folder, url), threading.Event()

    def work() -> None:
        is_told = False
        while True:
            is_last = over.wait(EVERY_S)
            try:
                mirror.copy()
                is_told = False
            except Exception as error:  # of many types, by file system
                if not is_told or is_last:
                    then = "the run folder here is complete" if is_last else f"trying again every {EVERY_S:.0f} s"
                    print(f"{KEY} {mirror.url}: cannot be written to ({one_line(error, 200)}); {then}", file=sys.stderr)
                is_told = True
            if is_last:
                return

    thread = threading.Thread(target=work, name="run.mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LAST_S)
        if thread.is_alive():
            print(f"{KEY} {mirror.url}: the last copy took longer than {LAST_S:.0f} s and is incomplete", file=sys.stderr)


def prepare_mirror(recipe: Recipe, *, resume: bool) -> None:
    """Check that the mirror can be written and, for a resume, fetch the newest run of this name if this machine has it not as new.

    Raises UserError: no rights, or a new run would overwrite another one.
    """
    url, root, name = recipe.run.mirror, Path(recipe.run.root), recipe.run.name
    if not url:
        return
    system, path = file_system(url, KEY)
    try:
        system.makedirs(path, exist_ok=True)
        system.pipe_file(f"{path}/{PROBE}", b"")
        system.rm_file(f"{path}/{PROBE}")
        system.invalidate_cache()
        names = {found.rstrip("/").rpartition("/")[2] for found in system.ls(path, detail=False)}
    except Exception as error:  # of many types, by file system
        raise refusal(KEY, url, "cannot be written to", error) from None
    if resume:
        runs = [Mirror(root / found, url) for found in names if found == name or found.removeprefix(f"{name}-").isdigit()]
        runs = [run for run in runs if run.newest_step >= 0]
        here = [step for folder in existing(root, name) for step, _ in Checkpoints(recipe.checkpoint, folder).list()]
        if runs and (newest := max(runs, key=lambda run: run.started_at)).newest_step > max(here, default=-1):
            root.mkdir(parents=True, exist_ok=True)
            swap_folder(newest.folder, newest.fetch)
        return
    chosen = next(folder.name for folder in numbered(root, name) if not folder.exists())
    if chosen in names:
        raise UserError(f"{KEY} {url}: there is a run {chosen} already; continue it with --resume, or set another run.name")
