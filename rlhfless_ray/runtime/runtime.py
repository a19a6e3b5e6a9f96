"""A training run: its setup and its end.

with Runtime(recipe) as run:
    for step in run:
        print(step.plan.reason, step.metrics["reward/mean"], step.ledger["full_slot_s"])
"""

from __future__ import annotations

import gc
import platform
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import ray

from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.initial_speed import ANY_SPEED, ExpectedEngine, expected_widths
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.disk_space import FULL, DiskFull
from rlhfless_ray.common.errors import Stopped, UserError, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.step_timer import StepTimer
from rlhfless_ray.engine.engine_settings import check_kernels
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.engine_pools import EnginePools
from rlhfless_ray.functions.pool_client import PoolClient, join_pool
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.memory_watch import MemoryWatch, memory_metrics
from rlhfless_ray.loop import steps
from rlhfless_ray.preflight.memory_check import check, cluster_room
from rlhfless_ray.preflight.rank_layouts import in_layout, rank_layouts
from rlhfless_ray.prompts.load_prompts import PromptSet, load_prompts
from rlhfless_ray.recipe import ObjectiveConfig, Recipe
from rlhfless_ray.recipe.changes import Changes, changes
from rlhfless_ray.recipe.without_effect import without_effect
from rlhfless_ray.report.run_view import RunView
from rlhfless_ray.run.checkpoint_files import DamagedCheckpoint
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.run.folder import RunFolder, check_writable
from rlhfless_ray.run.recorder import RunRecorder
from rlhfless_ray.runtime.evaluation import Evaluations
from rlhfless_ray.runtime.export import write_models
from rlhfless_ray.runtime.image_store import in_object_store
from rlhfless_ray.runtime.run_inputs import read_inputs
from rlhfless_ray.runtime.run_parts import RunParts
from rlhfless_ray.runtime.saved_state import SavedState
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.runtime.start_run import Checkpoint, start_learner
from rlhfless_ray.runtime.step_records import MemoryOfStep, StepRecords
from rlhfless_ray.runtime.updates import Updates
from rlhfless_ray.runtime.worker_pools import ActorClasses, make_leases
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.step import Step
from rlhfless_ray.weights.known_differences import check_engines
from rlhfless_ray.weights.load_policy import context_tokens
from rlhfless_ray.weights.model_folder import config_of, parameter_count
from rlhfless_ray.weights.same_model import check_same_model
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Resume = bool | Literal["previous"]
ErrorType = type[BaseException] | None


class Runtime:
    """A training run, as a context manager and an iterator over its steps.

    Entering starts or joins Ray and creates the pools. Iterating trains and yields one `Step` at a time. Leaving the block saves,
    releases every lease and ends every process of the run, however the block ends. After a `break` a checkpoint is saved first.
    Another loop than the one of iterating can be written with the run's `parts`, see docs/own-loop.md.

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

    parts: RunParts  # inside the block
    folder: RunFolder
    changes = Changes()  # since the checkpoint

    def __init__(self, recipe: Recipe, *, resume: Resume = False, resume_changed: bool = False) -> None:
        """Read and check everything that can be checked without Ray."""
        Recipe.check_type(recipe)
        recipe.check_values()
        self.given = recipe  # before a run decides some settings
        self.previous, self.resume_changed = resume == "previous", resume_changed
        RunFolder.check_root(recipe, resumes=bool(resume) or recipe.checkpoint.resume)
        self.resume = bool(resume) or (recipe.checkpoint.resume and RunFolder.latest(recipe) is not None)
        self.steps_done = 0  # at the start
        if recipe.checkpoint.path:
            check_writable(Path(recipe.checkpoint.path), "checkpoint.path")
            Checkpoints(recipe.checkpoint, Path(recipe.run.root)).check()
        self.recipe, self.inputs = read_inputs(recipe, self._load_prompts, computes=self.actor_classes().computes)
        self.autoscaler = Autoscaler(self.recipe, ANY_SPEED)
        architectures = config_of(self.inputs.files).get("architectures") or ()
        self.cluster = RayCluster(self.recipe, parameter_count(self.inputs.files), architectures=architectures)
        self.shared_pool: PoolClient | None = None  # with the slots of all runs of the cluster, see `cluster.pool`
        self._steps: Iterator[Step] | None = None
        self._stack = ExitStack()

    # ---- setup ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.push(self._raise_reported_error)
            if self.resume:
                self.folder = self._folder_to_resume()
                self.folder.check_resumable()
                stack.enter_context(self.folder.opened(self.recipe.run.mirror))
                checkpoint = self._open_folder()
            stack.enter_context(self.cluster.running())
            resource = self.cluster.resource()
            slots = self.cluster.check_size(resource)
            check_kernels(self.recipe, resource)
            check_engines(self.recipe, config_of(self.inputs.files), resource)
            before = checkpoint[2].get("autoscaler", {}).get("learner_ranks") if self.resume and checkpoint else None
            find_room = partial(cluster_room, self.cluster, self.recipe, resource)
            self.rank_layouts = rank_layouts(self.inputs.memory_fit.job, self.given.learner, find_room, slots, before)
            job = in_layout(self.inputs.memory_fit.job, next(iter(self.rank_layouts.values())))
            note = check(job, find_room)
            least = job.least_mb() if resource == "cpu" else {}
            if not self.resume:
                self.folder = RunFolder.create(self.recipe)
                stack.enter_context(self.folder.opened(self.recipe.run.mirror))
                checkpoint = self._open_folder()
            if not self.cluster.private and self.recipe.cluster.pool:
                self.shared_pool = self._join_pool(resource)
                stack.callback(self.shared_pool.close)
            stack.enter_context(self.cluster.writes_last_words(self.folder.path, self.folder.leave_status))
            stack.push(self._end_folder)
            state = checkpoint[2] if checkpoint else {}
            resume_notes = self._begin_resume() if checkpoint else []
            machine = f"{platform.machine()}, {slots} {resource} slots"
            self.folder.begin(self.recipe, machine, self.steps_done, self.changes, state.get("recipe"))
            name_of, private = self.cluster.node_name, self.cluster.private
            self.leases = make_leases(self.recipe, resource, self.folder.path, name_of, self.shared_pool, self._say, private=private)
            saved_rows = state.get("ledger_rows", 0)
            resume_notes += self.leases.ledger.resume_from(self.folder.path / "ledger.csv", self.steps_done, saved_rows)
            self.record = RunRecorder(self.recipe, self.folder, self.leases.ledger, self.steps_done)
            stack.push(self._close_record)
            fit = self.inputs.memory_fit
            shows_memory = self.record.progress.mode != "off" or fit.reason
            memory = fit.statement(least, resource) if shows_memory else ""
            notes = [memory, *self.inputs.prompts.notes, note, self.inputs.speculation_note, fit.note]
            notes.append(self.folder.deletion_note(self.recipe))
            notes = [self.recipe.untrained_note, self.recipe.exact_note, *self.settings_without_effect(resource), *notes]
            for message in filter(None, [*resume_notes, *notes]):
                self.record.progress.message(message)
            watch = MemoryWatch(private=self.cluster.private, job=ray.get_runtime_context().get_job_id())
            stack.callback(watch.close)

            def memory_of_step(engines: int) -> JsonObject:
                chosen = {"memory/settings": fit.reason} if fit.reason else {}
                return memory_metrics(watch.take(), least, fit.step_mb(engines)) | chosen

            self.parts = self._create_parts(resource, memory_of_step)
            stack.push(self._shut_down)
            self._start(checkpoint)
            gc.collect()
            gc.freeze()  # otherwise a full collection every other step scans all that is imported: 0.07 s, on busy cores 0.4 s
            stack.callback(gc.unfreeze)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Step]:
        """Return the run's only iterator: a second loop continues where the first one was left."""
        if self._steps is None:
            if not hasattr(self, "parts"):
                raise UserError("Runtime: the run has not started; iterate within `with Runtime(recipe) as run:`")
            self._steps = self._loop()
        return self._steps

    def _loop(self) -> Iterator[Step]:
        return steps(self.parts)

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
    def objective(self, value: ObjectiveConfig | JsonObject) -> None:
        tree = value if isinstance(value, dict) else value.model_dump(mode="json")
        changed = self.recipe.parse({**self.recipe.model_dump(mode="json"), "objective": tree}, where="run.objective")
        self.recipe = self.recipe.model_copy(update={"objective": changed.objective})
        self.autoscaler.set_objective(changed.objective)
        if hasattr(self, "parts"):
            self.parts.stages.context.recipe = self.parts.stages.context.recipe.model_copy(update={"objective": changed.objective})

    def _repr_html_(self) -> str:
        """Show the run so far in a notebook, before, while and after it is trained."""
        return RunView.read(self.folder.path)._repr_html_() if hasattr(self, "folder") else f"<pre>{escape(self.recipe.to_yaml())}</pre>"

    def _load_prompts(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, files: Files) -> PromptSet:
        return load_prompts(recipe, tokenizer, context_tokens(files), files)

    def _folder_to_resume(self) -> RunFolder:
        return RunFolder.resumed(self.recipe, self._check_state, previous=self.previous)

    def _check_state(self, state: JsonObject, folder: RunFolder) -> None:
        """Find what has changed since a checkpoint. Raises UserError if the run cannot go on from it."""
        before = state.get("recipe") or folder.recipe_before()
        if before is not None:
            self.changes = changes(before, self.recipe, state.get("contents"), self.inputs.contents)
            self.changes.check(folder.path, state.get("step", 0), accepted=self.resume_changed)
        try:
            int(state["cursor"]["taken"])
        except (KeyError, TypeError, ValueError):
            raise DamagedCheckpoint(folder.path, "has a checkpoint whose driver.json names no place in the prompts") from None
        if not self.resume_changed:
            self.inputs.cursor.check(state["cursor"])

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

    def _join_pool(self, resource: str) -> PoolClient:
        """Join the slots that the runs of the cluster share. A run that is refused leaves no folder."""
        recipe = self.recipe
        ranks, engines = next(iter(self.rank_layouts)), recipe.rollout.min_actors * recipe.rollout.least_width
        least = max(ranks + engines if recipe.rollout.rolls_out_ahead else max(ranks, engines), recipe.reward.tensor_parallel)
        return join_pool(recipe.cluster, recipe.price, resource, least, self.folder.path, not self.resume, self._say)

    def _say(self, text: str) -> None:  # for parts that are made before the recorder
        self.record.progress.message(text)

    def _create_parts(self, resource: str, memory_of_step: MemoryOfStep) -> RunParts:
        record, inputs, actors, private = self.record, self.inputs, self.actor_classes(), self.cluster.private
        inputs.prompts, chooses_width = in_object_store(inputs.prompts), self.recipe.rollout.tensor_parallel == "auto"
        engines, note = self._expect_engines(resource)
        recipe, rollout = self.recipe, self.recipe.rollout
        self.autoscaler.expect(engines, note)
        self.autoscaler.frontiers.use_pools(self.leases.pools.kinds)
        self.autoscaler.unit = {"cpu": "core-s", "gpu": "GPU-s"}[resource]
        for message in {engine.note: 0 for engine in engines.values() if engine.note}:
            record.progress.message(message)
        if self.shared_pool is not None:
            self.autoscaler.criteria.bids = MarketBids(self.shared_pool, self.autoscaler.criteria.objective, next(iter(self.rank_layouts)))
        pools = EnginePools(self.leases.pools, rollout.least_width, self._learner_node, record.progress.message)
        most = {width: rollout.max_actors // (width if chooses_width else 1) for width in engines}
        limits = partial(pools.limits, most, rollout.min_actors)
        context = RunContext(recipe, SlotBroker(self.leases), StepTimer(record.progress.phase), record, self.autoscaler, limits)
        self.autoscaler.calls.obstacle = inputs.memory_fit.updates_obstacle
        stages = Stages.create(context, inputs, actors, pools, inputs.memory_fit.give_back_at_once, private)
        stages.learn.use_layouts(self.rank_layouts)
        stages.rollout.pool.set_width(self.autoscaler.engines.width)
        source = PromptSource(inputs.prompts.train, inputs.cursor, DynamicSampling(recipe, inputs.cursor), recipe.run.episodes)
        called = stages.rollout, stages.learn, stages.score, stages.prefix, stages.accounted
        session = RolloutSession(context, source, self._make_groups(), *called, self.steps_done)
        state = SavedState(stages, session, self.folder, inputs, self.steps_done, resume_changed=self.resume_changed)
        records = StepRecords(stages, session, state, memory_of_step, self._write_result, not private)
        return RunParts(stages, session, Updates(stages, session, records), Evaluations(stages, records), records, state)

    def _make_groups(self) -> GroupsInFlight:
        return GroupsInFlight(self.recipe)

    def _learner_node(self) -> str | None:
        ranks = self.parts.stages.learn.worker_group.by_rank if hasattr(self, "parts") else []
        return next((rank.slot.node for rank in ranks), None)

    def _write_result(self) -> None:
        write_models(self.recipe, self.folder, self.inputs.files, self.inputs.critic_files, self.parts.stages.learn.worker_groups)

    def _expect_engines(self, resource: str) -> tuple[dict[int, ExpectedEngine], str]:
        """Return what is expected of engines by width, and why there is one width only. An automatic width without a choice is set."""
        rollout = self.recipe.rollout
        largest_node = self.leases.pools.largest_node()
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
        start_learner(self.parts, self.inputs, self.folder, checkpoint, private=self.cluster.private)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _shut_down(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        """Save what can be saved, end every process, give back every lease."""
        parts = self.parts
        try:
            if isinstance(error, Stopped) or (error is None and not parts.records.finished):
                self._save_last_step(hurry=isinstance(error, Stopped) and error.signal_number == signal.SIGTERM)
            elif error is not None and not self._has_no_space(error):
                parts.state.save_kept()
        except Exception as failure:  # the last checkpoint remains valid, and the leases must be released anyway
            parts.stages.context.say(f"no checkpoint at the stop: {one_line(failure, 300)}")
        finally:
            with ExitStack() as stack:  # from the last to the first, each of them also if one before it fails
                stack.callback(self._forget)
                stack.callback(self.leases.release_all)
                stack.callback(parts.stages.close)
                self.folder.end(*self._outcome(error))  # before any call to Ray: if Ray is gone, it may take a minute to return

    def _forget(self) -> None:
        """Drop the last references to objects: a node that holds any is not idle."""
        self.parts.session.weights = None
        self.parts.stages.learn.worker_groups.forget()

    def _save_last_step(self, hurry: bool) -> None:
        """Save the last finished step unless it is saved. `hurry`: the process will be killed soon."""
        STOP.acknowledge()
        parts, number = self.parts, self.parts.session.step.number
        if parts.session.update is not None:
            parts.stages.context.say("stopped inside an update: the last checkpoint remains valid")
            return
        parts.records.close_interrupted(parts.evaluations.is_due(number))
        parts.state.save_unless_saved(self.recipe.run.sigterm_s * 2 / 3 if hurry else None)

    def _has_no_space(self, error: BaseException) -> bool:
        """Return whether a checkpoint failed for lack of space: another one would fail too."""
        return isinstance(error, DiskFull) and self.parts.state.checkpoints.folder in (error.path, *error.path.parents)

    def _outcome(self, error: BaseException | None) -> tuple[str, str]:
        """Return status and reason for status.json."""
        if error is None:
            left = f"the loop was left after step {self.parts.state.steps_done} of {self.parts.session.last_step}"
            return ("done", "") if self.parts.records.finished else ("stopped", left)
        return "stopped" if isinstance(error, (Stopped, KeyboardInterrupt, GeneratorExit)) else "failed", str(self._reported_error(error))

    def _end_folder(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the status of a run that ended before it had a recorder."""
        if error is not None and self.folder.status.get("status") == "running":
            self.folder.end(*self._outcome(error))

    def _close_record(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self.record.close(*self._outcome(error))

    def _raise_reported_error(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and (reported := self._reported_error(error)) is not error:
            raise reported from error

    def _reported_error(self, error: BaseException) -> BaseException:
        """Return the error to report. A stop or a full disk says whether there is a checkpoint to continue from."""
        folder = getattr(self, "folder", None)  # a stop may come before there is one
        if isinstance(error, OSError) and error.errno in FULL:  # raised by a library
            error = DiskFull(Path(error.filename or (folder.path if folder is not None else self.recipe.run.root)))
        if isinstance(error, (Stopped, DiskFull)):
            error.resumable = folder is not None and self._can_resume(folder.path)
        return error
