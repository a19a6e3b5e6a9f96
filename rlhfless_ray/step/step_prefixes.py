"""A step's prefix KV as a value that stages exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.types import Prefilled

if TYPE_CHECKING:
    from placement.scaling.prefix_benefit import PrefixChoice, PrefixDemand
    from rlhfless_ray.functions.instance import Instance


@dataclass(frozen=True)
class Prepared:
    """Pages of some prompts.

    `refs`: bundles. `of[i]`: positions in `refs` of prompt i's bundles. `done`: (producer's position, result) of each job.
    `failed`: reasons of failed jobs. `no_room`: pages beyond the memory cap.
    """

    refs: list[Any] = field(default_factory=list)
    of: list[list[int]] = field(default_factory=list)
    done: list[tuple[int, Prefilled]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    no_room: int = 0

    def needed_by(self, prompts: Sequence[int]) -> list[Any]:
        """Return the references of the bundles of these prompts (positions)."""
        return [self.refs[i] for i in sorted({i for prompt in prompts for i in self.of[prompt]})]


@dataclass
class StepPrefixes:
    """A step's prefix KV. `prepared` is empty if the choice was off."""

    choice: PrefixChoice
    demand: PrefixDemand | None = None
    engine_s: float = 0.0  # measured seconds that prefill instances and engines spent on pages
    prepared: Prepared = field(default_factory=Prepared)
    sent: list[tuple[Instance, Any]] = field(default_factory=list)  # engines that fetch pages, and references to their results
    metrics: JsonObject = field(default_factory=dict)
