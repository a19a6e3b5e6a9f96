"""The operations of a step that `loop.py` calls, in its order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placement.forecast.forecaster import Scenarios
from placement.scaling.resize_policy import slots_to_yield
from rlhfless_ray.autoscaler.weight_timing import WeightTiming
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.lease import Lease, LeaseManager
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.worker_pool import NoRoom, WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.memory_watch import MemoryWatch, memory_metrics
from rlhfless_ray.preflight.memory_fit import Fit
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.listener import WorkBeside
from rlhfless_ray.rollout.overlap import BesideUpdate, OverlapScheduler, PartialOverlap
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.staleness import check_lag
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.runtime.agreement import Agreement
from rlhfless_ray.runtime.checkpointed_run import CheckpointedRun, StepsDone
from rlhfless_ray.runtime.evaluation import evaluate
from rlhfless_ray.runtime.export import write_models
from rlhfless_ray.step.partial_batch import PartialBatch
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step
from rlhfless_ray.step.step_prefixes import StepPrefixes
from rlhfless_ray.types import Group, Prompt, Sample, UpdateStats, WeightVersion

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
    limits: Limits | None = None  # of the last plan
    ahead: Sequence[Sample] = ()  # responses of the next step, without rewards, once they are generated
    begun_ahead: list[Group] | None = None  # groups of the next step, if a partial rollout was beside the update
    update: Pending[Any] = Pending(lambda: None)
    update_ends_s = 0.0  # when the update will end by its prediction, on the clock of time.monotonic
    in_update = False  # whether the learner makes an update
    rest_follows = False  # whether the update has ended before the rollout beside it, which goes on under its weights
    rest_plan_s = 0.0  # time that planning the rest of such a rollout took; 0 if there was none
    rollout_began_s = 0.0  # beginning of the last rollout's phase, on the clock of `_working_s`
    unrecorded = False  # whether the learner has made an update that is not recorded yet
    has_old_tokens = False  # whether older weights drew some of the step's tokens
    finished = False

    @property
    def last_step(self) -> int:
        """Number of the last step. Filtered groups can lower it by using up an episode's prompts early."""
        return self.recipe.run.steps

    def next_prompts(self, step: Step, missing: int | None = None) -> list[Prompt]:
        """Return a step's prompts, those of responses in flight first. `missing`: groups that it lacks because others were dropped."""
        if self.recipe.rollout.partial == "off":
            return self._draw(self.dynamic_sampling.missing)
        if missing is None:
            self.partial_rollouts.resize(self.autoscaler, self.step)
        step.partial_batch = self.partial_rollouts.begin(step.number, self.last_step - step.number + 1, self._draw, missing)
        return [group.prompt for group in step.partial_batch.groups]

    def _draw(self, count: int) -> list[Prompt]:
        episodes = self.recipe.run.episodes
        if episodes is not None:
            left = self.cursor.rows_left(episodes)
            if not left and not self.partial_rollouts.in_flight and not self.dynamic_sampling.ready:
                left = self.dynamic_sampling.missing  # filtering has dropped all groups of the last step, which has at least one
            count = min(count, left)
        return [self.inputs.prompts.train[i] for i in self.cursor.next(count)]

    def forecast(self, step: Step) -> Scenarios:
        forecast = self.autoscaler.forecast(step.prompts, step.number)
        if step.partial_batch is not None:
            step.work = self._forecast_work(step.partial_batch, forecast)
        return forecast

    def _forecast_work(self, batch: PartialBatch, forecast: Scenarios) -> np.ndarray | None:
        return self.autoscaler.safely("the forecast", lambda: batch.forecast_work(forecast), lambda: None)

    def plan(self, step: Step) -> RolloutPlan:
        limits = self._limits(step)
        now = self.autoscaler.engines.width
        learner_slots, rest_actors, rooms = 0, 0, dict[int, dict[int, int]]()

        def room(learner: list[list[Lease]]) -> dict[int, int]:
            held = [lease for leases in learner for lease in leases]
            return {width: limits.engines(width, held) for width in limits.most}

        counts = room([])
        if self.in_update and self.rolls_out_ahead:  # engines get the slots that the learner leaves
            learner = [rank.leases for rank in self.worker_group.by_rank]

            if self.recipe.rollout.partial != "off":
                rest_actors = counts[now]
            sizes = self.autoscaler.learner.counts if self.leases.resource == "cpu" else []
            rooms = {size: room([leases[:1] * size for leases in learner]) for size in sizes}
            learner_slots = sum(map(len, learner))
            counts = room(learner)
        least, warm = limits.fewest(now), self.rollout_stage.warm
        others = {width: (n, warm(width)) for width, n in counts.items() if width != now and n >= least}
        scenarios = step.forecast if step.work is None else Scenarios.from_matrix(step.work)
        most = max(least, counts[now])  # the rollout waits for the fewest
        plan = self.autoscaler.plan(
            scenarios,
            step.prompts,
            most,
            step=step.number,
            warm=warm(now),
            others=others,
            learner_slots=learner_slots,
            rooms=rooms,
            rest_actors=rest_actors,
        )
        self._tell_troubles(step)  # now, because the rollout may end the run
        return plan

    def _limits(self, step: Step) -> Limits:
        """Return the limits of a plan that is made now, and tell the user what has changed since the plan before."""
        limits, before, engines = self.context.limits(), self.limits, self.autoscaler.engines
        self.limits = limits
        with_room = [width for width in limits.most if limits.engines(width) >= limits.fewest(width)]
        if with_room and engines.width not in with_room:  # the nodes that were large enough are lost
            self.autoscaler.use_width(min(with_room))
        if before is not None and (change := limits.since(before, engines.width)):
            self.record.progress.message(f"step {step.number}: {change}")
            self.autoscaler.note = "; ".join(filter(None, (self.autoscaler.note, change)))
        return limits

    def _tell_troubles(self, step: Step) -> None:
        """Print what has failed in planning since the last call, and record it with the step."""
        if new := [trouble for trouble in self.autoscaler.troubles if trouble not in step.troubles]:
            step.troubles += new
            self.record.progress.message(f"step {step.number}: {'; '.join(new)}; the run continues")
        self.autoscaler.troubles.clear()

    def plan_rest(self, step: Step) -> None:
        """Plan what a rollout beside the update has left of a step, with all slots. Does nothing if no response is left.

        The speed is fitted to that rollout during the next update, when nothing waits for it.
        """
        if self.rolls_out_ahead and not step.samples:
            began_s, went_on = time.monotonic(), self.rest_follows
            if self.rest_follows:
                self.rollout_stage.load(self._wait_for_weights())  # while this plans
                self.rest_follows = False
            if self.begun_ahead is not None:
                assert step.partial_batch is not None
                step.work = self._forecast_work(step.partial_batch, step.forecast)
            step.plan = self.plan(step)
            step.prefixes = self.weigh_prefixes(step)
            self.rest_plan_s = time.monotonic() - began_s if went_on else 0.0

    def weigh_prefixes(self, step: Step) -> StepPrefixes | None:
        """Decide whether sharing the KV of prompt prefixes pays for the plan. Returns None without prefix KV in this run.

        Also None if all responses of a partial rollout are complete already.
        """
        if self.stages.prefix is None or (step.partial_batch is not None and not step.partial_batch.unfinished.any()):
            return None
        steps_left = self.last_step - step.number + 1
        return self.stages.prefix.weigh([p.token_ids for p in step.prompts], self.rollout_stage.assign_prompts(step), steps_left)

    def begin_step(self, step: Step) -> None:
        STOP.check()
        if self.ledger.step != step.number:  # otherwise its engines have started already
            self.ledger.begin_step(step.number)
        self.leases.waited_s = 0.0
        self.step, self.learn_stage.number = step, step.number
        self._wait_for_weights()

    def _wait_for_weights(self) -> WeightVersion:
        """Return the newest weights, once engines cannot lose them."""
        assert self.weights is not None
        self.weights = self.learn_stage.worker_groups.wait_for_copy(self.weights)
        return self.weights

    @property
    def rolls_out_ahead(self) -> bool:
        """Whether the next step's responses are generated while the learner works."""
        return self.recipe.rollout.rolls_out_ahead

    def has_responses(self, step: Step) -> bool:
        """Return whether the step's responses were generated ahead, by this process or before a resume."""
        if not step.samples and self.done.ahead and self.rolls_out_ahead:
            count = self.recipe.rollout.samples_per_prompt
            if [s.prompt.index for s in self.done.ahead] == [p.index for p in step.prompts for _ in range(count)]:
                step.samples, step.metrics = [replace(sample) for sample in self.done.ahead], RolloutResult().metrics()
        return bool(step.samples)

    def prefill(self, step: Step) -> StepPrefixes | None:
        assert self.weights is not None
        if self.stages.prefix is None or step.prefixes is None:
            return None
        prompts = [p.token_ids for p in step.prompts]
        return self.stages.prefix.prefill(step.prefixes, prompts, self.weights, step.plan.width or self.rollout_stage.pool.width)

    def rollout_phase(self, plan: RolloutPlan) -> AbstractContextManager[None]:
        assert self.weights is not None
        name, self.rollout_began_s = "rollout_ahead" if self.in_update else "rollout", self._working_s()
        plan, delay = self.autoscaler.begin_rollout(plan, self.rollout_stage.grows)
        if delay.seconds:
            self.step.metrics["pool/wait_reason"] = delay.reason
            self.record.progress.message(f"step {self.step.number}: the rollout {delay.reason}")
        ends, idle_s = (self.update.is_ready, self._idle_beside_s) if self.in_update else (None, None)
        self.rest_follows = False
        phase = self.rollout_stage.phase(plan, self.weights, name, delay.seconds, ends, idle_s, lambda: self.rest_follows)
        return self._accounted(name, phase)

    def _working_s(self) -> float:
        """Return the time on a clock that stops while the step waits for slots. The length of a pause is measured without such waits."""
        return time.monotonic() - self.leases.waited_s

    def _idle_beside_s(self, tail_s: float) -> float:
        """Return the seconds until the slot of an idle engine beside the update is needed again. `tail_s`: until the rollout ends.

        The learner has slots of its own. So the next rollout needs it, which begins after the passes of the next learn phase. A partial
        rollout goes on as soon as the update ends.
        """
        left_s = max(tail_s, self.update_ends_s - time.monotonic())
        if self.recipe.rollout.partial != "off":
            return left_s
        return left_s + self.autoscaler.apart_s(self.autoscaler.update_tokens, len(self.step.samples))

    def generate(self, step: Step) -> list[Sample]:
        if self.in_update:
            if self.rollout_stage.pool.working:
                with suppress(NoRoom):  # all engines are lost
                    return self._generate(step)
            self.record.progress.message(f"step {step.number}: no slot is free beside the update, so its rollout begins after it")
            return []
        return self._generate(step)

    def _generate(self, step: Step) -> list[Sample]:
        assert self.weights is not None
        count = self.recipe.rollout.samples_per_prompt
        overlap: WorkBeside | None = None
        if step.partial_batch is None:
            prompts, drafter = len(step.prompts), self.rollout_stage.drafter
            if self.in_update:
                overlap = BesideUpdate(self.learn_stage, self.broker, prompts * count)
            else:
                overlap = OverlapScheduler(self.score_stage, self.learn_stage, self.broker, prompts, count, drafter)
        elif not self.rolls_out_ahead:
            overlap = PartialOverlap(self.score_stage, self.learn_stage, self.broker, step.partial_batch)
        if step.partial_batch is None or not self.rolls_out_ahead:
            samples = self.rollout_stage.generate(step, self.weights, overlap)
        elif self.in_update:
            samples = self._generate_ahead(step, self.weights)
        else:
            began_s = self._working_s()
            samples = self.rollout_stage.generate(step, self.weights, overlap)
            if self.rest_plan_s and self.rollout_stage.restart_s is not None:
                self.autoscaler.terms.pause.observe(0.0, self.rest_plan_s + began_s - self.rollout_began_s + self.rollout_stage.restart_s)
            self.rest_plan_s = 0.0
        if step.partial_batch is not None:
            return self._take_groups(step, step.partial_batch, samples)
        if self.in_update:
            self.ahead = [replace(sample) for sample in samples]
        return samples

    def _generate_ahead(self, step: Step, weights: WeightVersion) -> list[Sample]:
        """Generate the responses of a partial rollout beside the update, until its groups are complete or engines take the new weights."""
        recipe = self.recipe  # the rest of an episode cannot be forecast, and without importance weights the price of age is unknown
        timing = WeightTiming(
            self.autoscaler,
            self.update,
            self.partial_rollouts.stale_cost.per_version if self.partial_rollouts.stale_cost.lags else None,
            self.context.most_engines(self.autoscaler.engines.width),
            sum(len(rank.leases) for rank in self.worker_group.by_rank),
            can_wait=recipe.functions.elastic and not recipe.agent.path and not recipe.algorithm.uncorrected_lag,
        )
        samples = self.rollout_stage.generate(step, weights, None, timing.ends)
        step.metrics |= timing.metrics()
        return samples

    def _take_groups(self, step: Step, batch: PartialBatch, samples: list[Sample]) -> list[Sample]:
        """Return the samples of the groups that the step trains on, and make these its prompts and forecast. Others stay in flight.

        Returns nothing if the rollout was beside an update that ended before enough groups were complete. It continues then.
        """
        self.record.completion_order(self.partial_rollouts.rollout_name(step.number, self.in_update), batch, samples)
        kept = self.rollout_stage.kept.take_tokens() if self.rollout_stage.kept is not None else 0
        self.partial_rollouts.count(batch, samples, self.in_update, kept)
        if self.in_update:
            # copies: a stop repeats the step, so its keys and rewards may not get into the checkpoint
            self.begun_ahead, self.cursor_after = batch.with_samples([replace(sample) for sample in samples]), self.cursor.state()
        if batch.chosen is None:
            step.partial_batch, self.rest_follows = batch.after(samples), True
            return []
        return self.partial_rollouts.train(step, batch, samples, self.autoscaler.terms.prefill.per_unit_s)

    def score_phase(self) -> AbstractContextManager[None]:
        return self._accounted("score", self.score_stage.phase())

    def score(self, samples: list[Sample]) -> int:
        return self.score_stage.score(samples, self.step.number)

    def refill_groups(self, step: Step) -> None:
        """Replace groups without a learning signal, see `DynamicSampling`. Does nothing without algorithm.filter_range."""
        step.answers = step.samples
        prompts = list(step.prompts)

        def answer() -> list[Sample]:
            extra = Step(step.number, before=list(prompts), troubles=step.troubles)
            if self.recipe.rollout.partial == "off":
                extra.prompts = [self.inputs.prompts.train[i] for i in self.dynamic_sampling.draw()]
            elif missing := self.dynamic_sampling.missing:
                extra.prompts = self.next_prompts(extra, missing)
            if not extra.prompts:
                return []
            prompts.extend(extra.prompts)
            extra.forecast = self.forecast(extra)
            self.autoscaler.learn()
            extra.plan = self.plan(extra)
            with self.rollout_phase(extra.plan):
                extra.samples = self.generate(extra)
            step.metrics |= {name: value for name, value in extra.metrics.items() if name.startswith("partial/")}
            with self.score_phase():
                self.score(extra.samples)
            self.autoscaler.observe_samples(extra.prompts, extra.samples)
            return extra.samples

        try:
            step.samples = self.dynamic_sampling.fill(step.answers, answer)
        except RunError:
            self.record.samples(step.number, self.dynamic_sampling.dropped, "dropped")
            raise
        step.metrics |= self.dynamic_sampling.metrics()

    def advantages(self, samples: list[Sample]) -> Batch:
        if self.agreement is not None and self.weights is not None:
            self.agreement.check(samples, self.weights, self.recipe.rollout.temperature, parks=False)
        # groups that filtering keeps for the next step are one version old in it
        max_lag = max(self.recipe.rollout.max_lag_steps, int(self.recipe.algorithm.filter_range is not None))
        lag = check_lag(samples, self.step.number - 1, max_lag)
        if self.recipe.rollout.max_lag_steps:
            self.step.metrics |= lag
        self.has_old_tokens = lag["lag/max"] > 0
        return self.learn_stage.advantages(samples)

    def learn_phase(self) -> AbstractContextManager[None]:
        self.learn_stage.worker_groups.shares_slots = self.rolls_out_ahead and self.step.number < self.last_step
        return self._accounted("learn", self.learn_stage.phase(self.step.samples))

    def start_update(self, batch: Batch) -> Pending[UpdateStats]:
        """Update the critic, if there is one, and start the policy's update."""
        self.in_update, self.ahead, self.begun_ahead = True, (), None
        if self.weights is not None and not self.rolls_out_ahead:  # engines no longer need it: free its space for the next version
            self.weights = replace(self.weights, shards=(), copies=(), others={})
        update = self.learn_stage.start_update(batch, self.step.samples)
        self.update_ends_s = time.monotonic() + self.autoscaler.expected_update_s
        self.update = Pending(lambda: self._updated(update), update.is_ready, update.has_failed)
        return self.update

    def _updated(self, update: Pending[tuple[UpdateStats, dict[str, Any]]]) -> UpdateStats:
        stats, sized = update.result()
        self.in_update, self.unrecorded = False, True
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
        self._tell_troubles(step)
        if step.troubles:
            step.metrics["plan/trouble"] = "; ".join(step.troubles)
        self.cursor_after = self.cursor.state()
        self._end_when_prompts_are_used_up(step.number)

    def _end_when_prompts_are_used_up(self, number: int) -> None:
        """Make this step the last one if filtered groups have used up the last episode's prompts early."""
        episodes = self.recipe.run.episodes
        goes_on = bool(self.partial_rollouts.in_flight)
        if episodes is not None and self.recipe.algorithm.filter_range is not None and self.cursor.epoch >= episodes and not goes_on:
            self.recipe = self.recipe.with_settings({"run.steps": number})

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
        agreement, weights = self.agreement, self._wait_for_weights()

        def check(samples: list[Sample], temperature: float) -> None:
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
        in_flight = self.partial_rollouts.in_flight if self.begun_ahead is None else self.begun_ahead
        self.done = StepsDone(self.cursor_after, self.dynamic_sampling.state(), self.ahead, in_flight)
        step.phase_s, step.wall_s = self.phases.take()
        step.phase_s["passes"] = self.learn_stage.passes_s
        self.ledger.begin_step(step.number + starts_next)
        totals, metrics = self.record.costs()
        step.metrics |= metrics
        return totals

    def start_engines(self, upcoming: Step) -> None:
        """Start the next step's engines under the free leases, without waiting until they have loaded the weights."""
        self.rollout_stage.begin(upcoming, self._wait_for_weights())
        self.rollout.expect(upcoming.plan.actors)

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
        self.partial_rollouts.observe(step)
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
