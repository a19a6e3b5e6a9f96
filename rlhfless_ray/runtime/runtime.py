"""A training run: its setup and its end.

with Runtime(recipe) as run:
    for step in run:
        print(step.plan.reason, step.metrics["reward/mean"], step.ledger["full_slot_s"])
"""

from __future__ import annotations

import gc
import platform
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import ray

from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.initial_speed import ANY_SPEED, ExpectedEngine, expected_widths
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.disk_space import FULL, DiskFull
from rlhfless_ray.common.errors import Stopped, UserError, one_line
from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.engine.engine_settings import check_kernels
from rlhfless_ray.functions.cluster_nodes import node_slots
from rlhfless_ray.functions.lease import Slot, places
from rlhfless_ray.functions.pool_client import PoolClient, join_pool
from rlhfless_ray.learn.colocation import of_learner
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.memory_watch import MemoryWatch
from rlhfless_ray.loop import steps
from rlhfless_ray.preflight.memory_check import check_ahead, check_on, room_ahead
from rlhfless_ray.preflight.memory_fit import fit, models_with
from rlhfless_ray.preflight.memory_needs import least_mb
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.prompts.load_prompts import PromptSet, load_prompts
from rlhfless_ray.recipe import ObjectiveConfig, Recipe
from rlhfless_ray.recipe.changes import Changes, changes
from rlhfless_ray.recipe.without_effect import without_effect
from rlhfless_ray.report.run_view import RunView
from rlhfless_ray.run.checkpoint_files import DamagedCheckpoint
from rlhfless_ray.run.checkpoints import Best, Checkpoints, swap_folder
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.run.folder import RunFolder, check_writable
from rlhfless_ray.run.recorder import RunRecorder
from rlhfless_ray.runtime.agreement import Agreement
from rlhfless_ray.runtime.checkpointed_run import StepsDone
from rlhfless_ray.runtime.run_inputs import checksums_of, read_inputs
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.runtime.step_operations import StepOperations
from rlhfless_ray.runtime.worker_pools import ActorClasses, create_worker_pools, make_leases
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.step import Step
from rlhfless_ray.weights.known_differences import check_engines
from rlhfless_ray.weights.load_policy import cache_policy, cached_folder, context_tokens
from rlhfless_ray.weights.model_folder import config_of, parameter_count, read_folder
from rlhfless_ray.weights.remote_folder import StoredFiles, writer
from rlhfless_ray.weights.same_model import check_same_model
from rlhfless_ray.weights.tensor_file import Files

Resume = bool | Literal["previous"]
Checkpoint = tuple[int, StoredFiles, dict[str, Any]]  # step, the learner's files, the driver's state
FAILED_SAVE_S = 30.0  # timeout for the learner's state after a failure


class Runtime(StepOperations):
    """A training run, as a context manager and an iterator over its steps.

    Entering starts or joins Ray and creates the pools. Iterating trains and yields one `Step` at a time. Leaving the block saves,
    releases every lease and ends every process of the run, however the block ends. After a `break` a checkpoint is saved first.

    Args:
        recipe: The recipe.
        resume: Continue the newest run of this name from its checkpoint, or with `"previous"` from the one before that.
        resume_changed: Continue it although the recipe changes what is learned or counted.

    Raises:
        UserError: For mistakes in the recipe, the data or the files it names. The constructor finds those that need no Ray.

    Examples:
        >>> from rlhfless_ray import Recipe, Runtime
        >>> short = ["run.steps=2", "warm_start.steps=0", "watch.progress=off", "watch.wandb=off"]
        >>> recipe = Recipe.load("recipes/quickstart.yaml", short)
        >>> with Runtime(recipe) as run:
        ...     for step in run:
        ...         print(step.number, len(step.samples) > 0, step.ledger["full_slot_s"] > 0)
        1 True True
        2 True True
    """

    previous = False  # whether to resume from the checkpoint before the newest
    resume_changed = False
    contents: Mapping[str, str] = MappingProxyType({})  # key → checksum of what it names, see `recipe.changes`
    changes = Changes()  # since the checkpoint

    def __init__(self, recipe: Recipe, *, resume: Resume = False, resume_changed: bool = False) -> None:
        """Read and check everything that can be checked without Ray."""
        Recipe.check_type(recipe)
        recipe.check_values()
        self.given = recipe  # before a run decides some settings
        self.previous, self.resume_changed = resume == "previous", resume_changed
        self.resume = bool(resume) or (recipe.checkpoint.resume and RunFolder.latest(recipe) is not None)
        RunFolder.check_root(recipe)
        self.best = Best(recipe.checkpoint.best_metric)
        if recipe.checkpoint.path:
            check_writable(Path(recipe.checkpoint.path), "checkpoint.path")
            Checkpoints(recipe.checkpoint, Path(recipe.run.root)).check()
        find_room = cache(partial(room_ahead, recipe))
        check_ahead(recipe, find_room=find_room)
        recipe, inputs = read_inputs(recipe, self._load_prompts, computes=self.actor_classes().computes)
        self.inputs, self.contents = inputs, checksums_of(recipe, inputs)
        if recipe.save.path:
            check_writable(Path(recipe.save.path), "save.path")
        rows, batch, episodes = len(inputs.prompts.train), recipe.prompts.batch_prompts, recipe.run.episodes
        mixes = recipe.rollout.partial != "off"  # groups outlive the end of an episode, and only the last step has fewer prompts
        self.cursor = Cursor(
            rows,
            batch,
            recipe.prompts.shuffle,
            recipe.run.seed,
            stops_at_epoch_end=episodes is not None and not mixes,
            checksum=inputs.prompts.checksum("prompt" if recipe.prompts.task else recipe.prompts.prompt_column),
        )
        if episodes is not None:
            steps = -(-episodes * rows // batch) if mixes else episodes * self.cursor.batches_per_epoch
            recipe = recipe.with_settings({"run.steps": steps})
        config, parameters = config_of(inputs.files), parameter_count(inputs.files)
        self.memory_fit = fit(recipe, models_with(recipe, config, parameters), find_room, inputs.lengths)
        self.recipe = recipe = self.memory_fit.recipe
        self.dynamic_sampling = DynamicSampling(recipe, self.cursor)
        self.groups = GroupsInFlight(recipe)
        self.least_mb: dict[str, float] = {}
        self.autoscaler = Autoscaler(recipe, ANY_SPEED)
        self.cluster = RayCluster(recipe, parameters, architectures=config.get("architectures") or ())
        self.shared_pool: PoolClient | None = None  # with the slots of all runs of the cluster, see `cluster.pool`
        self.done = StepsDone(self.cursor.state())
        self._steps: Iterator[Step] | None = None
        self._stack = ExitStack()

    # ---- setup ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.push(self._raise_reported_error)
            if self.resume:
                self.folder = self._folder_to_resume()
                self.folder.check_resumable()
                stack.enter_context(self.folder.locked())
                checkpoint = self._open_folder()
            stack.enter_context(self.cluster.running())
            resource = self.cluster.resource()
            self.slots = self.cluster.check_size(resource)
            check_kernels(self.recipe, resource)
            config, lengths = config_of(self.inputs.files), self.inputs.lengths
            check_engines(self.recipe, config, resource)
            note = check_on(self.cluster, resource, self.recipe, lengths)
            if resource == "cpu":
                self.least_mb = least_mb(self.recipe, config, parameter_count(self.inputs.files), lengths)
            if not self.resume:
                self.folder = RunFolder.create(self.recipe)
                stack.enter_context(self.folder.locked())
                checkpoint = self._open_folder()
            if not self.cluster.private and self.recipe.cluster.pool:
                self.shared_pool = self._join_pool(resource)
                stack.callback(self.shared_pool.close)
            stack.enter_context(self.cluster.writes_last_words(self.folder.path, self.folder.leave_status))
            stack.push(self._end_folder)
            state = checkpoint[2] if checkpoint else {}
            resume_notes = self._begin_resume() if checkpoint else []
            machine = f"{platform.machine()}, {self.slots} {resource} slots"
            self.folder.begin(self.recipe, machine, self.steps_done, self.changes, state.get("recipe"))
            self.leases = make_leases(self.recipe, resource, self.folder.path, self.cluster.node_name, self.shared_pool)
            self.ledger = self.leases.ledger
            resume_notes += self.ledger.resume_from(self.folder.path / "ledger.csv", self.steps_done, state.get("ledger_rows", 0))
            self.record = RunRecorder(self.recipe, self.folder, self.ledger, self.steps_done)
            stack.push(self._close_record)
            shows_memory = self.record.progress.mode != "off" or self.memory_fit.reason
            memory = self.memory_fit.statement(self.least_mb, resource) if shows_memory else ""
            notes = [memory, *self.inputs.prompts.notes, note, self.inputs.speculation_note, self.memory_fit.note]
            notes.append(self.folder.deletion_note(self.recipe))
            for message in filter(
                None, [*resume_notes, self.recipe.untrained_note, self.recipe.exact_note, *self.settings_without_effect(resource), *notes]
            ):
                self.record.progress.message(message)
            self.phases = StepTimer(self.record.progress.phase)
            self.step = Step(self.steps_done)
            self._create_stages(resource)
            stack.push(self._shut_down)
            self.memory = MemoryWatch(private=self.cluster.private, job=ray.get_runtime_context().get_job_id())
            stack.callback(self.memory.close)
            self._start(checkpoint)
            gc.collect()
            gc.freeze()  # otherwise a full collection every other step scans all that is imported: 0.07 s, on busy cores 0.4 s
            stack.callback(gc.unfreeze)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[Step]:
        """Return the run's only iterator: a second loop continues where the first one was left."""
        if self._steps is None:
            if not hasattr(self, "session"):
                raise UserError("Runtime: the run has not started; iterate within `with Runtime(recipe) as run:`")
            if not self.owes_evaluation:
                self.leave_out_start()
            self._steps = steps(self)
        return self._steps

    def settings_without_effect(self, resource: str) -> list[str]:
        """Return messages for the user about settings of the recipe that reach nothing."""
        return list(without_effect(self.given, resource, private=self.cluster.private))

    @property
    def objective(self) -> ObjectiveConfig:
        """The objective that chooses plans. Set it between steps, also to a dict of its keys. It applies from the next plan on.

        A step that is planned already keeps its plan. A resumed run has its recipe's objective again.
        """
        return self.recipe.objective

    @objective.setter
    def objective(self, value: ObjectiveConfig | dict[str, Any]) -> None:
        tree = value if isinstance(value, dict) else value.model_dump(mode="json")
        changed = self.recipe.parse({**self.recipe.model_dump(mode="json"), "objective": tree}, where="run.objective")
        self.recipe = self.recipe.model_copy(update={"objective": changed.objective})
        self.autoscaler.set_objective(changed.objective)

    def _repr_html_(self) -> str:
        """Show the run so far in a notebook, before, while and after it is trained."""
        return RunView.read(self.folder.path)._repr_html_() if hasattr(self, "folder") else f"<pre>{escape(self.recipe.to_yaml())}</pre>"

    def _load_prompts(self, recipe: Recipe, tokenizer: Any, files: Files) -> PromptSet:
        return load_prompts(recipe, tokenizer, context_tokens(files))

    def _folder_to_resume(self) -> RunFolder:
        return RunFolder.resumed(self.recipe, self._check_state, previous=self.previous)

    def _check_state(self, state: dict[str, Any], folder: RunFolder) -> None:
        """Find what has changed since a checkpoint. Raises UserError if the run cannot go on from it."""
        before = state.get("recipe") or folder.recipe_before()
        if before is not None:
            self.changes = changes(before, self.recipe, state.get("contents"), self.contents)
            self.changes.check(folder.path, state.get("step", 0), accepted=self.resume_changed)
        try:
            int(state["cursor"]["taken"])
        except (KeyError, TypeError, ValueError):
            raise DamagedCheckpoint(folder.path, "has a checkpoint whose driver.json names no place in the prompts") from None
        if not self.resume_changed:
            self.cursor.check(state["cursor"])

    def _begin_resume(self) -> list[str]:
        """Set aside what is newer than the chosen checkpoint. Returns messages for the user about this checkpoint and what has changed."""
        aside = self.checkpoints.set_aside_after(self.steps_done) if self.previous else ""
        return [self.checkpoints.note, aside, *self.changes.said(self.steps_done)]

    def _open_folder(self) -> Checkpoint | None:
        """Read what the run folder has of earlier steps."""
        self.checkpoints = Checkpoints(self.recipe.checkpoint, self.folder.path)
        checkpoint = self.checkpoints.load(previous=self.previous) if self.resume else None
        if checkpoint:  # before the folder is changed: a refused resume leaves a finished run as it was
            check_same_model(checkpoint[2].get("model", {}), self.inputs.files)
            self._check_state(checkpoint[2], self.folder)
        self.steps_done = checkpoint[0] if checkpoint else 0
        return checkpoint

    def _can_resume(self, folder: Path) -> bool:
        return bool(Checkpoints(self.recipe.checkpoint, folder).list())

    def actor_classes(self) -> ActorClasses:
        return ActorClasses.real(self.given.rollout.engine)

    session_class: type[RolloutSession] = RolloutSession

    def _join_pool(self, resource: str) -> PoolClient:
        """Join the slots that the runs of the cluster share. A run that is refused leaves no folder."""
        recipe = self.recipe
        ranks, engines = recipe.learner.ranks, recipe.rollout.min_actors * recipe.rollout.least_width
        least = max(ranks + engines if self.rolls_out_ahead else max(ranks, engines), recipe.reward.tensor_parallel)
        say = lambda text: self.record.progress.message(text)  # noqa: E731 - the record is created later
        return join_pool(recipe.cluster, recipe.price, resource, least, self.folder.path, not self.resume, say)

    def _create_stages(self, resource: str) -> None:
        chooses_width = self.recipe.rollout.tensor_parallel == "auto"
        engines, note = self._expect_engines(resource)
        worker_pools = create_worker_pools(
            self.recipe,
            self.leases,
            self.inputs,
            self.actor_classes(),
            self.record.progress.message,
            give_back_at_once=self.memory_fit.give_back_at_once,
        )
        self.autoscaler.expect(engines, note)
        worker_pools.rollout.set_width(self.autoscaler.engines.width)
        for message in {engine.note: 0 for engine in engines.values() if engine.note}:
            self.record.progress.message(message)
        self.broker, self.rollout, self.reward, self.worker_group = (
            worker_pools.broker,
            worker_pools.rollout,
            worker_pools.reward,
            worker_pools.worker_group,
        )
        if self.shared_pool is not None:
            self.autoscaler.bids = MarketBids(self.shared_pool, self.autoscaler.objective, self.recipe.learner.ranks)
        rollout = self.recipe.rollout
        most = {width: rollout.max_actors // (width if chooses_width else 1) for width in engines}
        self.context = RunContext(
            self.recipe,
            self.ledger,
            worker_pools.broker,
            self.phases,
            self.record,
            self.autoscaler,
            partial(worker_pools.engine_nodes.limits, most, rollout.min_actors),
        )
        self.stages = Stages.of(self.context, worker_pools, self.inputs, private=self.cluster.private)
        computes = self.actor_classes().computes
        self.agreement = Agreement(self.context, self.stages.learn.worker_groups, self.rollout) if computes else None
        self.rollout_stage, self.score_stage, self.learn_stage = self.stages.rollout, self.stages.score, self.stages.learn
        source = PromptSource(self.inputs.prompts.train, self.cursor, self.dynamic_sampling, self.recipe.run.episodes)
        stages = self.rollout_stage, self.learn_stage, self.score_stage, self.stages.prefix
        self.session = self.session_class(self.context, source, self.groups, *stages, self._accounted)

    def _expect_engines(self, resource: str) -> tuple[dict[int, ExpectedEngine], str]:
        """Return what is expected of engines by width, and why there is one width only. An automatic width without a choice is set."""
        rollout = self.recipe.rollout
        largest_node = max(node_slots(resource, rollout.nodes).values(), default=0)
        device, tokens = self.cluster.device(resource), self.recipe.longest_tokens(self.inputs.lengths.longest_prompt)
        engines, note = expected_widths(self.recipe, self.inputs.files, device, largest_node, tokens)
        if not self.cluster.private:  # larger nodes may join, for wider engines
            later, why = expected_widths(self.recipe, self.inputs.files, device, rollout.max_actors, tokens)
            engines, note = (later, why) if next(iter(later)) == next(iter(engines)) else (engines, note)
        if rollout.tensor_parallel == "auto" and len(engines) == 1:
            self.recipe = self.recipe.with_settings({"rollout.tensor_parallel": next(iter(engines))})
        return engines, note

    def _start(self, checkpoint: Checkpoint | None) -> None:
        """Start the learner and the engines' processes, and publish the first weights."""
        with self.phases.phase("start", "starting the learner"):
            self.broker.staff(self.worker_group)
            self._prewarm(self.worker_group.by_rank[0].slot)
            if self.inputs.owes_warm_start and checkpoint is None:
                self.record.progress.phase("supervised warm start (cached afterwards)")
                self.record.progress.message(f"supervised warm start first: {self.recipe.warm_start.steps} steps, cached afterwards")
                self.inputs.files = self.worker_group.warm_start(ray.put(self.inputs.files), self.recipe)
                cache_policy(self.recipe, self.inputs.files)
            self.record.progress.phase("loading the policy")
            if self.recipe.keeps_start:  # reference and adapters need the initial policy, also after a resume
                reference = self.folder.path / "reference"
                if checkpoint and reference.is_dir():
                    self.inputs.files = read_folder(reference)
                else:
                    swap_folder(reference, writer(self.inputs.files))
            state = checkpoint[1] if checkpoint and checkpoint[1].files else None  # the first checkpoint of a given policy has no state
            policy = StoredFiles(self._policy_folder(), self.inputs.files)
            self.worker_group.build(policy, self.cluster.private, state and of_learner(state))
            if checkpoint:
                self._restore_driver(checkpoint[2])
                self.learn_stage.restore_files(checkpoint[1].files)
                self.rollout_stage.restore_files(checkpoint[1].files)
                self._end_when_prompts_are_used_up(self.steps_done)
            self.weights = self.worker_group.publish(self.steps_done)
            self.broker.put(self.worker_group.park())
            critic, other = self.inputs.critic_files, self.inputs.reference
            of_critic = policy if critic is None else StoredFiles(Path(self.recipe.critic.path), critic)
            groups = self.learn_stage.worker_groups
            groups.open_critic(of_critic, self.cluster.private, state)
            of_reference = policy if other is None else StoredFiles(other, read_folder(other))
            groups.open_reference(of_reference, self.cluster.private)
            for group in filter(None, (groups.learner, groups.reference, groups.critic)):
                for note in group.notes:
                    self.record.progress.message(note, once=True)
            if self.stages.agents is not None:
                self.stages.agents.check()
        if checkpoint is None:
            self._save(learned=not self.recipe.policy.path)  # so that a stop at any later moment can be resumed

    def _prewarm(self, home: Slot) -> None:
        """Start processes ahead of their leases, on the learner's node first. On GPU only the learner's devices are known by then."""
        nodes, most = self.leases.nodes.slots(self.recipe.rollout.nodes), self.context.most_engines(self.rollout.width)
        if self.leases.resource == "gpu" and self.rollout.width == 1:  # several devices of one engine may be others
            slots = dict.fromkeys(instance.slot for instance in self.worker_group.by_rank if instance.slot.node in nodes)
            for slot in list(slots)[:most]:
                self.rollout.prewarm(slot)
        elif self.leases.resource == "cpu":
            engines = {node: slots // self.rollout.width for node, slots in nodes.items()}
            for slot in places(engines, home.node, most):
                self.rollout.prewarm(slot)
            if self.learn_stage.worker_groups.reference is not None:
                self.learn_stage.worker_groups.reference.prewarm(home)
            if self.rollout_stage.drafter is not None:
                self.rollout_stage.drafter.prewarm(home)
        if self.stages.agents is None:
            self.reward.prewarm(home)

    def _policy_folder(self) -> Path | None:
        """Return the folder that the initial policy's files are in, if they are on disk."""
        if self.recipe.keeps_start:
            return self.folder.path / "reference"
        path = self.recipe.policy.path
        return cached_folder(path) if path else None

    # ---- the end --------------------------------------------------------------------------------------------------

    def _shut_down(self, kind: Any, error: Any, trace: Any) -> None:
        """Save what can be saved, end every process, give back every lease."""
        try:
            if isinstance(error, Stopped) or (error is None and not self.finished):
                self._save_last_step(hurry=isinstance(error, Stopped) and error.signal_number == signal.SIGTERM)
            elif error is not None and not self._has_no_space(error):
                self._save_kept_state()
        except Exception as failure:  # the last checkpoint remains valid, and the leases must be released anyway
            self.record.progress.message(f"no checkpoint at the stop: {one_line(failure, 300)}")
        finally:
            with ExitStack() as stack:  # from the last to the first, each of them also if one before it fails
                stack.callback(self._forget)
                stack.callback(self.leases.release_all)
                stack.callback(self.stages.close)
                self.folder.end(*self._outcome(error))  # before any call to Ray: if Ray is gone, it may take a minute to return

    def _forget(self) -> None:
        """Drop the last references to objects: a node that holds any is not idle."""
        self.weights = None
        self.learn_stage.worker_groups.forget()

    def _has_no_space(self, error: Any) -> bool:
        """Return whether a checkpoint failed for lack of space: another one would fail too."""
        return isinstance(error, DiskFull) and self.checkpoints.folder in (error.path, *error.path.parents)

    def _save_last_step(self, hurry: bool) -> None:
        """Save the last finished step unless it is saved. `hurry`: the process will be killed soon."""
        STOP.acknowledge()
        if self.session.update is not None:
            self.record.progress.message("stopped inside an update: the last checkpoint remains valid")
            return
        if self.unrecorded:
            self.owes_evaluation = self.evaluation_is_due(self.step.number) and not self.step.evaluation
            self.close_step(self.step)
            self._write_row(self.step)
        if self.weights is not None and self.saved != self.steps_done:  # no weights yet: the learner was not built
            self._save(self.recipe.run.sigterm_s * 2 / 3 if hurry else None)

    def _save_kept_state(self) -> None:
        """Save the last finished step after a failure, unless it is saved or its state is only in the learner, which may have failed."""
        if self.weights is None or self.unrecorded or self.saved == self.steps_done or not self.learn_stage.worker_groups.kept_now:
            return
        while self.record.later:
            with suppress(DiskFull):  # the checkpoint is more important than rows
                self.record.catch_up()
        self._save(FAILED_SAVE_S)
        self.record.progress.message(f"step {self.steps_done} is saved: --resume continues from there")

    def _outcome(self, error: Any) -> tuple[str, str]:
        """Return status and reason for status.json."""
        if error is None:
            left = f"the loop was left after step {self.steps_done} of {self.recipe.run.steps}"
            return ("done", "") if self.finished else ("stopped", left)
        return "stopped" if isinstance(error, (Stopped, KeyboardInterrupt, GeneratorExit)) else "failed", str(self._reported_error(error))

    def _end_folder(self, kind: Any, error: Any, trace: Any) -> None:
        """Write the status of a run that ended before it had a recorder."""
        if error is not None and self.folder.status.get("status") == "running":
            self.folder.end(*self._outcome(error))

    def _close_record(self, kind: Any, error: Any, trace: Any) -> None:
        self.record.close(*self._outcome(error))

    def _raise_reported_error(self, kind: Any, error: Any, trace: Any) -> None:
        reported = self._reported_error(error)
        if reported is not error:
            raise reported from error

    def _reported_error(self, error: Any) -> Any:
        """Return the error to report. A stop or a full disk says whether there is a checkpoint to continue from."""
        folder = getattr(self, "folder", None)  # a stop may come before there is one
        if isinstance(error, OSError) and error.errno in FULL:  # raised by a library
            error = DiskFull(Path(error.filename or (folder.path if folder is not None else self.recipe.run.root)))
        if isinstance(error, (Stopped, DiskFull)):
            error.resumable = folder is not None and self._can_resume(folder.path)
        return error
