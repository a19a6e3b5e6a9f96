"""The rollout session: it plans steps and holds the groups in flight, from the start to the end of a run.

It alone knows about the modes of rollouts (`recipe/rollout_mode.py`): when groups enter, what taking a step's batch does to the other
responses, and when engines take new weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

import numpy as np

from placement.forecast.forecaster import Scenarios
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.worker_pool import NoRoom
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.prefix.prefix_stage import PrefixStage
from rlhfless_ray.recipe.rollout_mode import RolloutMode
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.listener import OnSamples
from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.session.early_work import EarlyWork
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.pause import Pause
from rlhfless_ray.session.prompt_source import Pick, PromptSource
from rlhfless_ray.session.send_prefixes import SendPrefixes
from rlhfless_ray.session.weight_timing import WeightTiming
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step, StepProgress
from rlhfless_ray.step.step_prefixes import StepPrefixes
from rlhfless_ray.types import Group, Sample, Scored, UpdateStats, WeightVersion


class RolloutSession:
    update: Pending[UpdateStats] | Pending[None] | None = None  # of the learner, while it is under way
    update_ends_s = 0.0  # when it will end by its prediction, on the clock of time.monotonic
    begun: list[Group] | None = None  # the next step's groups with their responses, once a rollout beside an update has begun them
    goes_on = False  # whether the update has ended before the rollout beside it, which goes on under its weights
    pause: Pause | None = None  # before the rest of the rollout that goes on
    limits: Limits | None = None  # of the newest plan
    upcoming: Step | None = None  # admitted, and not taken yet

    def __init__(
        self,
        context: RunContext,
        source: PromptSource,
        groups: GroupsInFlight,
        stage: RolloutStage,
        learn: LearnStage,
        scoring: ScoreStage,
        prefix: PrefixStage | None,
        accounted: Callable[[str, AbstractContextManager[None]], AbstractContextManager[None]],
        steps_done: int,
    ) -> None:
        """Create a session. `prefix`: computes the KV of shared prefixes; None: engines do. `accounted`: checks a phase's leases."""
        self.accounted = accounted
        self.context, self.source, self.groups = context, source, groups
        self.stage, self.learn, self.scoring, self.prefix = stage, learn, scoring, prefix
        self.mode: RolloutMode = context.recipe.rollout.mode
        self.last_step = context.recipe.run.steps  # filtered groups can lower it by using up an episode's prompts early
        self.weights: WeightVersion | None = None  # the newest
        self.step = Step(steps_done, progress=StepProgress.CLOSED)  # the newest that was taken

    # ---- planning ---------------------------------------------------------------------------------------------

    def _plan_step(self, number: int) -> Step | None:
        """Plan a step: its groups, the forecast of their lengths, engines and shared prefixes. Returns None after the last step."""
        if number > self.last_step:
            return None
        step = Step(number)
        step.batch = self.next_batch(step)
        self._forecast(step)
        step.plan = self._plan(step)
        step.prefixes = self._weigh_prefixes(step)
        return step

    def next_batch(self, step: Step, *, refills: bool = False) -> RolloutBatch:
        """Return a step's groups, those in flight first. `refills`: they take the places of dropped groups."""
        if self.mode.boundary.cuts and not refills:
            self.groups.resize(self.context.autoscaler, self.step)
        return self.groups.begin(step.number, self.last_step - step.number + 1, self.source, refills=refills)

    def _forecast(self, step: Step) -> None:
        step.prompts = [group.prompt for group in step.batch.groups]
        step.forecast = self.context.autoscaler.predictor.forecast(step.prompts, step.number)
        if not step.batch.is_new:
            step.work = self._forecast_work(step)

    def _forecast_work(self, step: Step) -> np.ndarray | None:
        return self.context.autoscaler.safely("the forecast", lambda: step.batch.forecast_work(step.forecast), lambda: None)

    def _plan(self, step: Step) -> RolloutPlan:
        autoscaler, limits = self.context.autoscaler, self._limits(step)
        now = autoscaler.engines.width
        learner_slots, rest_actors, rooms, learner = 0, 0, dict[int, dict[int, int]](), list[list[Lease]]()

        def room(learner: list[list[Lease]]) -> dict[int, int]:
            return {width: limits.engines(width, itertools.chain(*learner)) for width in limits.most}

        counts = room([])
        if self.update is not None and self.mode.begins_beside_update:  # engines get the slots that the learner leaves
            learner = [rank.leases for rank in self.learn.worker_group.by_rank]
            if self.mode.boundary.cuts:
                rest_actors = counts[now]
            sizes = autoscaler.learner.counts if self.context.leases.resource == "cpu" else []
            rooms = {size: room([leases[:1] * size for leases in learner]) for size in sizes}
            learner_slots = sum(map(len, learner))
            counts = room(learner)
        if limits.pools:
            autoscaler.frontiers.set_rooms({width: limits.by_pool(width, itertools.chain(*learner)) for width in limits.most})
        least, warm = limits.fewest(now), self.stage.warm
        others = {width: (n, warm(width)) for width, n in counts.items() if width != now and n >= least}
        scenarios = step.forecast if step.work is None else Scenarios.from_matrix(step.work)
        plan = autoscaler.plan(
            scenarios,
            step.prompts,
            max(least, counts[now]),  # the rollout waits for the fewest
            step=step.number,
            warm=warm(now),
            others=others,
            learner_slots=learner_slots,
            rooms=rooms,
            rest_actors=rest_actors,
        )
        self.context.demand.announce(lambda: autoscaler.frontiers.wanted(scenarios.lengths, step.prompts, limits, learner_slots))
        self.tell_troubles(step)  # now, because the rollout may end the run
        return replace(plan, pools=autoscaler.frontiers.pools_of(plan.decision.plan)) if limits.pools else plan

    def _limits(self, step: Step) -> Limits:
        """Return the limits of a plan that is made now, and tell the user what has changed since the plan before."""
        autoscaler, before = self.context.autoscaler, self.limits
        self.limits = limits = self.context.limits()
        with_room = [width for width in limits.most if limits.engines(width) >= limits.fewest(width)]
        if with_room and autoscaler.engines.width not in with_room:  # the nodes that were large enough are lost
            autoscaler.use_width(min(with_room))
        if before is not None and (change := limits.since(before, autoscaler.engines.width)):
            self._say(step, change)
            autoscaler.note = "; ".join(filter(None, (autoscaler.note, change)))
        return limits

    def tell_troubles(self, step: Step) -> None:
        """Print what has failed in planning since the last call, and record it with the step."""
        troubles = self.context.autoscaler.troubles
        if new := [trouble for trouble in troubles if trouble not in step.troubles]:
            step.troubles += new
            self._say(step, f"{'; '.join(new)}; the run continues")
        troubles.clear()

    def _weigh_prefixes(self, step: Step) -> StepPrefixes | None:
        """Decide whether sharing prefix KV pays. Returns None without it in this run, and if no response is missing."""
        if self.prefix is None or step.batch.is_complete:
            return None
        steps_left = self.last_step - step.number + 1
        return self.prefix.weigh([p.token_ids for p in step.prompts], self.stage.assign_prompts(step), steps_left)

    # ---- the next step, beside the update -------------------------------------------------------------------------

    def update_begins(self) -> None:
        """Note that the learner begins an update of this step's batch."""
        if self.weights is not None and not self.mode.begins_beside_update:  # engines need it no longer: make room for the next
            self.weights = replace(self.weights, shards=(), copies=(), others={})
        self.update, self.begun = Pending(lambda: None, lambda: False), None

    def update_is(self, update: Pending[UpdateStats]) -> Pending[UpdateStats]:
        """Take the update that has begun, which `admit` looks at."""
        self.update, self.update_ends_s = update, time.monotonic() + self.context.autoscaler.predictor.expected_update_s
        return update

    def admit(self, pick: Pick | None = None) -> Step | None:
        """Plan the next step, at first the first one, and generate its responses beside an update if the mode says so.

        Returns None after the last step. `pick`: picks the rows of its new prompts, instead of the next ones in the shuffled order.
        """
        least = StepProgress.UPDATING if self.context.recipe.learns else StepProgress.TAKEN
        self.step.check("session.admit", *(progress for progress in StepProgress if progress >= least))
        if self.upcoming is not None:
            raise UserError(f"session.admit: step {self.upcoming.number} is admitted already; take it first")
        self.source.pick = pick
        step = self.upcoming = self._plan_step(self.step.number + 1)
        if step is not None and self.update is not None and self.mode.begins_beside_update:
            self._roll_out(step)
        return step

    def switch(self) -> None:
        """After an update: plan what the rollout beside it has left of the next step, with all slots, under the new weights."""
        step = self.upcoming
        if step is None or step.samples or not self.mode.begins_beside_update:
            return
        began_s, went_on = time.monotonic(), self.goes_on
        if went_on:
            self.stage.load(self.wait_for_weights())  # while this plans
            self.goes_on = False
        if self.begun is not None and self.mode.boundary.cuts:
            step.work = self._forecast_work(step)
        step.plan = self._plan(step)
        step.prefixes = self._weigh_prefixes(step)
        self.pause = Pause(self.context.leases, time.monotonic() - began_s) if went_on else None

    def wait_for_weights(self) -> WeightVersion:
        """Return the newest weights, once engines cannot lose them."""
        assert self.weights is not None
        self.weights = self.learn.worker_groups.wait_for_copy(self.weights)
        return self.weights

    # ---- taking a step's batch ------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Begin the admitted step, and set the samples that it trains on.

        Generates under the newest weights what no rollout beside an update has completed.
        """
        if step is not self.upcoming:
            raise UserError(f"session.take: step {step.number} is not the step that session.admit has returned last")
        self.step.check("session.take", StepProgress.CLOSED)
        STOP.check()
        if self.context.ledger.step != step.number:  # otherwise its engines have started already
            self.context.ledger.begin_step(step.number)
        self.context.leases.waited_s = 0.0
        self.step, self.upcoming, self.learn.number = step, None, step.number
        self.wait_for_weights()
        if not step.samples and step.batch.is_complete:  # generated before a resume
            step.batch.is_enough(range(len(step.batch.ids)))
            step.metrics |= RolloutResult().metrics()
            step.samples = self._take_groups(step, step.batch.join([], []))
        elif not step.samples:
            self._roll_out(step)
        step.progress = StepProgress.TAKEN

    def refill(self, step: Step, answers: list[Scored], score: Callable[[Sequence[Sample]], list[Scored]]) -> list[Scored]:
        """Replace groups without a learning signal among the answers, see `DynamicSampling`. Returns the samples to learn from.

        `score`: scores samples in a phase of their own.
        """

        def answer() -> list[Scored]:
            extra = Step(step.number, troubles=step.troubles)
            if not self.source.missing:
                return []
            extra.batch = self.next_batch(step, refills=True)
            if not extra.batch.groups:
                return []
            self._forecast(extra)
            self.context.autoscaler.predictor.learn()
            extra.plan = self._plan(extra)
            with self._phase(extra.plan):
                self._generate(extra)
            step.metrics |= {name: value for name, value in extra.metrics.items() if name.startswith("partial/")}
            scored = score(extra.samples)
            self.context.autoscaler.predictor.observe_samples(extra.prompts, scored)
            return scored

        try:
            samples = self.source.dynamic_sampling.fill(answers, answer)
        except RunError:
            self.context.record.samples(step.number, self.source.dynamic_sampling.dropped, "dropped")
            raise
        step.metrics |= self.source.dynamic_sampling.metrics()
        return samples

    # ---- one rollout ----------------------------------------------------------------------------------------------

    def _roll_out(self, step: Step) -> None:
        """Generate a step's missing responses under the newest weights. Beside an update it may end before they are complete."""
        step.prefixes = self._prefill(step)
        with self._phase(step.plan):  # also scores on slots that engines have left
            self._generate(step)

    def _prefill(self, step: Step) -> StepPrefixes | None:
        if self.prefix is None or step.prefixes is None or self.weights is None:
            return None
        prompts = [p.token_ids for p in step.prompts]
        return self.prefix.prefill(step.prefixes, prompts, self.weights, step.plan.width or self.stage.pool.width)

    @contextmanager
    def _phase(self, plan: RolloutPlan) -> Iterator[None]:
        """Hold the plan's engines inside the block."""
        assert self.weights is not None
        context, beside = self.context, self.update
        name = "rollout" if beside is None else "rollout_ahead"
        if self.pause is not None:
            self.pause.begin_phase()
        plan, delay = context.autoscaler.begin_rollout(plan, self.stage.grows)
        if delay.seconds:
            self.step.metrics["pool/wait_reason"] = delay.reason
            self._say(self.step, f"the rollout {delay.reason}")
        ends, idle_s = (None, None) if beside is None else (beside.is_ready, self._idle_beside_s)
        self.goes_on = False
        with self.accounted(name, self.stage.phase(plan, self.weights, name, delay.seconds, ends, idle_s, lambda: self.goes_on)):
            yield

    def _idle_beside_s(self, tail_s: float) -> float:
        """Return the seconds until the slot of an idle engine beside the update is needed again. `tail_s`: until the rollout ends.

        The learner has slots of its own. So the next rollout needs it, which begins after the passes of the next learn phase. A rollout
        that was cut goes on as soon as the update ends.
        """
        left_s, autoscaler = max(tail_s, self.update_ends_s - time.monotonic()), self.context.autoscaler
        if self.mode.boundary.cuts:
            return left_s
        return left_s + autoscaler.predictor.apart_s(autoscaler.predictor.update_tokens, len(self.step.samples))

    def _generate(self, step: Step) -> None:
        """Generate the missing responses of the step's batch, and set its samples if enough of its groups are complete then."""
        if self.update is None:
            pause, self.pause = self.pause, None
            if pause is not None:
                pause.end()
            samples = self.generate(step)
            if pause is not None and self.stage.restart_s is not None:
                self.context.autoscaler.terms.pause.observe(0.0, pause.seconds + self.stage.restart_s)
        else:
            if not self.stage.pool.working or (found := self._generate_beside_update(step)) is None:
                self._say(step, "no slot is free beside the update, so its rollout begins after it")
                return
            samples = found
        step.samples = self._take_groups(step, samples)

    def generate(self, step: Step, until: Callable[[LiveRollout], bool] = lambda rollout: False) -> list[Sample]:
        """Return all samples of the step's batch, once its groups are complete or `until` says so."""
        assert self.weights is not None
        early = self._early_work(step)
        plugins: list[Plugin] = [*early] if self.context.recipe.functions.elastic else []
        if self.prefix is not None and step.prefixes is not None:
            plugins.append(SendPrefixes(self.prefix, step.prefixes, step))
        samples = self.stage.generate(step, self.weights, plugins, until, self.on_samples)
        for work in early:
            work.finish()
            step.metrics |= work.report()
        return samples

    on_samples: OnSamples = staticmethod(lambda new: None)  # called with samples as they finish

    def _early_work(self, step: Step) -> list[EarlyWork]:
        """Return what scores while engines work, and makes passes. Beside an update this is nothing if responses will be cut."""
        beside, cuts, context = self.update is not None, self.mode.boundary.cuts, self.context
        if not context.recipe.scores or (cuts and self.mode.begins_beside_update):
            return []
        drafters = [] if cuts or beside else self.stage.drafters
        handover_s = 2 * context.autoscaler.terms.warm_start.predict()
        work = EarlyWork(
            self.scoring, self.learn, context.broker, step.batch, beside_update=beside, drafters=drafters, handover_s=handover_s
        )
        return [work]

    def _generate_beside_update(self, step: Step) -> list[Sample] | None:
        """Generate until the step's groups are complete or engines take the update's weights. Returns None if all engines are lost."""
        assert self.update is not None
        with suppress(NoRoom):
            if not self.mode.boundary.cuts:
                return self.generate(step)
            recipe = self.context.recipe  # the rest of an episode cannot be forecast; without importance weights age has no known price
            timing = WeightTiming(
                self.context.autoscaler,
                self.update,
                self.groups.stale_cost.per_version if self.groups.stale_cost.lags else None,
                self.context.most_engines(self.context.autoscaler.engines.width),
                sum(len(rank.leases) for rank in self.learn.worker_group.by_rank),
                can_wait=recipe.functions.elastic and not recipe.agent.is_used and not recipe.algorithm.uncorrected_lag,
            )
            samples = self.generate(step, timing.ends)
            step.metrics |= timing.metrics()
            return samples
        return None

    def _take_groups(self, step: Step, samples: list[Sample]) -> list[Sample]:
        """Return the samples of the groups that the step trains on, and make these its prompts and forecast. Others stay in flight.

        Returns nothing if the rollout was beside an update that ended before enough groups were complete. It goes on then.
        """
        batch, beside = step.batch, self.update is not None
        if beside:
            self.begun = batch.with_samples(samples)
        if batch.cuts:
            self.context.record.completion_order(self.groups.rollout_name(step.number, beside), batch, samples)
            kept = self.stage.kept.take_tokens() if self.stage.kept is not None else 0
            self.groups.count(batch, samples, beside, kept)
        if batch.chosen is None:
            step.batch, self.goes_on = batch.after(samples), True
            return []
        return self.groups.train(step, batch, samples, self.context.autoscaler.terms.prefill.per_unit_s)

    def start_engines(self, step: Step) -> None:
        """Start a planned step's engines under the free leases, without waiting until they have loaded the weights."""
        self.stage.begin(step, self.wait_for_weights())
        self.stage.pool.expect(0 if step.plan.pools else step.plan.actors)  # a plan of pools asks for slots pool by pool

    def _say(self, step: Step, what: str) -> None:
        self.context.record.progress.message(f"step {step.number}: {what}")
