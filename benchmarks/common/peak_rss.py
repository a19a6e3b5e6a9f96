"""Peak resident memory that a piece of work adds to this process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any


def added_peak_bytes(work: Callable[[], Any]) -> int:
    """Highest resident size while `work` runs, minus the size before (Linux). What the allocator had kept for itself is given
    back first, otherwise the work would live in it unseen."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
