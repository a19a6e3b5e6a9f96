"""The state of one step, which `loop.py` passes from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from placement.forecast.forecaster import Scenarios
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step_prefixes import StepPrefixes
from rlhfless_ray.types import Prompt, Sample, UpdateStats


@dataclass
class Step:
    """One step of training: its plan, its results and its cost."""

    number: int
    prompts: list[Prompt] = field(default_factory=list)
    # None only until `loop.py` sets them, before anything reads them
    forecast: Scenarios = None  # type: ignore[assignment]  # joint draws of every response's length
    plan: RolloutPlan = None  # type: ignore[assignment]
    batch: RolloutBatch = None  # type: ignore[assignment]  # the groups that are generated
    work: np.ndarray | None = None  # (n, S) forecast tokens that its rollout generates; None: whole responses
    prefixes: StepPrefixes | None = None  # None: no prefix KV in this run
    answers: Sequence[Sample] = ()  # all responses to its prompts, scored
    samples: Sequence[Sample] = ()  # those that are learned from: `Scored` once they are scored, `Trained` once they have advantages
    stats: UpdateStats | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # what failed in planning
    metrics: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, float] = field(default_factory=dict)  # slot-seconds and money of this step
    phase_s: dict[str, float] = field(default_factory=dict)  # seconds of each phase, as the driver sees them
    wall_s: float = 0.0

    @property
    def expected_work(self) -> np.ndarray:
        """(n, S) forecast tokens that the rollout adds to each response."""
        return self.forecast.lengths if self.work is None else self.work
