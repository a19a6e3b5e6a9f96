"""Peak memory of a process and all its descendants together, as proportional set size.

PSS counts a page shared by n processes as 1/n in each, so the sum over processes counts it once: Ray's workers share their
libraries and the object store, and a sum of resident sizes would count those many times over.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

SHARE = 0.02  # of one core that sampling may take: reading smaps_rollup walks page tables and disturbs what is measured
LEAST_S = 0.2


class TreeSampler:
    """Context manager that samples a process and all its descendants in a thread while it is open."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._seen: dict[int, int] = {}  # pid → start time: a child whose parent ended still belongs to the tree
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            start = time.thread_time()
            self.sample()
            cost_s = time.thread_time() - start
            if self._ended.wait(max(LEAST_S, cost_s / SHARE)):
                return

    def sample(self) -> object:
        """Look at all members once."""
        raise NotImplementedError

    def members(self) -> list[int]:
        """The process, its descendants, and former descendants that live on."""
        alive = processes()
        members = {pid for pid, born in self._seen.items() if alive.get(pid, (0, -1))[1] == born} | {self.pid}
        grew = True
        while grew:
            new = {pid for pid, (parent, _) in alive.items() if parent in members} - members
            members |= new
            grew = bool(new)
        self._seen = {pid: alive[pid][1] for pid in members if pid in alive}
        return list(self._seen)


class PeakMemory(TreeSampler):
    """Samples memory while it is open; `peak_mb` (10⁶ bytes), `processes` and `samples` afterwards."""

    peak_mb = 0.0
    processes = samples = 0

    def sample(self) -> float:
        """Return the megabytes now."""
        sizes = [pss_bytes(pid) for pid in self.members()]
        now_mb = sum(sizes) / 1e6
        self.samples += 1
        self.processes = max(self.processes, len(sizes))
        self.peak_mb = max(self.peak_mb, now_mb)
        return now_mb


def processes() -> dict[int, tuple[int, int]]:
    """{pid: (parent's pid, start time in clock ticks since boot)} of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the name, in parentheses, may hold spaces: fields are counted from behind it
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), int(fields[19]))
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024
