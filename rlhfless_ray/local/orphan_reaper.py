"""End a killed driver's private Ray, which would take a minute to notice, and remove its temporary folder.

A separate process in a session of its own, without this project's imports, outlives the driver. It reads the session ids of
Ray's processes from standard input. The end of that input means that the driver is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

KILL_S = 30.0  # how long to try to end the processes


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


def members(sessions: set[int]) -> list[int]:
    """Return the ids of running processes in these sessions."""
    found = []
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            after_name = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
            state, _, _, session = after_name.split()[:4]
            if state != "Z" and int(session) in sessions:
                found.append(process)
    return found


def main() -> None:
    sessions = {int(line) for line in sys.stdin}
    end = time.monotonic() + KILL_S
    while (left := members(sessions)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
