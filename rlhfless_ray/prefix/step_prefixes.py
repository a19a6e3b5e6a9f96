"""A step's prefix KV as a value that stages exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from placement.scaling.prefix_benefit import PrefixChoice, PrefixDemand
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.prefix.page_service import Prepared


@dataclass
class StepPrefixes:
    """A step's prefix KV. `prepared` is empty if the choice was off."""

    choice: PrefixChoice
    demand: PrefixDemand | None = None
    engine_s: float = 0.0  # measured seconds that prefill instances and engines spent on pages
    prepared: Prepared = field(default_factory=Prepared)
    sent: list[tuple[Instance, Any]] = field(default_factory=list)  # engines that fetch pages, and references to their results
    metrics: dict[str, Any] = field(default_factory=dict)
