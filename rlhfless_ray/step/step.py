"""The state of one step, which a loop passes from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from placement.forecast.forecaster import Scenarios
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step_prefixes import StepPrefixes
from rlhfless_ray.types import Prompt, Sample, Scored, UpdateStats

ORDER = "session.take, updates.score, updates.phase (advantages, start, session.admit, publish), records.close"


class StepProgress(IntEnum):
    """What a loop has done with a step, in this order."""

    PLANNED = 0
    TAKEN = 1
    SCORED = 2
    LEARNING = 3
    UPDATING = 4
    UPDATED = 5  # and not published yet
    PUBLISHED = 6
    CLOSED = 7


@dataclass
class Step:
    """One step of training: its plan, its results and its cost.

    Examples:
        >>> Step(3).progress.name  # `session.admit` makes steps
        'PLANNED'
    """

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
    metrics: JsonObject = field(default_factory=dict)
    ledger: dict[str, float] = field(default_factory=dict)  # slot-seconds and money of this step
    phase_s: dict[str, float] = field(default_factory=dict)  # seconds of each phase, as the driver sees them
    wall_s: float = 0.0
    progress: StepProgress = StepProgress.PLANNED

    def check(self, verb: str, *allowed: StepProgress) -> None:
        """Raise UserError if a loop calls `verb` at another time than after one of `allowed`."""
        if self.progress not in allowed:
            wanted = " or ".join(progress.name.lower() for progress in allowed)
            raise UserError(
                f"{verb}: step {self.number} must be {wanted} by then, and is {self.progress.name.lower()}; the order of a step is {ORDER}"
            )

    @property
    def scored(self) -> list[Scored]:
        """The samples that are learned from, with their rewards. Empty before `updates.score`."""
        return [sample for sample in self.samples if isinstance(sample, Scored)]

    @property
    def is_unrecorded(self) -> bool:
        """Whether the learner has made the step's update, and the step is not recorded."""
        return self.progress in (StepProgress.UPDATED, StepProgress.PUBLISHED)

    @property
    def computes_prefixes(self) -> bool:
        """Whether the KV of its prompts' shared prefixes is computed before its rollout."""
        return self.prefixes is not None and self.prefixes.choice.on

    @property
    def expected_work(self) -> np.ndarray:
        """(n, S) forecast tokens that the rollout adds to each response."""
        return self.forecast.lengths if self.work is None else self.work
