"""Measure and release the memory of a parked process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import replace

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.types import Span

LARGE_PARAMETERS = 50_000_000  # from here on what an update takes from the system and gives back is worth some care


def large_page_environment(parameters: int) -> dict[str, str]:
    """Return the environment in which the C library asks for large pages, or {} for a small model.

    The tensors of an update are mapped and unmapped again and again. At 494 M parameters in pages of 4 KiB that was 4 million page
    faults and a third of the update's time. Has no effect where the system has no transparent large pages.
    """
    if parameters < LARGE_PARAMETERS or "GLIBC_TUNABLES" in os.environ:
        return {}
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def report_parked_memory(spans: list[Span]) -> JsonObject:
    """Return {"memory_mb": host plus device memory of this process in MB, "spans": `spans`}.

    The last span's label names the device memory that torch has reserved. The CUDA context is not included: only the end of the
    process releases it.
    """
    import torch

    on_device_mb = torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_initialized() else 0.0
    if on_device_mb >= 1 and spans:
        spans = [*spans[:-1], replace(spans[-1], what=f"{spans[-1].what}, {on_device_mb:.0f} MB stay")]
    return {"memory_mb": own_memory_mb() + on_device_mb, "spans": spans}


def reserved_outside_mb(segments: Iterable[JsonObject], pools: Container[tuple[int, int]]) -> float:
    """Return the device memory in MB that torch has reserved outside of `pools`. `segments`: from `torch.cuda.memory_snapshot`."""
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) not in pools) / 2**20


def own_memory_mb() -> float:
    """Return this process's proportional set size in MB.

    A page shared by n processes counts as 1/n, so the numbers of all processes add up.
    """
    import psutil

    return psutil.Process().memory_full_info().pss / 2**20


def release_pages(start: int, size: int) -> None:
    """Release the whole pages within `size` bytes from address `start`.

    The private memory stays mapped and reads as zeros until it is written again. Raises OSError if the kernel refuses.
    """
    page = mmap.PAGESIZE
    begin, end = -(-start // page) * page, (start + size) // page * page
    if end > begin and _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"{(end - begin) >> 20} MB could not be released: {os.strerror(number)}")


def release_free_heap() -> None:
    """Return freed heap memory to the system. The C library keeps it for later."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(ctypes.c_size_t(0))


def release_unused_memory() -> None:
    """Release free heap memory and unmodified pages of mapped files, mostly of libraries.

    The kernel keeps such pages while memory is plentiful, and maps them again when they are used. A mapping with private pages stays: what
    was relocated in it is not in the file.
    """
    import psutil

    release_free_heap()
    for mapping in psutil.Process().memory_maps(grouped=False):
        if mapping.path.startswith("/") and mapping.perms in ("r-xp", "r--p") and not mapping.anonymous:
            begin, end = (int(part, 16) for part in mapping.addr.split("-"))
            with suppress(OSError):  # it is locked
                release_pages(begin, end - begin)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
