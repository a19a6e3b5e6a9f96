"""The interface that `loop.py` calls: the operations of a step, in order. `Runtime` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from placement.forecast.forecaster import Scenarios
from rlhfless_ray.autoscaler.rollout_plan import RolloutPlan
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.pending import Pending
from rlhfless_ray.prefix.step_prefixes import StepPrefixes
from rlhfless_ray.types import Prompt, Sample, Step, UpdateStats, WeightVersion


@dataclass(frozen=True)
class StepEnd:
    """What to do at the end of a step."""

    metric: tuple[str, float] | None  # (name, value) of its evaluation, by which checkpoints are compared
    best: bool  # whether the metric is the best so far
    save: bool  # whether a checkpoint is due
    others_wait: bool  # whether another run on the cluster waits for slots
    starts_next: bool  # whether engines of the next step may take the free leases now


class Pipeline(Protocol):
    weights: WeightVersion | None
    owes_evaluation: bool  # whether one is due before the next step: the first, or one that a stop interrupted

    @property
    def steps_done(self) -> int: ...

    @property
    def last_step(self) -> int:
        """The number of the last step. Filtered groups can lower it by using up an episode's prompts early."""

    def next_prompts(self) -> list[Prompt]: ...

    def forecast(self, step: Step) -> Scenarios: ...

    def plan(self, step: Step) -> RolloutPlan: ...

    def weigh_prefixes(self, step: Step) -> StepPrefixes | None:
        """Decide whether sharing the KV of prompt prefixes pays for the plan. None: no prefix KV in this run."""

    def begin_step(self, step: Step) -> None: ...

    def prefill(self, step: Step) -> StepPrefixes | None: ...

    def rollout_phase(self, plan: RolloutPlan) -> AbstractContextManager[None]: ...

    def generate(self, step: Step) -> list[Sample]: ...

    def score_phase(self) -> AbstractContextManager[None]: ...

    def score(self, samples: list[Sample]) -> int: ...

    def refill_groups(self, step: Step) -> None:
        """Replace groups without a learning signal, see `DynamicSampling`. Does nothing without algorithm.filter_range."""

    def learn_phase(self) -> AbstractContextManager[None]: ...

    def advantages(self, samples: list[Sample]) -> Batch: ...

    def start_update(self, batch: Batch) -> Pending[UpdateStats]:
        """Update the critic, if there is one, and start the policy's update."""

    def observe_samples(self, step: Step) -> None:
        """Record the samples, and update the length forecasts for the next plan."""

    def publish(self, version: int) -> WeightVersion: ...

    def evaluation_is_due(self, number: int) -> bool: ...

    def evaluate(self) -> dict[str, float]: ...

    def record_evaluation(self, found: dict[str, float]) -> None: ...

    def decide_end(self, step: Step, upcoming: Step | None) -> StepEnd: ...

    def close_step(self, step: Step, end: StepEnd) -> dict[str, float]:
        """Mark the step as done, so that a stop saves it. Returns its cost in slot-seconds and money."""

    def start_engines(self, upcoming: Step) -> None:
        """Start the next step's engines under the free leases, without waiting until they have loaded the weights."""

    def record_step(self, step: Step, end: StepEnd) -> None:
        """Record the step, save a checkpoint if it is due, and yield slots to waiting runs."""

    def finish(self) -> None: ...
