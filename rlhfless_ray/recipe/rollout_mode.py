"""The mode of a recipe's rollouts, as three values. Only the session (`session/`) knows about modes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Admission:
    """When new groups enter."""

    max_lag: int  # weight versions that a trained token may be behind
    oversample: float  # groups at work, as a multiple of those that a step trains


class Boundary(Enum):
    """What taking a batch does to the other responses."""

    DRAIN = "drain"  # there are none: a rollout ends with its last response
    CUT_CONTINUE = "continue"  # they go on in the next step
    CUT_RESTART = "restart"  # they begin again in the next step

    @property
    def cuts(self) -> bool:
        return self is not Boundary.DRAIN


@dataclass(frozen=True)
class WeightSwitch:
    """When engines take a version."""

    in_flight: bool  # while responses are unfinished; otherwise between two rollouts
    keep_kv: bool  # whether unfinished responses keep the KV that older versions computed


@dataclass(frozen=True)
class RolloutMode:
    admission: Admission
    boundary: Boundary
    switch: WeightSwitch

    @property
    def begins_beside_update(self) -> bool:
        """Whether the next step's responses begin while the learner works."""
        return self.switch.in_flight or (self.boundary is Boundary.DRAIN and self.admission.max_lag > 0)
