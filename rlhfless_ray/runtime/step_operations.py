"""The operations of a step that `loop.py` calls, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from placement.scaling.resize_policy import slots_to_yield
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.memory_watch import MemoryWatch, memory_metrics
from rlhfless_ray.preflight.memory_fit import Fit
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.staleness import check_lag
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.runtime.agreement import Agreement
from rlhfless_ray.runtime.checkpointed_run import CheckpointedRun, StepsDone
from rlhfless_ray.runtime.evaluation import evaluate
from rlhfless_ray.runtime.export import write_models
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Sample, Scored, UpdateStats, WeightVersion

LOOK_EVERY_S = 5.0  # interval of looking for lost nodes with parked processes


@dataclass(frozen=True)
class StepEnd:
    """Decisions at the end of a step."""

    metric: tuple[str, float] | None  # (name, value) of its evaluation, by which checkpoints are compared
    best: bool  # whether the metric is the best so far
    save: bool  # whether a checkpoint is due
    others_wait: bool  # whether another run on the cluster waits for slots
    starts_next: bool  # whether engines of the next step may take the free leases now


class StepOperations(CheckpointedRun):
    """A run as `loop.py` sees it. `Runtime` creates the parts."""

    cluster: RayCluster
    memory: MemoryWatch
    memory_fit: Fit
    least_mb: dict[str, float]  # least memory of each working function in MB; empty on GPUs
    ledger: Ledger
    broker: SlotBroker
    leases: LeaseManager
    phases: StepTimer
    context: RunContext
    rollout: WorkerPool
    reward: WorkerPool
    score_stage: ScoreStage
    agreement: Agreement | None
    step: Step  # the one that runs now
    cursor_after: dict[str, Any]  # the cursor's state after this step
    slots: int  # of the cluster at the start
    unrecorded = False  # whether the learner has made an update that is not recorded yet
    has_old_tokens = False  # whether older weights drew some of the step's tokens
    finished = False

    @property
    def last_step(self) -> int:
        """Number of the last step. Filtered groups can lower it by using up an episode's prompts early."""
        return self.recipe.run.steps

    def begin_step(self, step: Step) -> None:
        STOP.check()
        if self.ledger.step != step.number:  # otherwise its engines have started already
            self.ledger.begin_step(step.number)
        self.leases.waited_s = 0.0
        self.step, self.session.step, self.learn_stage.number = step, step, step.number
        self.session.wait_for_weights()

    @property
    def rolls_out_ahead(self) -> bool:
        """Whether the next step's responses are generated while the learner works."""
        return self.recipe.rollout.rolls_out_ahead

    def score(self, step: Step) -> list[Scored]:
        """Score the step's samples, and replace groups without a learning signal. Returns the samples to learn from."""
        step.answers = answers = self._score(step.samples)
        step.samples = samples = self.session.refill(step, answers, self._score)
        return samples

    def _score(self, samples: Sequence[Sample]) -> list[Scored]:
        with self._accounted("score", self.score_stage.phase()):
            return self.score_stage.score(samples, self.step.number)

    def advantages(self, samples: Sequence[Scored]) -> Batch:
        """Return the learner's batch. The step gets the samples with their advantages."""
        if self.agreement is not None and self.weights is not None:
            self.agreement.check(samples, self.weights, self.recipe.rollout.temperature, parks=False)
        # groups that filtering keeps for the next step are one version old in it
        max_lag = max(self.recipe.rollout.max_lag_steps, int(self.recipe.algorithm.filter_range is not None))
        lag = check_lag(samples, self.step.number - 1, max_lag)
        if self.recipe.rollout.max_lag_steps:
            self.step.metrics |= lag
        self.has_old_tokens = lag["lag/max"] > 0
        batch, self.step.samples = self.learn_stage.advantages(samples)
        return batch

    def learn_phase(self) -> AbstractContextManager[None]:
        self.learn_stage.worker_groups.shares_slots = self.rolls_out_ahead and self.step.number < self.last_step
        return self._accounted("learn", self.learn_stage.phase(self.step.samples))

    def start_update(self, batch: Batch) -> Pending[UpdateStats]:
        """Update the critic, if there is one, and start the policy's update."""
        self.session.update_begins()
        update = self.learn_stage.start_update(batch, self.step.samples)
        return self.session.update_is(Pending(lambda: self._updated(update), update.is_ready, update.has_failed))

    def _updated(self, update: Pending[tuple[UpdateStats, dict[str, Any]]]) -> UpdateStats:
        stats, sized = update.result()
        self.session.update_ends()
        self.unrecorded = True
        self.step.metrics |= sized
        if self.agreement is not None:
            self.agreement.updated(stats)
            self.step.metrics |= self.agreement.compare(stats, self.has_old_tokens)
        return stats

    def observe_samples(self, step: Step) -> None:
        """Record the samples, and update the length forecasts for the next plan."""
        self.record.samples(step.number, step.samples)
        step.metrics |= self.record.summarize_samples(step.samples)
        self.autoscaler.observe_samples(step.prompts, step.answers)
        step.metrics |= self.autoscaler.quality(
            step.forecast, step.answers, step.prompts, self.context.most_engines(self.autoscaler.engines.width)
        )
        step.metrics["epoch"] = self.cursor.epoch
        if self.recipe.prompts.overlong == "cut_left":
            step.metrics["prompts/cut"] = sum(prompt.cut_tokens > 0 for prompt in step.prompts)
        self.session.tell_troubles(step)
        if step.troubles:
            step.metrics["plan/trouble"] = "; ".join(step.troubles)
        self.cursor_after = self.cursor.state()
        self._end_when_prompts_are_used_up(step.number)

    def _end_when_prompts_are_used_up(self, number: int) -> None:
        """Make this step the last one if filtered groups have used up the last episode's prompts early."""
        episodes = self.recipe.run.episodes
        goes_on = bool(self.groups.in_flight)
        if episodes is not None and self.recipe.algorithm.filter_range is not None and self.cursor.epoch >= episodes and not goes_on:
            self.recipe, self.session.last_step = self.recipe.with_settings({"run.steps": number}), number

    def publish(self, version: int) -> WeightVersion:
        weights = self.learn_stage.publish(version)
        self.broker.check("publish", self.stages.pools())
        return weights

    def evaluation_is_due(self, number: int) -> bool:
        every = self.recipe.evaluate.every_steps
        return number == self.last_step or (every > 0 and number % every == 0)

    def checkpoint_is_due(self, number: int) -> bool:
        return number % self.recipe.checkpoint.every_steps == 0 or number == self.last_step

    def evaluate(self) -> dict[str, float]:
        agreement, weights = self.agreement, self.session.wait_for_weights()

        def check(samples: Sequence[Sample], temperature: float) -> None:
            if agreement is not None:
                agreement.check(samples, weights, temperature, parks=True)

        return evaluate(self.rollout_stage, self.score_stage, self.inputs.prompts.heldout, weights, self.step.number, check)

    def record_evaluation(self, evaluation: dict[str, float]) -> None:
        self.phases.take()
        self.owes_evaluation = False
        metric = self.best.read_metric(evaluation)  # raises at once instead of in an hour if no evaluation has the metric
        self.record.evaluation(self.steps_done, evaluation)
        if self.steps_done and ((best := self.best.improved(metric)) or self.checkpoint_is_due(self.steps_done)):
            self._save(metric=metric, best=best, export=True)  # the one of the stop that interrupted the evaluation has no metric

    def leave_out_start(self) -> None:
        """Count the start in no step's time and costs. In a new run of training the first evaluation does so."""
        self.phases.take()
        self.record.evaluation(self.steps_done, {})

    def decide_end(self, step: Step, upcoming: Step | None) -> StepEnd:
        """Decide what to do at the end of a step.

        Engines of the next step start early unless their leases may be needed: by the learner during a save (its processes may be lost),
        by another run, or for computing prefix KV.
        """
        metric = self.best.read_metric(step.evaluation)
        best = self.best.improved(metric)
        save = best or self.checkpoint_is_due(step.number)
        others_wait = not self.cluster.private and self.leases.others_wait()
        prefixes = upcoming.prefixes if upcoming is not None else None
        wanted = save or others_wait or (prefixes is not None and prefixes.choice.on)
        has_work = upcoming is not None and not upcoming.samples
        return StepEnd(metric, best, save, others_wait, starts_next=has_work and not wanted)

    def close_step(self, step: Step, starts_next: bool = False) -> dict[str, float]:
        """Mark the step as done, so that a stop saves it. Returns its cost in slot-seconds and money, which are also in its metrics."""
        self.steps_done, self.unrecorded = step.number, False
        begun = self.session.begun  # beside the update, after whose prompts the cursor is now
        cursor, in_flight = (self.cursor_after, self.groups.in_flight) if begun is None else (self.cursor.state(), begun)
        self.done = StepsDone(cursor, self.dynamic_sampling.state(), in_flight)
        step.phase_s, step.wall_s = self.phases.take()
        step.phase_s["passes"] = self.learn_stage.passes_s
        self.ledger.begin_step(step.number + starts_next)
        totals, metrics = self.record.costs()
        step.metrics |= metrics
        return totals

    def record_step(self, step: Step, end: StepEnd) -> None:
        """Record the step, save a checkpoint if it is due, and yield slots to waiting runs."""
        if not end.starts_next:
            self.broker.put(self.broker.reclaim())  # engines whose rollout goes on have kept their devices
        self._write_row(step)
        if end.save:
            self._save(metric=end.metric, best=end.best, export=True)
        for pool in (self.rollout, self.reward, *([self.stages.prefix.pool] if self.stages.prefix else [])):
            pool.end_expired(self.autoscaler.keep_warm_s(pool.gaps_s, pool.hold_price), look_every_s=LOOK_EVERY_S)
        if end.others_wait:
            self._yield_slots()
        self.broker.check("the end of the step", self.stages.pools())

    def _yield_slots(self) -> None:
        """Give up free slots for which another run waited when the step ended."""
        source, free = self.leases.source, len(self.broker.free)
        surplus, usable = source.surplus, sum(lease.id in source.surplus_leases for lease in self.broker.free)
        waits = surplus != 0 or source.others_wait()  # a run of the pool may have its slots by now
        decision = slots_to_yield(free, 1, waits, surplus, usable)
        if decision.action == "Release":
            self.broker.release(keep=decision.actors, sooner=source.surplus_leases)

    def _write_row(self, step: Step) -> None:
        self.learn_stage.worker_groups.start_snapshots()
        self.autoscaler.observe_step(step.phase_s, step.wall_s, len(step.samples))
        self.groups.observe(step)
        self.stages.faults.step_done()
        step.metrics |= {**self.stages.faults.take_metrics(), **self.worker_group.recovery.take_metrics()}
        predicted_mb = self.memory_fit.step_mb(step.plan.actors if step.plan else 1)
        step.metrics |= memory_metrics(self.memory.take(), self.least_mb, predicted_mb)
        if self.autoscaler.bids is not None:
            step.metrics |= self.autoscaler.bids.metrics()
        if self.memory_fit.reason:
            step.metrics["memory/settings"] = self.memory_fit.reason
        self.record.step(step, self.last_step, self.stages.replacements, self.leases.waited_s)
        self.record.put_off(self.autoscaler.settle)

    def finish(self) -> None:
        write_models(self.recipe, self.folder, self.inputs.files, self.inputs.critic_files, self.learn_stage.worker_groups)
        self.finished = True

    @contextmanager
    def _accounted(self, where: str, phase: AbstractContextManager[None]) -> Iterator[None]:
        """Run a phase, and check at its end that it lost no lease."""
        with phase:
            yield
        self.broker.check(where, self.stages.pools())
