"""What a process keeps when it is parked."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhfless_ray.types import Span


def kept_memory(spans: list[Span], on_device_mb: float | None = None) -> dict[str, Any]:
    """{"memory_mb": of the process and of what it still has on its device, "spans": `spans`, the last naming the latter}.

    `on_device_mb`: the latter, where torch does not know it; None: what torch has reserved. What the device's own driver holds for a
    process is not in it: only the process's end gives that back.
    """
    import torch

    if on_device_mb is None:
        on_device_mb = torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_initialized() else 0.0
    if on_device_mb >= 1 and spans:
        spans = [*spans[:-1], replace(spans[-1], what=f"{spans[-1].what}, {on_device_mb:.0f} MB stay")]
    return {"memory_mb": own_memory_mb() + on_device_mb, "spans": spans}


def outside_mb(segments: Iterable[dict[str, Any]], pools: Container[tuple[int, int]]) -> float:
    """MB of a device's memory that torch has reserved outside of these pools. `segments`: as `torch.cuda.memory_snapshot` tells."""
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) not in pools) / 2**20


def own_memory_mb() -> float:
    """This process's part of the node's memory: a page that n processes share, of a library or of the object store, counts as 1/n,
    so that the parts of all processes add up (proportional set size)."""
    import psutil

    return psutil.Process().memory_full_info().pss / 2**20


def give_back(start: int, size: int) -> None:
    """Let the pages go that lie whole in `size` bytes from address `start` on: private memory that stays mapped and reads as zeros
    from now on, until it is written to. Raises OSError where the kernel refuses."""
    page = mmap.PAGESIZE
    begin, end = -(-start // page) * page, (start + size) // page * page
    if end > begin and _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"{(end - begin) >> 20} MB could not be given back: {os.strerror(number)}")


def give_back_unused() -> None:
    """What a process that waits has no use for: free memory of the C heap, and the pages of files that it has mapped, most of them
    of libraries. Those are the kernel's from then on, which keeps them while memory is plenty; what is touched again is mapped again."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(ctypes.c_size_t(0))
    with Path("/proc/self/smaps").open() as lines:
        for start, size in list(unwritten(lines)):
            give_back(start, size)


def unwritten(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the mappings of files that can only be read and have no page of their own: all of it is in the file."""
    mapping: list[str] = []
    told: dict[str, list[str]] = {}
    for line in smaps:
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            mapping, told = [first, *rest], {}
            continue
        told[first] = line.split()[1:]
        if first != "VmFlags:" or len(mapping) < 6:
            continue
        of_file = mapping[5].startswith("/") and mapping[1] in ("r-xp", "r--p") and told["Anonymous:"][0] == "0"
        if of_file and "lo" not in told[first]:  # locked: it is to stay
            begin, end = (int(part, 16) for part in mapping[0].split("-"))
            yield begin, end - begin


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
