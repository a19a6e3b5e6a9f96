"""End what processes leave behind: a killed driver's private Ray, and what users' code has started.

Ray would take a minute to notice that its driver is gone. A separate process in a session of its own, without this project's imports,
outlives the driver. It reads the session ids of Ray's processes from standard input. The end of that input means that the driver is gone.
Then it also removes the temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

KILL_S = 30.0  # how long to try to end the processes
END_S = 10.0  # how long to try to end what users' code has left
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl


class OrphanReaper:
    def __init__(self, folder: Path) -> None:
        """Remove `folder` and end the watched sessions if this process ends without `close`."""
        command = [sys.executable, "-I", "-S", __file__, str(folder)]
        devnull = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=devnull, stderr=devnull, start_new_session=True)

    def watch(self, session: int) -> None:
        """Add a session whose processes are to end with this one."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % session)
        self.process.stdin.flush()

    def close(self) -> None:
        """Stop the reaper: everything has been cleaned up."""
        self.process.kill()
        self.process.communicate()


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
    for process, state, parent, _ in _processes():
        if state == "Z" and parent == os.getpid() and process not in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def members(sessions: set[int]) -> list[int]:
    """Return the ids of running processes in these sessions."""
    return [process for process, state, _, session in _processes() if state != "Z" and session in sessions]


def _below(root: int) -> list[int]:
    """Return the ids of running processes that descend from a process."""
    children: dict[int, list[int]] = {}
    for process, state, parent, _ in _processes():
        if state != "Z":
            children.setdefault(parent, []).append(process)
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """Yield id, state, parent and session of every process."""
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            after_name = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(") ")[2]
            state, parent, _, session = after_name.split()[:4]
            yield process, state, int(parent), int(session)


def _end(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def main() -> None:
    sessions = {int(line) for line in sys.stdin}
    end = time.monotonic() + KILL_S
    while (left := members(sessions)) and time.monotonic() < end:
        _end(left)
        time.sleep(0.1)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
