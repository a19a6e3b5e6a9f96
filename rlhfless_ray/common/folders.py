"""Folders `<name>`, `<name>-2`, … that never overwrite each other, and a lock against other processes that write one."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_FOLDERS = 9999  # of one name


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/rlhfless-ray` or `~/.cache/rlhfless-ray`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhfless-ray"


def numbered(root: Path, name: str) -> Iterator[Path]:
    """Yield `<root>/<name>`, `<name>-2`, `-3`, …; a new folder is the first that does not exist."""
    return (root / (name + (f"-{number}" if number > 1 else "")) for number in range(1, MAX_FOLDERS + 1))


def existing(root: Path, name: str) -> list[Path]:
    """Return those that exist."""
    return [path for path in root.glob(f"{name}*") if path.name == name or path.name.removeprefix(f"{name}-").isdigit()]


def make_numbered(root: Path, name: str) -> Path:
    """Create the first that does not exist. Raises OSError."""
    for path in numbered(root, name):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise OSError(errno.EEXIST, f"too many are called {name}")


@contextmanager
def locked(folder: Path, refuse: Callable[[], None], is_taken: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Lock a folder inside the block, at most until the process ends.

    Args:
        folder: An existing folder.
        refuse: Raises the error if another process holds the lock.
        is_taken: Whether to call `refuse` where the file system has no locks for folders.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse()
        except OSError:
            if is_taken():
                refuse()
        yield
    finally:
        os.close(handle)
