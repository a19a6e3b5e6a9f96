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


def untouched(kind: type[Stats]) -> Stats:
    """Of a step without an optimizer step: the policy was not to be trained, or its samples fill none."""
    numbers: dict[str, Any] = dict.fromkeys(kind.__dataclass_fields__, 0.0)
    return kind(**{**numbers, "trained_tokens": 0, "skipped": 0, "applied": 0, "skipped_last": 0, "reason": ""})


def merged(stats: list[Stats]) -> Stats:
    """Unweighted means of all fields but maxima, counts and last values."""
    if len(stats) == 1:
        return stats[0]
    found: dict[str, Any] = {}
    for name in type(stats[0]).__dataclass_fields__:
        values = [getattr(s, name) for s in stats]
        if name == "reason":
            found[name] = "; ".join(v for v in values if v)
        elif name in ("next_learning_rate", "last_grad_norm"):
            found[name] = values[-1]
        elif name == "mismatch_max":
            found[name] = max(values)
        elif name in ("trained_tokens", "skipped", "applied"):
            found[name] = sum(values)
        elif name == "skipped_last":
            found[name] = next((i for i, s in enumerate(reversed(stats)) if s.applied), len(stats))
        else:
            found[name] = float(np.mean(values))
    return type(stats[0])(**found)
