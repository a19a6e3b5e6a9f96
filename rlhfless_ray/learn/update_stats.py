"""Build the statistics of an update of several optimizer steps, or of none."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import numpy as np

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.trainer import OptimizerStep
from rlhfless_ray.types import CriticStats, UpdateStats

Stats = TypeVar("Stats", UpdateStats, CriticStats)


def without_steps(kind: type[Stats], samples: int) -> Stats:
    """Return the statistics of an update without optimizer steps: its samples fill none, or there are none to train on."""
    return kind() if samples else kind(skipped=1, skipped_last=1, reason="no sample of the step has a reward")


def step_fields(update: OptimizerStep) -> JsonObject:
    """Return the fields of the statistics that tell whether and how an optimizer step was made."""
    skipped = int(bool(update.skipped))
    return {
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        "skipped": skipped,
        "reason": update.skipped,
        "applied": 1 - skipped,
        "skipped_last": skipped,
    }


def merged(stats: list[Stats]) -> Stats:
    """Merge the statistics of several optimizer steps: unweighted means, except for maxima, counts and last values."""
    if len(stats) == 1:
        return stats[0]
    fields: JsonObject = {}
    for name in type(stats[0]).__dataclass_fields__:
        values: list[Any] = [getattr(s, name) for s in stats]
        if name == "reason":
            fields[name] = "; ".join(v for v in values if v)
        elif name in ("next_learning_rate", "last_grad_norm"):
            fields[name] = values[-1]
        elif name == "kl_by_lag":
            fields[name] = {lag: float(np.mean([v[lag] for v in values if lag in v])) for lag in sorted({*chain(*values)})}
        elif name == "mismatch_max":
            fields[name] = max(values)
        elif name in ("trained_tokens", "skipped", "applied"):
            fields[name] = sum(values)
        elif name == "skipped_last":
            fields[name] = next((i for i, s in enumerate(reversed(stats)) if s.applied), len(stats))
        else:
            fields[name] = float(np.mean(values))
    return type(stats[0])(**fields)
