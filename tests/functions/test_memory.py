"""Memory of this process: how much it is, and pages that go back to the kernel while their addresses stay."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhfless_ray.functions.memory import give_back, own_memory_mb

MB = 2**20


def private_mb() -> float:
    return psutil.Process().memory_full_info().uss / MB


def test_pages_go_and_come_back_as_zeros() -> None:
    held = np.frombuffer(mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    held[:] = 7
    before = private_mb()
    give_back(held.ctypes.data, held.nbytes)
    assert before - private_mb() > 60
    assert not held.any()
    held[5 * MB] = 9
    assert held[5 * MB] == 9 and held.sum() == 9


def test_only_whole_pages_go() -> None:
    """What shares a page with the range is somebody else's."""
    page = mmap.PAGESIZE
    held = np.frombuffer(mmap.mmap(-1, 8 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    held[:] = 7
    give_back(held.ctypes.data + 100, 3 * page)  # from within page 0 to within page 3
    assert (held[:page] == 7).all() and (held[3 * page :] == 7).all() and not held[page : 3 * page].any()
    give_back(held.ctypes.data + 4 * page + 1, page)  # no whole page in it
    assert (held[4 * page :] == 7).all()


def test_what_is_not_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="could not be given back"):
        give_back(2**46, 8 * mmap.PAGESIZE)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux 4.14")
def test_own_memory_is_what_the_kernel_says() -> None:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss_kb = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert own_memory_mb() == pytest.approx(pss_kb / 1024, rel=0.02)
