"""What happens in a rollout. The driver tells its plugins about it with these values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.rollout.engine_calls import EngineCall
from rlhfless_ray.rollout.inflight_migrations import MigrationStats
from rlhfless_ray.types import Sample


@dataclass(frozen=True)
class TokensArrived:
    """An engine has reported tokens, which are recorded. `cut`: keys of requests that it has cut. `moved`: moves that this completes."""

    call: EngineCall
    deltas: TokenDeltas
    cut: np.ndarray
    moved: Sequence[MigrationStats]


@dataclass(frozen=True)
class SamplesMade:
    """Responses, or an agent's episodes, have ended and become samples."""

    samples: list[Sample]


@dataclass(frozen=True)
class RolloutProgress:
    """The driver has read all reports that have arrived. It happens at least every second."""

    done: int  # finished responses
    total: int


@dataclass(frozen=True)
class RoomNeeded:
    """A lost engine's successor needs a slot, which the run itself may hold. `within_s`: longest wait for work on such slots."""

    within_s: float


@dataclass(frozen=True)
class RolloutEnded:
    """No engine works on the rollout any more."""


Event = TokensArrived | SamplesMade | RolloutProgress | RoomNeeded | RolloutEnded
