"""Peak memory over a process tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from benchmarks.common.peak_memory import PeakMemory, processes, pss_bytes

HOLD = "import time; {}; time.sleep(600)"
WAIT = "sys.stdin.readline()"
CHILD = "block = bytearray(b'x') * 80_000_000"


def test_a_grandchild_counts_and_so_does_one_whose_parent_ended() -> None:
    inner = HOLD.format(CHILD)
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], stdin=subprocess.DEVNULL); {WAIT}"
    parent = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE)
    peak = PeakMemory(parent.pid)
    try:
        deadline = time.monotonic() + 120
        while peak.sample() < 80 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert peak.peak_mb > 80 and peak.processes == 2
        parent.communicate(b"\n", timeout=120)
        assert peak.sample() > 80, "a child that outlives its parent was lost"
    finally:
        for pid in peak.members():
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        parent.wait()


def test_sampling_in_the_background_sees_a_peak_that_is_over() -> None:
    short = subprocess.Popen([sys.executable, "-c", f"import sys; {CHILD}; {WAIT}"], stdin=subprocess.PIPE)
    with PeakMemory(short.pid) as peak:
        deadline = time.monotonic() + 120
        while peak.peak_mb < 80 and time.monotonic() < deadline:
            time.sleep(0.05)
        short.communicate(b"\n", timeout=120)
    assert peak.peak_mb > 80 and peak.samples > 1


def test_this_process_is_known_and_an_ended_one_is_nothing() -> None:
    assert processes()[os.getpid()][0] == os.getppid()
    assert pss_bytes(os.getpid()) > 1e6
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert pss_bytes(ended.pid) == 0
