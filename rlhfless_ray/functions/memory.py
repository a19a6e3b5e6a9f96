"""What a process keeps when it is parked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfless_ray.types import Span


def kept_memory(spans: list[Span]) -> dict[str, Any]:
    """{"memory_mb": of the process and of what it still has on its device, "spans": `spans`, the last naming the latter}.

    What the device's own driver holds for a process is not in it: only the process's end gives that back.
    """
    import psutil
    import torch

    on_device = torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_initialized() else 0.0
    if on_device >= 1 and spans:
        spans = [*spans[:-1], replace(spans[-1], what=f"{spans[-1].what}, {on_device:.0f} MB stay")]
    return {"memory_mb": psutil.Process().memory_info().rss / 2**20 + on_device, "spans": spans}
