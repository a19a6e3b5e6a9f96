"""CPU time of a process and all its descendants together, while they run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.common.peak_memory import TreeSampler

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreSeconds(TreeSampler):
    """Samples used CPU time while it is open. What a process used after its last sample is missed."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.times: list[float] = []  # time.time()
        self.used: list[float] = []  # core-seconds until then
        self._by_pid: dict[tuple[int, int], float] = {}  # a pid may come again, with another start

    def between(self, start_s: float, end_s: float) -> float:
        """Return the core-seconds between two times, interpolated."""
        at = np.interp([start_s, end_s], self.times, self.used)
        return float(at[1] - at[0])

    def sample(self) -> None:
        for pid in self.members():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            self._by_pid[pid, int(fields[19])] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        self.times.append(time.time())
        self.used.append(sum(self._by_pid.values()))
