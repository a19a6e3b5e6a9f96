"""Memory of this process: how much it is, and pages that go back to the kernel while their addresses stay."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhfless_ray.local.process_memory import large_page_environment, own_memory_mb, release_pages, release_unused_memory

MB = 2**20


def private_mb() -> float:
    return psutil.Process().memory_full_info().uss / MB


def test_large_pages_are_for_large_models_and_leave_a_users_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert large_page_environment(500_000_000) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert large_page_environment(11_000_000) == {}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert large_page_environment(500_000_000) == {}


def test_pages_go_and_come_back_as_zeros() -> None:
    held = np.frombuffer(mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    held[:] = 7
    before = private_mb()
    release_pages(held.ctypes.data, held.nbytes)
    assert before - private_mb() > 60
    assert not held.any()
    held[5 * MB] = 9
    assert held[5 * MB] == 9 and held.sum() == 9


def test_only_whole_pages_go() -> None:
    """What shares a page with the range is somebody else's."""
    page = mmap.PAGESIZE
    held = np.frombuffer(mmap.mmap(-1, 8 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    held[:] = 7
    release_pages(held.ctypes.data + 100, 3 * page)  # from within page 0 to within page 3
    assert (held[:page] == 7).all() and (held[3 * page :] == 7).all() and not held[page : 3 * page].any()
    release_pages(held.ctypes.data + 4 * page + 1, page)  # no whole page in it
    assert (held[4 * page :] == 7).all()


def test_what_is_not_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="could not be released"):
        release_pages(2**46, 8 * mmap.PAGESIZE)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux 4.14")
def test_own_memory_is_what_the_kernel_says() -> None:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss_kb = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert own_memory_mb() == pytest.approx(pss_kb / 1024, rel=0.02)


def resident_kb(address: int) -> int:
    """Of the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_pages_of_files_go_and_what_was_written_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 2**14)
    with (tmp_path / "file").open("r+b") as file:
        read = np.frombuffer(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), np.uint8)
        written = np.frombuffer(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE), np.uint8)
        shared = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        locked = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), np.uint8)
    assert not ctypes.CDLL(None).mlock(ctypes.c_void_p(locked.ctypes.data), ctypes.c_size_t(locked.nbytes))
    total = read.sum() + shared.sum()
    written[5] = 77
    release_unused_memory()
    assert resident_kb(locked.ctypes.data) == mmap.PAGESIZE // 1024
    assert resident_kb(read.ctypes.data) == 0 and resident_kb(shared.ctypes.data) == 4096
    assert read.sum() + shared.sum() == total and written[5] == 77 and written[6] == 6
