"""What a process keeps when it is parked."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from typing import Any

from rlhfless_ray.types import Span


def kept_memory(spans: list[Span]) -> dict[str, Any]:
    """{"memory_mb": of the process and of what it still has on its device, "spans": `spans`, the last naming the latter}.

    What the device's own driver holds for a process is not in it: only the process's end gives that back.
    """
    import torch

    on_device = torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_initialized() else 0.0
    if on_device >= 1 and spans:
        spans = [*spans[:-1], replace(spans[-1], what=f"{spans[-1].what}, {on_device:.0f} MB stay")]
    return {"memory_mb": own_memory_mb() + on_device, "spans": spans}


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
    libc = ctypes.CDLL(None, use_errno=True)
    if end > begin and libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"{(end - begin) >> 20} MB could not be given back: {os.strerror(number)}")
