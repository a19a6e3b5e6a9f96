"""What a killed driver cannot do itself: end its private Ray, which takes a minute to notice, and remove its folder.

A process without imports of ours that outlives the driver, in a session of its own. It is told the sessions of Ray's processes and waits
for the end of its input, which comes with the driver's, however that is.
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

PATIENCE_S = 30.0


class Sweeper:
    def __init__(self, folder: Path) -> None:
        """`folder` is removed, and the sessions are ended, if this process ends without `close`."""
        command = [sys.executable, "-I", "-S", __file__, str(folder)]
        nowhere = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)

    def watch(self, session: int) -> None:
        """One more session of processes that end with this one."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % session)
        self.process.stdin.flush()

    def close(self) -> None:
        """There is nothing left to do for it."""
        self.process.kill()
        self.process.communicate()


def members(sessions: set[int]) -> list[int]:
    """Ids of the processes in these sessions that have not ended."""
    found = []
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # it ended meanwhile
            after_name = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
            state, _, _, session = after_name.split()[:4]
            if state != "Z" and int(session) in sessions:
                found.append(process)
    return found


def main() -> None:
    sessions = {int(line) for line in sys.stdin}
    end = time.monotonic() + PATIENCE_S
    while (left := members(sessions)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
