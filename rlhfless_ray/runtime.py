"""A run: its parts, their life, and the stages that `loop.py` calls.

    with Runtime(recipe) as run:
        for step in run:
            print(step.plan.reason, step.metrics["reward/mean"], step.ledger["full_slot_s"])
"""

from __future__ import annotations

import itertools
import platform
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from placement.lengths import Scenarios
from placement.policy import failed, slots_to_yield
from rlhfless_ray.agent.dry import dry_play
from rlhfless_ray.agent.load import AgentSource
from rlhfless_ray.autoscale import Autoscaler, RolloutPlan
from rlhfless_ray.checkpoints import Best, Checkpoints
from rlhfless_ray.crew import Actors, hire
from rlhfless_ray.errors import RunError, Stopped, one_line
from rlhfless_ray.evaluation import evaluate
from rlhfless_ray.first_speed import ANY_SPEED, expected_engine
from rlhfless_ray.functions.cluster import RayCluster
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.models import policy_files, write_models
from rlhfless_ray.phases import Phases
from rlhfless_ray.policy_files import context_tokens, initial_policy, keep_policy, policy_tokenizer
from rlhfless_ray.prefix.stage import StepPrefixes
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.prompts.load import load_prompts
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.record import Record
from rlhfless_ray.refill import Refill
from rlhfless_ray.reward.dry import dry_call
from rlhfless_ray.reward.load import load_reward
from rlhfless_ray.run_folder import RunFolder, check_writable
from rlhfless_ray.run_state import restore, state_of
from rlhfless_ray.site import Site
from rlhfless_ray.stages import Stages
from rlhfless_ray.types import Prompt, Sample, Step, UpdateStats, WeightVersion
from rlhfless_ray.waits import STOP
from rlhfless_ray.weights.folder import parameter_count, read_folder, write_folder

FAILED_SAVE_S = 30.0  # for the learner's state to come, after a failure
LOOK_EVERY_S = 5.0  # for nodes that are gone, where parked processes may have been


class Runtime:
    """Context manager and iterator of Steps. Everything a run holds is released when the block ends, however it ends."""

    def __init__(self, recipe: Recipe, *, resume: bool = False) -> None:
        """Reads and checks everything that can be checked without Ray. Raises UserError for the user's mistakes."""
        self.resume = resume or (recipe.checkpoint.resume and RunFolder.latest(recipe) is not None)
        RunFolder.check_root(recipe)
        self.best = Best(recipe.checkpoint.best_metric)
        if recipe.checkpoint.path:
            check_writable(Path(recipe.checkpoint.path), "checkpoint.path")
            Checkpoints(recipe.checkpoint, Path(recipe.run.root)).check()
        self.files, self.owes_warm_start = initial_policy(recipe)
        self.critic_files = read_folder(Path(recipe.critic.path), "critic.path") if recipe.critic.path else None
        self.tokenizer = policy_tokenizer(recipe, self.files)
        self.prompts = load_prompts(recipe, self.tokenizer, context_tokens(self.files))
        self.reward_source = load_reward(recipe, self.tokenizer)
        if isinstance(self.reward_source, AgentSource):
            dry_play(recipe, self.reward_source, self.prompts.train, self.files)
        dry_call(self.reward_source, self.prompts.train, self.tokenizer, recipe.reward.timeout_s)
        if recipe.save.path:
            check_writable(Path(recipe.save.path), "save.path")
        rows, batch, episodes = len(self.prompts.train), recipe.prompts.batch_prompts, recipe.run.episodes
        self.cursor = Cursor(rows, batch, recipe.prompts.shuffle, recipe.run.seed, ends=episodes is not None)
        if episodes is not None:
            run = recipe.run.model_copy(update={"steps": episodes * self.cursor.batches_per_epoch})
            recipe = recipe.model_copy(update={"run": run})
        self.recipe = recipe
        self.refill = Refill(recipe, self.cursor)
        self.autoscaler = Autoscaler(recipe, ANY_SPEED)
        self.cluster = RayCluster(recipe, parameter_count(self.files))
        self.cursor_done = self.cursor.state()  # after the last finished step: a stop inside a step repeats it whole
        self.steps_done = 0
        self.ahead: Step | None = None  # the next step, with prompts, forecast and plan made while the learner works
        self.weights: WeightVersion | None = None
        self.in_update = False
        self._stack = ExitStack()

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.push(self._tells_what_is_left)
            if self.resume:
                self.folder = RunFolder.resumed(self.recipe)
                stack.enter_context(self.folder.locked())
            stack.enter_context(STOP.listening())
            stack.callback(self.cluster.stop)
            try:
                self.cluster.start()
            except SystemExit:  # what Ray's own handler, in place while it starts, makes of SIGTERM
                raise Stopped(signal.SIGTERM) from None
            STOP.listen()
            STOP.check()
            resource = self.cluster.resource()
            self.slots = self.cluster.check_size(resource)
            if not self.resume:
                self.folder = RunFolder.create(self.recipe)
                stack.enter_context(self.folder.locked())
            self.checkpoints = Checkpoints(self.recipe.checkpoint, self.folder.path)
            checkpoint = self.checkpoints.load() if self.resume else None
            self.steps_done = checkpoint[0] if checkpoint else 0
            self.folder.begin(self.recipe, f"{platform.machine()}, {self.slots} {resource} slots", self.steps_done)
            self.ledger = Ledger(resource)
            self.ledger.name_of = self.cluster.node_name
            self.ledger.resume_from(self.folder.path / "ledger.csv", self.steps_done)
            self.record = Record(self.recipe, self.folder, self.ledger, self.steps_done)
            stack.push(self._ended)
            for note in self.prompts.notes:
                self.record.progress.message(note)
            self.phases = Phases(self.record.progress.phase)
            self.step = Step(self.steps_done)
            self._hire(resource)
            stack.push(self._released)
            self._begin(checkpoint)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[Step]:
        from rlhfless_ray.loop import steps

        return steps(self)

    def actor_classes(self) -> Actors:
        return Actors.real()

    def _hire(self, resource: str) -> None:
        longest = max(len(p.token_ids) for p in itertools.chain(self.prompts.train, self.prompts.heldout))
        crew = hire(
            self.recipe, resource, self.files, longest, self.reward_source, self.ledger, self.folder.path, self.actor_classes()
        )
        engine = expected_engine(self.recipe, self.files, self.cluster.device(resource))
        self.autoscaler.expect(engine)
        if engine.note:
            self.record.progress.message(engine.note)
        self.leases, self.rollout, self.reward, self.gang = crew.leases, crew.rollout, crew.reward, crew.gang
        most = min(self.recipe.rollout.max_actors, sum(self.leases.matching(self.recipe.rollout.nodes).values()))
        self.site = Site(self.recipe, self.ledger, self.leases, self.phases, self.record, self.autoscaler, most)
        self.stages = Stages.of(
            self.site, crew, self.files, longest, self.reward_source, self.tokenizer, private=self.cluster.private
        )
        self.rollout_stage, self.score_stage, self.learn_stage = self.stages.rollout, self.stages.score, self.stages.learn

    def _begin(self, checkpoint: tuple[int, dict[str, bytes], dict[str, Any]] | None) -> None:
        """Start the learner, and the engines' processes beside it; publish the first weights."""
        import ray

        from rlhfless_ray.functions.lease import places

        with self.phases.phase("start", "starting the learner"):
            self.site.spare = self.gang.staff([])
            home = self.gang.by_rank[0].slot
            if self.leases.resource == "cpu":  # on GPU a guess: the device is known with the lease only
                for slot in places(self.leases.matching(self.recipe.rollout.nodes), home.node, self.site.max_actors):
                    self.rollout.prewarm(slot)
                if self.learn_stage.gangs.reference is not None:
                    self.learn_stage.gangs.reference.prewarm(home)
            if self.stages.agents is None:
                self.reward.prewarm(home)
            if self.owes_warm_start and checkpoint is None:
                self.record.progress.phase("supervised warm start (cached afterwards)")
                self.record.progress.message(f"supervised warm start first: {self.recipe.warm_start.steps} steps, cached afterwards")
                self.files = self.gang.warm_start(ray.put(self.files), self.recipe)
                keep_policy(self.recipe, self.files)
            self.record.progress.phase("loading the policy")
            if self.recipe.keeps_start:  # the reference, or what adapters are for, is what the run began with, also after a resume
                reference = self.folder.path / "reference"
                if checkpoint and reference.is_dir():
                    self.files = read_folder(reference)
                else:
                    write_folder(reference, self.files)
            state = checkpoint[1] if checkpoint else None
            self.gang.build(lambda: ray.put(self.files), self.cluster.private, ray.put(state) if state else None)
            if checkpoint:
                restore(self, checkpoint[2])
                self._end_with_the_prompts(self.steps_done)
            self.weights = self.gang.publish(self.steps_done)
            self.site.spare += self.gang.park()
            self.learn_stage.gangs.open_critic(self.critic_files or self.files, self.cluster.private, state)
            self.learn_stage.gangs.open_reference(self.files, self.cluster.private)
            if self.stages.agents is not None:
                self.stages.agents.check()
        if checkpoint is None:
            self._save()  # a stop at any later moment finds something to resume from

    # ---- the stages, in the order of the loop -----------------------------------------------------------------

    def numbers(self) -> Iterator[int]:
        """Of the steps to come."""
        while self.steps_done < self.recipe.run.steps:
            yield self.steps_done + 1

    def begin_step(self, number: int) -> Step:
        STOP.check()
        if self.ahead is None or self.ledger.step != number:  # else its engines work already
            self.ledger.cut(number)
            self.first_row = self.ledger.count
        self.leases.waited_s = 0.0
        self.step, self.ahead = self.ahead or Step(number), None
        return self.step

    def next_prompts(self, step: Step) -> list[Prompt]:
        return step.prompts or [self.prompts.train[i] for i in self.cursor.next(self.refill.first)]

    def forecast(self, step: Step) -> Scenarios:
        return step.forecast or self.autoscaler.forecast(step.prompts, step.number)

    def plan(self, step: Step) -> RolloutPlan:
        if step.plan is not None:
            return step.plan
        plan = self.autoscaler.plan(
            step.forecast, step.prompts, self.site.max_actors, step=step.number, warm=self.rollout_stage.warm
        )
        if failed(plan.decision):
            self.record.progress.message(f"step {step.number}: {plan.reason}")
        return plan

    def prefill(self, step: Step) -> StepPrefixes | None:
        assert self.weights is not None
        self.weights = self.learn_stage.gangs.safe(self.weights)
        return self.rollout_stage.prefill(step, self.weights)

    def rollout_phase(self, plan: RolloutPlan) -> AbstractContextManager[None]:
        assert self.weights is not None
        return self.rollout_stage.phase(plan, self.weights)

    def generate(self, step: Step) -> list[Sample]:
        assert self.weights is not None
        return self.rollout_stage.generate(step, self.weights)

    def score_phase(self) -> AbstractContextManager[None]:
        return self.score_stage.phase()

    def score(self, samples: list[Sample]) -> int:
        return self.score_stage.score(samples, self.step.number)

    def refill_groups(self, step: Step) -> None:
        """Groups that teach nothing are left out, others take their place; without algorithm.filter_range all stay."""
        step.answers = step.samples
        asked = list(step.prompts)

        def answer(rows: list[int]) -> list[Sample]:
            more = Step(step.number, [self.prompts.train[i] for i in rows], list(asked))
            asked.extend(more.prompts)
            more.forecast = self.forecast(more)
            more.plan = self.plan(more)
            with self.rollout_phase(more.plan):
                more.samples = self.generate(more)
            with self.score_phase():
                self.score(more.samples)
            self.autoscaler.observe_samples(more.prompts, more.samples)
            return more.samples

        try:
            step.samples = self.refill.fill(step.answers, answer)
        except RunError:
            self.record.samples(step.number, self.refill.dropped, "dropped")
            raise
        step.metrics |= self.refill.metrics()

    def advantages(self, samples: list[Sample]) -> Batch:
        return self.learn_stage.advantages(samples)

    def learn_phase(self) -> AbstractContextManager[None]:
        return self.learn_stage.phase(self.step.samples, self.step.number)

    def update(self, batch: Batch) -> UpdateStats:
        self.in_update = True
        stats, sized = self.learn_stage.update(batch, self.step.samples, self._look_ahead)
        self.in_update, self.unrecorded = False, True
        self.quality |= sized
        return stats

    def _look_ahead(self) -> None:
        """While the learner works: write the samples down, learn from their lengths, and plan the next step with what they
        taught."""
        step = self.step
        self.record.samples(step.number, step.samples)
        self.quality = self.record.of_samples(step.samples)
        self.autoscaler.observe_samples(step.prompts, step.answers)
        self.quality |= self.autoscaler.quality(step.forecast, step.answers, step.prompts, self.site.max_actors)
        self.quality["epoch"] = self.cursor.epoch
        if troubles := "; ".join(self.autoscaler.troubles):
            self.autoscaler.troubles.clear()
            self.quality["plan/trouble"] = troubles
            self.record.progress.message(f"step {step.number}: {troubles}; planning goes on without it")
        self.cursor_after = self.cursor.state()
        self._end_with_the_prompts(step.number)
        if step.number < self.recipe.run.steps:
            ahead = Step(step.number + 1)
            ahead.prompts = self.next_prompts(ahead)
            ahead.forecast = self.forecast(ahead)
            ahead.plan = self.plan(ahead)
            ahead.prefixes = self.rollout_stage.weigh(ahead)
            self.ahead = ahead

    def _end_with_the_prompts(self, number: int) -> None:
        """Filtered groups use up an episode's prompts before its number of steps: the step that takes the last one is the last."""
        episodes = self.recipe.run.episodes
        if episodes is not None and self.recipe.algorithm.filter_range is not None and self.cursor.epoch >= episodes:
            self.recipe = self.recipe.model_copy(update={"run": self.recipe.run.model_copy(update={"steps": number})})

    def publish(self, version: int) -> WeightVersion:
        return self.learn_stage.publish(version)

    def evaluation_is_due(self, number: int) -> bool:
        every = self.recipe.evaluate.every_steps
        return number == self.recipe.run.steps or (every > 0 and number % every == 0)

    def evaluate(self) -> dict[str, float]:
        assert self.weights is not None
        self.weights = self.learn_stage.gangs.safe(self.weights)
        return evaluate(self.rollout_stage, self.score_stage, self.prompts.heldout, self.weights, self.step.number)

    def record_evaluation(self, found: dict[str, float]) -> None:
        self.phases.take()
        self.owes_evaluation = False
        self.best.of(found)  # a name that no evaluation has is better told now than in an hour
        self.record.evaluation(self.steps_done, found)

    def end_step(self, step: Step) -> dict[str, float]:
        """Write the step down, learn from it for the next plan, and make room for others on a shared cluster; what the step cost,
        slot-seconds and money. Engines take the next one's weights meanwhile, if there is a next one and nobody else may need their
        leases: a learner whose state is saved, another run, or who computes the KV of prefixes."""
        metric = self.best.of(step.evaluation)
        best = self.best.improved(metric)
        save = best or step.number % self.recipe.checkpoint.every_steps == 0 or step.number == self.recipe.run.steps
        others_wait = not self.cluster.private and self.leases.others_wait()
        prefixes = self.ahead.prefixes if self.ahead is not None else None
        wanted = save or others_wait or (prefixes is not None and prefixes.choice.on)
        costs = self._record(step, begins_next=self.ahead is not None and not wanted)
        if save:
            self._save(metric=metric, best=best, export=True)
        for pool in (self.rollout, self.reward, *([self.stages.prefix.pool] if self.stages.prefix else [])):
            pool.reap(self.autoscaler.keep_warm_s(pool.gaps_s, pool.hold_price), look_every_s=LOOK_EVERY_S)
        spare = self.site.spare
        decision = slots_to_yield(len(spare), 1, others_wait)
        if decision.action == "Release":
            self.leases.release(spare[decision.actors :])
            self.site.spare = spare[: decision.actors]
        return costs

    def _record(self, step: Step, begins_next: bool = False) -> dict[str, float]:
        """The step is done as soon as this is called: a stop from here on saves it. Returns what it cost."""
        self.steps_done, self.cursor_done, self.unrecorded = step.number, self.cursor_after, False
        self.refill_done = self.refill.state()
        seconds, wall_s = self.phases.take()
        self.ledger.cut(step.number + begins_next)
        own = self.ledger.totals_since(self.first_row)
        costs = self.record.costs(own, self.first_row)
        if begins_next:
            self._begin_next()
        self.learn_stage.gangs.keep()
        self.autoscaler.observe_step(seconds, wall_s, len(step.samples))
        self.stages.faults.step_done()
        step.metrics |= {**self.stages.faults.take(), **self.gang.recovery.take_metrics()}
        self.record.step(step, seconds, wall_s, costs | self.quality, self.stages.replacements, self.leases)
        self.record.put_off(self.autoscaler.settle)
        return own

    def _begin_next(self) -> None:
        assert self.ahead is not None and self.weights is not None
        self.first_row = self.ledger.count
        self.weights = self.learn_stage.gangs.safe(self.weights)
        self.rollout_stage.begin(self.ahead, self.weights)
        self.rollout.expect(self.ahead.plan.actors)

    def finish(self) -> None:
        write_models(self)
        self.finished = True

    # ---- state ------------------------------------------------------------------------------------------------

    def _save(
        self, deadline_s: float | None = None, *, metric: tuple[str, float] | None = None, best: bool = False, export: bool = False
    ) -> None:
        """`metric`: of this step's evaluation; `best`: it is the best so far; `export`: a model folder may be written too."""
        self.record.catch_up()  # or whoever resumes would lack rows of the ledger
        learner, state = self.learn_stage.gangs.snapshot(deadline_s), state_of(self)
        model = policy_files(self, learner) if export else None
        self.checkpoints.save(self.steps_done, learner, state, metric, model)
        if best and metric is not None:
            self.checkpoints.save_best(self.steps_done, learner, state, metric, policy_files(self, learner))
        if self.recipe.checkpoint.resumable:
            self.learn_stage.gangs.saved(lambda: self.checkpoints.load()[1])
        self.saved = self.steps_done
        self.record.checkpointed()

    # ---- the end ----------------------------------------------------------------------------------------------

    saved = -1  # the step of the newest checkpoint
    refill_done: list[dict[str, Any]] = []  # noqa: RUF012, groups left over after the last finished step
    unrecorded = False  # the learner has made a step that is not written down yet
    owes_evaluation = True
    finished = False

    def _released(self, kind: Any, error: Any, trace: Any) -> None:
        """Save what can be saved, end every process, give back every lease."""
        try:
            if isinstance(error, Stopped) or (error is None and not self.finished):
                self._save_last_step(hurry=isinstance(error, Stopped) and error.signal_number == signal.SIGTERM)
            elif error is not None:
                self._save_what_is_kept()
        except Exception as failure:  # the checkpoint before stands; the leases must go all the same
            self.record.progress.message(f"no checkpoint at the stop: {one_line(failure, 300)}")
        finally:
            self.folder.end(*self._outcome(error))  # before any word to Ray: it may be gone, and an answer take a minute
            self.stages.close()
            self.leases.release_all()
            self.weights = None  # the last reference: its arrays lie on a node, which is not idle while they do
            self.learn_stage.gangs.forget()

    def _save_last_step(self, hurry: bool) -> None:
        """The last whole step, if it is not saved yet. `hurry`: whoever asked for the stop kills soon."""
        STOP.obeyed()
        if self.in_update:
            self.record.progress.message("stopped inside an update: the checkpoint before it stands")
            return
        if self.unrecorded:
            self.owes_evaluation = self.evaluation_is_due(self.step.number) and not self.step.evaluation
            self._record(self.step)
        if self.weights is not None and self.saved != self.steps_done:  # no weights yet: the learner was not built
            self._save(self.recipe.run.sigterm_s * 2 / 3 if hurry else None)

    def _save_what_is_kept(self) -> None:
        """After a failure: the last whole step, if it is not saved yet and its state lies outside of the learner, which may be what
        failed. Nothing is started anew for it."""
        if self.weights is None or self.unrecorded or self.saved == self.steps_done or not self.learn_stage.gangs.kept_now:
            return
        self._save(FAILED_SAVE_S)
        self.record.progress.message(f"step {self.steps_done} is saved: --resume goes on from there")

    def _outcome(self, error: Any) -> tuple[str, str]:
        """Status and reason for status.json."""
        if error is None:
            left = f"the loop was left after step {self.steps_done} of {self.recipe.run.steps}"
            return ("done", "") if self.finished else ("stopped", left)
        return "stopped" if isinstance(error, (Stopped, KeyboardInterrupt, GeneratorExit)) else "failed", str(error)

    def _ended(self, kind: Any, error: Any, trace: Any) -> None:
        self.record.close(*self._outcome(error))

    def _tells_what_is_left(self, kind: Any, error: Any, trace: Any) -> None:
        folder = getattr(self, "folder", None)  # a stop may come before there is one
        if isinstance(error, Stopped) and folder is not None:
            error.resumable = bool(Checkpoints(self.recipe.checkpoint, folder.path).list())
