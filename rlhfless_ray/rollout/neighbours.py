"""Protocols for the parts of other stages that a rollout uses. The runtime passes them in, so that stages do not import each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.step.step_prefixes import StepPrefixes
from rlhfless_ray.types import AnySample, Sample, SampleId, Scored


class WeightPublisher(Protocol):
    """The learner, which publishes the weights and needs the slots next."""

    @property
    def learner_nodes(self) -> set[str]: ...

    @property
    def learner_slots(self) -> int: ...

    @property
    def complete_nodes(self) -> set[str]: ...


class PrefixPages(Protocol):
    """Send engines the KV pages of their prompts."""

    blocked: str | None

    def send(
        self, step: StepPrefixes, prompts: Sequence[Sequence[int]], engines: Sequence[Instance], shares: Sequence[np.ndarray], version: int
    ) -> None: ...

    def finish(self, step: StepPrefixes) -> dict[str, Any]: ...

    def block(self, why: str) -> None: ...


class EarlyScoring(Protocol):
    """Score samples on slots that engines have left."""

    def begin(self, samples: int) -> None: ...

    def fits(self, leases: list[Lease]) -> bool: ...

    @property
    def scored(self) -> Mapping[SampleId, Scored]: ...

    def score_ahead(self, samples: Sequence[Sample], leases: list[Lease]) -> list[Lease]: ...

    def refs(self) -> list[Any]: ...

    def done_ahead(self) -> list[Lease]: ...


class EarlyPasses(Protocol):
    """Compute log-probabilities and values of finished samples on slots that engines have left."""

    def add_samples(self, samples: list[Sample]) -> None: ...

    def start_ahead(self, leases: list[Lease], seconds: float) -> list[Lease]: ...

    def metrics(self) -> dict[str, Any]: ...


class EarlyLearning(Protocol):
    """Accumulate gradients of complete groups on slots that engines have left."""

    obstacle: str | None

    @property
    def passes(self) -> EarlyPasses: ...

    @property
    def wants_slot(self) -> bool: ...

    def begin(self, samples: int = 0) -> None: ...

    def fits(self, leases: list[Lease]) -> bool: ...

    def choose_samples(self, groups: Sequence[Sequence[AnySample]], seconds: float) -> list[AnySample]: ...

    def with_work(self, groups: Sequence[Sequence[Sample]], seconds: float) -> list[Any]: ...

    def lease_free_slots(self, worker_groups: list[Any]) -> list[Lease]: ...

    def accumulate(self, samples: list[Scored], leases: list[Lease]) -> list[Lease]: ...

    def pending(self) -> list[Any]: ...

    def done_ahead(self, wait: bool = False) -> list[Lease]: ...

    def pass_beside(self, seconds: float) -> None: ...
