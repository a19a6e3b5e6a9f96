"""The updates of a run: scores, advantages, the learner's update, and the weights that engines take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.rollout.staleness import check_lag
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.runtime.step_records import StepRecords
from rlhfless_ray.session.early_wake import wake_early
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.step import Step, StepProgress
from rlhfless_ray.types import Sample, Scored, UpdateStats

Rewards = Callable[[list[Scored]], Sequence[float | None]]  # samples → their rewards, None for one that is left out


@dataclass
class Updates:
    stages: Stages
    session: RolloutSession
    records: StepRecords
    has_old_tokens: bool = False  # whether older weights drew some of the step's tokens

    def score(self, step: Step, rewards: Rewards | None = None) -> list[Scored]:
        """Score the step's samples, and replace groups without a learning signal. Returns the samples to learn from.

        `rewards`: called with scored samples. What it returns replaces their rewards.
        """
        step.check("updates.score", StepProgress.TAKEN)

        def score(samples: Sequence[Sample]) -> list[Scored]:
            with self.stages.accounted("score", self.stages.score.phase()):
                scored = self.stages.score.score(samples, step.number)
            if rewards is None:
                return scored
            own = zip(scored, _checked("updates.score", scored, rewards(scored)), strict=True)
            return [replace(one, reward=reward, error=one.error if reward is None else None) for one, reward in own]

        step.answers = answers = score(step.samples)
        step.samples = samples = self.session.refill(step, answers, score)
        step.progress = StepProgress.SCORED
        return samples

    @contextmanager
    def phase(self, step: Step) -> Iterator[None]:
        """Lend the slots to the learner inside the block, which starts an update and publishes it. Engines have them again afterwards."""
        step.check("updates.phase", StepProgress.SCORED)
        step.progress = StepProgress.LEARNING
        learn = self.stages.learn
        learn.worker_groups.shares_slots = self.session.mode.begins_beside_update and step.number < self.session.last_step
        with self.stages.accounted("learn", learn.phase(step.samples)):
            yield
            step.check("the end of updates.phase", StepProgress.PUBLISHED)
        step.metrics |= learn.resized
        self.session.switch()  # what the update has cut goes on under its weights

    def advantages(self, step: Step, values: Sequence[float] | None = None) -> Batch:
        """Return the learner's batch, with the advantages of the recipe's estimator.

        `values`: advantages of the step's samples, in place of the recipe's.
        """
        step.check("updates.advantages", StepProgress.LEARNING)
        recipe, samples = self.stages.context.recipe, step.scored
        if self.stages.agreement is not None and self.session.weights is not None:
            self.stages.agreement.check(samples, self.session.weights, recipe.rollout.temperature, parks=False)
        # groups that filtering keeps for the next step are one version old in it
        max_lag = max(recipe.rollout.max_lag_steps, int(recipe.algorithm.filter_range is not None))
        lag = check_lag(samples, step.number - 1, max_lag)
        if recipe.rollout.max_lag_steps:
            step.metrics |= lag
        self.has_old_tokens = lag["lag/max"] > 0
        batch, trained = self.stages.learn.advantages(samples)
        if values is None:
            step.samples = trained
            return batch
        found = _checked("updates.advantages", samples, values)
        is_trained = [sample.reward is not None for sample in samples]  # others are not trained on
        step.samples = [
            replace(one, advantage=value) if known else one for one, value, known in zip(trained, found, is_trained, strict=True)
        ]
        learned = [(value, len(sample.branches)) for value, sample, known in zip(found, samples, is_trained, strict=True) if known]
        own = np.array([*(value for value, _ in learned), *(value for value, branches in learned for _ in range(branches))], np.float32)
        return replace(batch, advantages=np.repeat(own, batch.response_lengths))

    def start(self, batch: Batch) -> Pending[UpdateStats]:
        """Update the critic, if there is one, and start the policy's update. Record the samples while the learner works."""
        step = self.session.step
        step.check("updates.start", StepProgress.LEARNING)
        self.session.update_begins()
        update = self.stages.learn.start_update(batch, step.samples)
        step.progress = StepProgress.UPDATING
        pending = self.session.update_is(Pending(lambda: self._updated(step, update), update.is_ready, update.has_failed))
        self.records.observe(step)
        return pending

    def _updated(self, step: Step, update: Pending[tuple[UpdateStats, JsonObject]]) -> UpdateStats:
        stats, sized = update.result()
        self.session.update = None
        step.progress = StepProgress.UPDATED
        step.metrics |= sized
        if self.stages.agreement is not None:
            self.stages.agreement.updated(stats)
            step.metrics |= self.stages.agreement.compare(stats, self.has_old_tokens)
        return stats

    def publish(self, update: Pending[UpdateStats]) -> None:
        """Wait for the update, and publish its weights, under which engines generate from now on."""
        step = self.session.step
        step.check("updates.publish", StepProgress.UPDATING, StepProgress.UPDATED)
        wake_early(self.session, update, saves=self.records.state.is_due(step.number))
        step.stats = update.result()
        self.session.weights = self.stages.learn.publish(step.number)
        self.stages.context.broker.check("publish", self.stages.pools())
        step.progress = StepProgress.PUBLISHED


def _checked(verb: str, samples: Sequence[Sample], values: Sequence[float | None]) -> list[float | None]:
    """Return one finite number or None for each sample. Raises UserError for anything else."""
    if len(values) != len(samples):
        raise UserError(f"{verb}: expected a value for each of {len(samples)} samples, got {len(values)}")
    found = [None if value is None else float(value) for value in values]
    for sample, value in zip(samples, found, strict=True):
        if value is not None and not math.isfinite(value):
            raise UserError(f"{verb}: the value of a response to row {sample.prompt.index} is {value}, and not a finite number")
    return found
