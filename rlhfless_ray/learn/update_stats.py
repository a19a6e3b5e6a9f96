"""One record for an update of several optimizer steps, or of none."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from rlhfless_ray.types import CriticStats, UpdateStats

Stats = TypeVar("Stats", UpdateStats, CriticStats)


def nothing(kind: type[Stats], reason: str) -> Stats:
    """Of an update that had nothing to learn from."""
    numbers: dict[str, Any] = dict.fromkeys(kind.__dataclass_fields__, 0.0)
    counts: dict[str, Any] = {"trained_tokens": 0, "skipped": 1, "applied": 0, "skipped_last": 1, "reason": reason}
    return kind(**{**numbers, **counts})


def untouched() -> UpdateStats:
    """Of a step in which the policy was not to be trained."""
    numbers: dict[str, Any] = dict.fromkeys(UpdateStats.__dataclass_fields__, 0.0)
    return UpdateStats(**{**numbers, "trained_tokens": 0, "skipped": 0, "applied": 0, "skipped_last": 0, "reason": ""})


def merged(stats: list[Stats]) -> Stats:
    """Means weighted by nothing, maxima and counts as such."""
    if len(stats) == 1:
        return stats[0]
    found: dict[str, Any] = {}
    for name in type(stats[0]).__dataclass_fields__:
        values = [getattr(s, name) for s in stats]
        if name == "reason":
            found[name] = "; ".join(v for v in values if v)
        elif name == "mismatch_max":
            found[name] = max(values)
        elif name in ("trained_tokens", "skipped", "applied"):
            found[name] = sum(values)
        elif name == "skipped_last":
            found[name] = next((i for i, s in enumerate(reversed(stats)) if s.applied), len(stats))
        else:
            found[name] = float(np.mean(values))
    return type(stats[0])(**found)
