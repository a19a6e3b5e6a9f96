"""Outlive a driver and its Ray: say what died, have the run's last words written, and end what a killed driver has left.

A separate process in a session of its own, without this project's imports and without Ray. `watcher.py` starts it. It reads a JSON object
from each line of standard input. The end of that input means that the driver is gone. Before it tells the driver to end, by a line on
standard output, the run's status is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process has none of the project's modules
    from rlhfless_ray.common.json_types import JsonObject

GCS = "GCS"  # begins the name of Ray's control service
LOOK_MS = 1000  # interval of looking for processes that stand still
TOGETHER_S = 0.5  # for a killed driver's end to be seen after that of its raylet, which one of its dying threads takes along
ENDED_BY_RAY = 1 << 8  # what `wait` tells of a process that ended with code 1
STOPPED = "T"  # the state of a process after SIGSTOP
STILL_S = 5.0  # how long a process is stopped before this is said
PROBE_S, CONNECT_S = 2.0, 2.0  # interval of connecting to a cluster's GCS, and the limit of one try
WORDS_S = 15.0  # limit for writing the last words and the report
END_S = 5.0  # for the driver to end by itself once the words are written
KILL_S = 30.0  # how long to try to end the processes of a private Ray


class DriverWatch:
    def __init__(self, driver: int) -> None:
        self.driver = driver
        self.driver_gone, self.driver_code = False, 0  # the code as `wait` tells it; 0 also if it is not known
        self.pending = b""
        self.sessions: set[int] = set()  # of a private Ray's processes
        self.temporary = ""  # its folder
        self.ray: dict[int, str] = {}  # process id → name
        self.ended_by: dict[int, int] = {}  # pidfd → process id, of those whose death ends the run
        self.address, self.lost_s = "", 0.0  # of a cluster's GCS, and how long it may be out of reach
        self.answered_s = self.probed_s = time.monotonic()
        self.folder: Path | None = None  # of the run at work
        self.words: list[str] = []  # the command that writes its last words
        self.stopped_s: dict[int, float] = {}  # process id → when it was first seen stopped
        self.told_still: dict[int, str] = {}

    def run(self) -> None:
        """Watch until the driver is gone."""
        poll = select.poll()
        poll.register(0, select.POLLIN | select.POLLHUP)
        registered: set[int] = set()
        while not self.driver_gone:
            for descriptor in self.ended_by.keys() ^ registered:
                (poll.register if descriptor in self.ended_by else poll.unregister)(descriptor)
            registered = set(self.ended_by)
            ready = [descriptor for descriptor, _ in poll.poll(LOOK_MS)]
            if 0 in ready:
                self.read()
            dead = [self.ray[self.ended_by[descriptor]] for descriptor in ready if descriptor in self.ended_by]
            dead = [name for name in dead if not name.startswith(GCS)] or dead  # a driver takes its private GCS along
            if dead and self.address:  # without their GCS, other processes of a cluster's head may be ended before it is missed
                dead = [name for process, name in self.ray.items() if name.startswith(GCS) and state_of(process) in ("", "Z")] + dead
            if dead and not self.driver_gone and state_of(self.driver) in ("", "Z"):  # other threads may keep its pipe open for a while
                self.note_driver_gone()
            if dead and not self.driver_gone and select.select([0], [], [], TOGETHER_S)[0]:
                self.read()
            if self.driver_gone or dead:
                self.end_run(self.what_died(" and ".join(dead)))
            elif self.is_out_of_reach():
                self.end_run(f"the cluster's GCS at {self.address} has not been reached for {self.lost_s:.0f} s")
            else:
                self.say_who_stands_still()
        self.end_leftover()

    def read(self) -> None:
        """Take over what the driver says."""
        if not (content := os.read(0, 65536)):
            self.note_driver_gone()
        *lines, self.pending = (self.pending + content).split(b"\n")
        for line in lines:
            self.take(json.loads(line))

    def note_driver_gone(self) -> None:
        self.driver_gone = True
        with contextlib.suppress(OSError):
            self.driver_code = int(stat_of(self.driver)[-1])

    def take(self, told: JsonObject) -> None:
        self.sessions |= set(told.get("sessions", ()))
        self.temporary = told.get("temporary", self.temporary)
        if "ray" in told:
            for descriptor in self.ended_by:
                os.close(descriptor)
            self.ray = {int(process): name for process, name in told["ray"].items()}
            self.address, self.lost_s, self.answered_s = told["address"], told["lost_s"], time.monotonic()
            self.ended_by = {}
            for process, name in self.ray.items():
                if not (self.address and name.startswith(GCS)):  # of a cluster it may come back
                    with contextlib.suppress(ProcessLookupError):
                        self.ended_by[os.pidfd_open(process)] = process
        if "folder" in told:
            self.folder, self.words = Path(told["folder"]) if told["folder"] else None, told["words"]

    def is_out_of_reach(self) -> bool:
        """Connect to the cluster's GCS now and then. Returns whether that has failed for too long."""
        if not self.address or time.monotonic() - self.probed_s < PROBE_S:
            return False
        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            self.answered_s = time.monotonic()
        late_s = time.monotonic() - self.probed_s
        self.probed_s = time.monotonic()
        if late_s > self.lost_s:  # the machine itself stood still
            self.answered_s = max(self.answered_s, self.probed_s - PROBE_S)
        return self.probed_s - self.answered_s > self.lost_s

    def say_who_stands_still(self) -> None:
        """Say which processes are stopped by a signal, and which go on again."""
        now = time.monotonic()
        watched = {self.driver: f"its driver, process {self.driver},", **{process: f"Ray's {name}" for process, name in self.ray.items()}}
        stopped = {process: name for process, name in watched.items() if state_of(process) == STOPPED}
        for process in members(self.sessions, only=STOPPED) - watched.keys():
            stopped[process] = f"its process {process} ({title_of(process)})"
        for process in self.stopped_s.keys() - stopped.keys():
            del self.stopped_s[process]
            if name := self.told_still.pop(process, ""):
                self.note(f"{name} does not stand still any more", reason="")
        for process, name in stopped.items():
            if now - self.stopped_s.setdefault(process, now) >= STILL_S and process not in self.told_still:
                self.told_still[process] = name
                text = f"{name} stands still, stopped by a signal: `kill -CONT {process}` lets it go on"
                self.note(text, reason=text)

    def what_died(self, of_ray: str) -> str:
        """Return a clause. A killed driver takes its private Ray along, and a driver whose Ray died is ended by Ray at once."""
        driver = f"its driver, process {self.driver},"
        if of_ray and not (self.driver_gone and self.driver_code != ENDED_BY_RAY):
            return f"Ray's {of_ray} died, without which no run goes on"
        if of_ray and self.driver_code != signal.SIGKILL:  # its parent was quicker to ask for the code
            return f"{driver} and Ray's {of_ray} died"
        still = [name for process, name in self.told_still.items() if process != self.driver]
        return f"{driver} was killed, " + (
            f"as by Ray while {' and '.join(still)} stood still" if still else "as by `kill -9` or for lack of memory"
        )

    def note(self, text: str, reason: str) -> None:
        """Tell of a run that is not ended, and write a reason into its status."""
        if self.folder is None or self.is_running():
            say(f"note on the run: {text}")
        if self.folder is not None and self.is_running():
            with contextlib.suppress(OSError):
                patch_status(self.folder, reason=reason)

    def is_running(self) -> bool:
        """Return whether the status says that the driver is at work: the folder may belong to another one by now."""
        assert self.folder is not None
        status = read_status(self.folder)
        return status.get("status") == "running" and status.get("pid") == self.driver

    def end_run(self, what: str) -> None:
        """Write the run's last words, and end the driver if it still lives."""
        self.tell_driver("died")
        if self.folder is not None and self.is_running():
            with contextlib.suppress(OSError):
                patch_status(self.folder, status="failed", reason=what)  # at once: Ray may end the driver before the words are complete
            if self.driver_gone:
                self.end_leftover()  # frees memory and the run's folder
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*self.words, what], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=WORDS_S)
            final = read_status(self.folder)
            if final.get("reason") == what:  # the words could not be written
                say(f"run failed: {what}")
        else:
            final = {}
            if not self.driver_gone:  # else another one has told why it ended
                say(f"run failed: {what}")
        self.end_driver()
        if final and self.folder is not None and self.is_running():  # the driver wrote it meanwhile
            patch_status(self.folder, **final)

    def tell_driver(self, word: str) -> None:
        with contextlib.suppress(OSError):
            os.write(1, f"{word}\n".encode())

    def end_driver(self) -> None:
        """Ask the driver to end, and kill it if it does not."""
        if self.driver_gone:
            return
        self.tell_driver("end")
        until = time.monotonic() + END_S
        while not self.driver_gone and time.monotonic() < until:
            if select.select([0], [], [], 0.1)[0]:
                self.read()
        if not self.driver_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.driver, signal.SIGKILL)
            self.driver_gone = True

    def end_leftover(self) -> None:
        """End the processes of a private Ray, which would take a minute to notice, and remove its folder."""
        end = time.monotonic() + KILL_S
        while (left := members(self.sessions)) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(text, file=sys.stderr, flush=True)


def read_status(folder: Path) -> JsonObject:
    try:
        return dict(json.loads((folder / "status.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def patch_status(folder: Path, **changes: object) -> None:
    """Change a run's status in place: that needs no space on the disk."""
    file = folder / "status.json"
    content = (json.dumps({**read_status(folder), **changes}, indent=1) + "\n").encode()
    with file.open("r+b") as opened:
        opened.write(content.ljust(os.fstat(opened.fileno()).st_size))


def stat_of(process: int) -> list[str]:
    """Return the fields of a process from its state on. Raises OSError if it has ended."""
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(") ")[2].split()


def processes() -> Iterator[tuple[int, str, int, int]]:
    """Yield id, state, parent and session of every process."""
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            state, parent, _, session = stat_of(process)[:4]
            yield process, state, int(parent), int(session)


def state_of(process: int) -> str:
    try:
        return stat_of(process)[0]
    except OSError:
        return ""


def title_of(process: int) -> str:
    """Return what a process calls itself, such as ray::LearnerActor.update."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return os.path.basename(words[0])


def members(sessions: set[int], only: str = "") -> set[int]:
    """Return the ids of the processes in these sessions that have not ended, or of those in one state."""
    return {process for process, state, _, session in processes() if session in sessions and (state == only if only else state != "Z")}


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job; it ends with its driver
        signal.signal(number, signal.SIG_IGN)
    DriverWatch(int(sys.argv[1])).run()
