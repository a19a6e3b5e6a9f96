"""One record for an update of several optimizer steps, or of none."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import numpy as np

from rlhfless_ray.types import CriticStats, UpdateStats

Stats = TypeVar("Stats", UpdateStats, CriticStats)


def nothing(kind: type[Stats], reason: str) -> Stats:
    """Of an update that had nothing to learn from."""
    return _zeros(kind, skipped=1, skipped_last=1, reason=reason)


def untouched(kind: type[Stats]) -> Stats:
    """Of a step without an optimizer step: the policy was not to be trained, or its samples fill none."""
    return _zeros(kind)


def _zeros(kind: type[Stats], **others: Any) -> Stats:
    counts: dict[str, Any] = {"trained_tokens": 0, "skipped": 0, "applied": 0, "skipped_last": 0, "reason": "", "kl_by_lag": {}}
    return kind(**{name: others.get(name, counts.get(name, 0.0)) for name in kind.__dataclass_fields__})


def merged(stats: list[Stats]) -> Stats:
    """Unweighted means of all fields but maxima, counts and last values."""
    if len(stats) == 1:
        return stats[0]
    found: dict[str, Any] = {}
    for name in type(stats[0]).__dataclass_fields__:
        values: list[Any] = [getattr(s, name) for s in stats]
        if name == "reason":
            found[name] = "; ".join(v for v in values if v)
        elif name in ("next_learning_rate", "last_grad_norm"):
            found[name] = values[-1]
        elif name == "kl_by_lag":
            found[name] = {lag: float(np.mean([v[lag] for v in values if lag in v])) for lag in sorted({*chain(*values)})}
        elif name == "mismatch_max":
            found[name] = max(values)
        elif name in ("trained_tokens", "skipped", "applied"):
            found[name] = sum(values)
        elif name == "skipped_last":
            found[name] = next((i for i, s in enumerate(reversed(stats)) if s.applied), len(stats))
        else:
            found[name] = float(np.mean(values))
    return type(stats[0])(**found)
