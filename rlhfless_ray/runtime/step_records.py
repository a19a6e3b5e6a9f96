"""Record a run's steps: samples, costs, metrics, and the checkpoints that are due."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.scaling.resize_policy import slots_to_yield
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.runtime.saved_state import SavedState, StepsDone
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.step import Step, StepProgress

MemoryOfStep = Callable[[int], JsonObject]  # planned number of engines → metrics of a step's memory
LOOK_EVERY_S = 5.0  # interval of looking for lost nodes with parked processes


@dataclass
class StepRecords:
    stages: Stages
    session: RolloutSession
    state: SavedState
    memory: MemoryOfStep
    write_result: Callable[[], None]
    shares_cluster: bool  # whether other runs may wait for slots
    finished: bool = False
    cursor_after: JsonObject = field(default_factory=dict)  # the cursor's state after this step's prompts

    def observe(self, step: Step) -> None:
        """Record the samples, and update the length forecasts for the next plan."""
        context, autoscaler = self.stages.context, self.stages.context.autoscaler
        context.record.samples(step.number, step.samples)
        step.metrics |= context.record.summarize_samples(step.samples)
        autoscaler.predictor.observe_samples(step.prompts, step.answers)
        most = context.most_engines(autoscaler.engines.width)
        step.metrics |= autoscaler.quality(step.forecast, step.answers, step.prompts, most)
        step.metrics["epoch"] = self.session.source.cursor.epoch
        if context.recipe.prompts.overlong == "cut_left":
            step.metrics["prompts/cut"] = sum(prompt.cut_tokens > 0 for prompt in step.prompts)
        self.session.tell_troubles(step)
        if step.troubles:
            step.metrics["plan/trouble"] = "; ".join(step.troubles)
        self.cursor_after = self.session.source.cursor.state()
        self.end_if_prompts_are_used_up(step.number)

    def end_if_prompts_are_used_up(self, number: int) -> None:
        """Make this step the last one if no prompt is left for another."""
        context, session = self.stages.context, self.session
        if session.source.is_used_up and not session.groups.in_flight:
            context.recipe, session.last_step = context.recipe.with_settings({"run.steps": number}), number

    def close(self, step: Step) -> None:
        """Finish a step: record it, save a checkpoint if one is due, start the next step's engines, and yield slots to waiting runs."""
        least = StepProgress.PUBLISHED if self.stages.context.recipe.learns else StepProgress.TAKEN
        step.check("records.close", *(progress for progress in StepProgress if least <= progress < StepProgress.CLOSED))
        context, state, session = self.stages.context, self.state, self.session
        metric = state.best.read_metric(step.evaluation)
        best = state.best.improved(metric)
        saves = best or state.is_due(step.number)
        others_wait = self.shares_cluster and context.leases.others_wait()
        upcoming = session.upcoming
        if upcoming is not None and (upcoming.samples or saves or others_wait or upcoming.computes_prefixes):
            upcoming = None  # its engines start later: it has its responses, or others need the leases (a learner may be lost in a save)
        self._count(step, starts_next=upcoming is not None)
        if upcoming is not None:
            session.start_engines(upcoming)  # they load the weights while the driver records the step
        else:
            context.broker.put(context.broker.reclaim())  # engines whose rollout goes on have kept their devices
        self._write_row(step)
        if saves:
            state.save(metric=metric, best=best, export=True)
        for pool in self.stages.generating():
            pool.end_expired(context.autoscaler.steps.keep_warm_s(pool.gaps_s, pool.hold_price), look_every_s=LOOK_EVERY_S)
        if others_wait:
            self._yield_slots()
        context.broker.check("the end of the step", self.stages.pools())

    def close_interrupted(self, evaluation_is_due: bool) -> None:
        """At a stop: record the newest step if the learner has made its update."""
        step = self.session.step
        if step.is_unrecorded:
            self.state.owes_evaluation = evaluation_is_due and not step.evaluation
            self._count(step)
            self._write_row(step)

    def leave_out_start(self) -> None:
        """Count the start in no step's time and costs. In a new run of training the first evaluation does so."""
        self.evaluation({})

    def evaluation(self, found: dict[str, float]) -> None:
        """Record an evaluation before the next step, whose time and costs do not include it."""
        self.stages.context.phases.take()
        self.stages.context.record.evaluation(self.state.steps_done, found)

    def finish(self) -> None:
        """Write the run's result. A run that is left without it counts as stopped."""
        self.write_result()
        self.finished = True

    def _count(self, step: Step, starts_next: bool = False) -> None:
        """Mark the step as done, so that a stop saves it, and count its time and costs, which are also in its metrics."""
        step.progress, self.state.steps_done, session = StepProgress.CLOSED, step.number, self.session
        begun = session.begun  # beside the update, after whose prompts the cursor is now
        cursor, in_flight = (self.cursor_after, session.groups.in_flight) if begun is None else (session.source.cursor.state(), begun)
        self.state.done = StepsDone(cursor, session.source.dynamic_sampling.state(), in_flight)
        step.phase_s, step.wall_s = self.stages.context.phases.take()
        step.phase_s["passes"] = self.stages.learn.passes_s
        self.stages.context.ledger.begin_step(step.number + starts_next)
        step.ledger, metrics = self.stages.context.record.costs()
        step.metrics |= metrics

    def _write_row(self, step: Step) -> None:
        context, groups = self.stages.context, self.stages.learn.worker_groups
        groups.start_snapshots()
        context.autoscaler.predictor.observe_step(step.phase_s, step.wall_s, len(step.samples), step.ledger["full_slot_s"])
        for pool, used in context.leases.node_times.take(time.monotonic()).items():
            context.autoscaler.terms.pools.observe_use(pool, used.node_s, used.preemptions)
        self.session.groups.observe(step)
        self.stages.faults.step_done()
        step.metrics |= {**self.stages.faults.take_metrics(), **groups.learner.recovery.take_metrics()}
        step.metrics |= self.memory(step.plan.actors if step.plan else 1)
        if context.autoscaler.criteria.bids is not None:
            step.metrics |= context.autoscaler.criteria.bids.metrics()
        step.metrics |= context.autoscaler.steps.accuracy()  # of the steps before
        context.record.step(step, self.session.last_step, self.stages.replacements, context.leases.waited_s)
        context.autoscaler.steps.observe_plan(step.plan, step.metrics)
        for sentence in context.autoscaler.steps.far_off(step.metrics):
            context.say(f"step {step.number}: {sentence}")
        context.record.put_off(context.autoscaler.predictor.settle)

    def _yield_slots(self) -> None:
        """Give up free slots for which another run waited when the step ended."""
        broker = self.stages.context.broker
        source, view, free = broker.leases.source, broker.leases.source.view, len(broker.free)
        usable = sum(lease.id in view.surplus_leases for lease in broker.free)
        waits = view.surplus != 0 or source.others_wait()  # a run of the pool may have its slots by now
        decision = slots_to_yield(free, 1, waits, view.surplus, usable)
        if decision.action == "Release":
            broker.release(keep=decision.actors, sooner=view.surplus_leases)
