"""Write files so that a full disk ends a run with one clear message and never leaves partial files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import RunError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(RunError):
    """No space is left to write `path`. Exit code 1."""

    resumable = True  # whether there may be a checkpoint to continue from
    continue_with = "--resume"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        then = f"continue the run with {self.continue_with}" if self.resumable else "start the run again"
        return f"{self.path} cannot be written: the disk is full (or its quota used up); make space there, then {then}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskFull, naming `path`, if the disk has no space for it. Other errors are unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(path) from error
        raise


def replace_file(path: Path, content: Buffer) -> None:
    """Replace a file atomically. Raises DiskFull and keeps the old content."""
    replace_by_parts(path, [content])


def replace_by_parts(path: Path, parts: Iterable[Buffer]) -> None:
    """Replace a file atomically by the parts, one after another. Raises DiskFull and keeps the old content."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # free its space for other files
            raise


def append(path: Path, content: bytes) -> None:
    """Append all lines to a file, or nothing. Raises DiskFull."""
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, size)  # otherwise the next line would follow half of this one
                raise
        finally:
            os.close(descriptor)


class Reserve:
    """Disk space reserved for a run's final status on a full disk: a file that is removed before that is written."""

    SIZE = 256 * 2**10  # enough for the status and some steps' rows of metrics and ledger

    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self) -> None:
        """Reserve the space. Raises DiskFull if there is not enough. Space reserved already stays as it is."""
        if self.path.exists():
            return
        replace_file(self.path, os.urandom(self.SIZE))  # zeros take no space on compressing file systems

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
