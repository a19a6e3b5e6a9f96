"""What a step's prompts get of prefix KV, as a value between the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from placement.scaling.prefix_benefit import PrefixChoice, PrefixDemand
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.prefix.page_service import Prepared


@dataclass
class StepPrefixes:
    """What a step's prompts get. of[prompt] as in `Prepared`; empty where the choice was off."""

    choice: PrefixChoice
    demand: PrefixDemand | None = None
    engine_s: float = 0.0  # of prefill instances and engines, for pages, as far as was measured
    prepared: Prepared = field(default_factory=Prepared)
    sent: list[tuple[Instance, Any]] = field(default_factory=list)  # engines that fetch pages, and references to their results
    metrics: dict[str, Any] = field(default_factory=dict)
