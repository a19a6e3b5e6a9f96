"""End what users' code has started, also in sessions of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection

from rlhfless_ray.local.watcher_process import processes

END_S = 10.0  # how long to try to end what users' code has left
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose parent ends, also of those in a session of their own."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)


def end_below(root: int) -> None:
    """End all processes below one that adopts orphans, until none is left that could start another."""
    end_s = time.monotonic() + END_S
    while (left := _below(root)) and time.monotonic() < end_s:
        _end(left)
        time.sleep(0.01)


def reap_adopted(children: Collection[int]) -> None:
    """Forget adopted processes that have ended. `children`: those of this process's own, which others wait for."""
    for process, state, parent, _ in processes():
        if state == "Z" and parent == os.getpid() and process not in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _below(root: int) -> list[int]:
    """Return the ids of running processes that descend from a process."""
    children: dict[int, list[int]] = {}
    for process, state, parent, _ in processes():
        if state != "Z":
            children.setdefault(parent, []).append(process)
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def _end(found: list[int]) -> None:
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
