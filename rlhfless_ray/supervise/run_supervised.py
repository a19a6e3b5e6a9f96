"""Run a supervised stage: its folder, its ranks, and its model."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhfless_ray.common.disk_space import DiskFull
from rlhfless_ray.common.errors import RunError, Stopped, UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.learn.model_checks import check_slices, check_width
from rlhfless_ray.local.cluster import MIN_STORE_MB, RayCluster
from rlhfless_ray.local.fast_imports import transformers_without_torch
from rlhfless_ray.local.memory_watch import MemoryWatch
from rlhfless_ray.local.slot_check import check_slots
from rlhfless_ray.preflight.memory_check import check, check_ahead, cluster_room, local_room, starts_ray
from rlhfless_ray.preflight.memory_fit import Fit, fit
from rlhfless_ray.preflight.memory_needs import Room
from rlhfless_ray.preflight.stage_memory import StageMemory
from rlhfless_ray.prompts.cursor import check_unchanged
from rlhfless_ray.recipe.changes import Changes, changes
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.without_effect import without_effect
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.run.closing import close_folder
from rlhfless_ray.run.folder import RunFolder, check_writable
from rlhfless_ray.run.put_model import put_model
from rlhfless_ray.supervise.examples import TITLES, RowOrder
from rlhfless_ray.supervise.find_checkpoints import (
    CHECKPOINTS,
    RANKS,
    chosen_checkpoint,
    newest_checkpoint,
    newest_folder,
    progress_of,
    remove_torn,
    set_aside_after,
    steps_saved,
)
from rlhfless_ray.supervise.load_rows import check_vocabulary, end_note, load_rows
from rlhfless_ray.supervise.rank_recorder import RankRecorder
from rlhfless_ray.supervise.row_reader import SupervisedRows
from rlhfless_ray.weights.load_policy import (
    check_classifier,
    check_family,
    context_tokens,
    first_supervised_policy,
    load_tokenizer,
    model_folder,
    other_model,
    read_model,
    text_config,
)
from rlhfless_ray.weights.model_folder import config_of, move_model, parameter_count, read_files, read_folder, without_weights
from rlhfless_ray.weights.quantized_base import refuse_quantized
from rlhfless_ray.weights.same_model import check_same_model, model_sizes
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.functions.slot_source import SlotSource
    from rlhfless_ray.supervise.leased_ranks import LeasedRanks


def run_supervised(recipe: SupervisedRecipe, *, resume: bool | Literal["previous"] = False, resume_changed: bool = False) -> RunFolder:
    """Train to the end and return the run's folder, whose `model/` is the result.

    Args:
        recipe: The recipe.
        resume: Continue the newest run of this name from its checkpoint, or with `"previous"` from the one before that.
        resume_changed: Continue it although the recipe changes what is learned or counted.

    Raises:
        UserError: For mistakes in the recipe, the data or the files it names, before Ray starts if they need no Ray.
        RunError: If training fails.
        Stopped: After Ctrl-C or SIGTERM; the ranks have saved a checkpoint if they could.

    Examples:
        >>> from rlhfless_ray import SupervisedRecipe, run_supervised
        >>> tree = {"task": "sft", "run": {"steps": 2}, "data": {"task": "chain", "rows": 64}, "watch": {"progress": "off", "wandb": "off"}}
        >>> folder = run_supervised(SupervisedRecipe.parse(tree))
        >>> (folder.path / "model" / "config.json").exists()
        True
    """
    return SupervisedStage(recipe, resume=resume, resume_changed=resume_changed).run()


class SupervisedStage:
    """One supervised stage. The constructor checks everything that needs no Ray."""

    changes = Changes()  # since the checkpoint
    memory_fit: Fit[StageMemory] | None = None  # once the memory is known

    def __init__(self, recipe: SupervisedRecipe, *, resume: bool | Literal["previous"] = False, resume_changed: bool = False) -> None:
        SupervisedRecipe.check_type(recipe)
        self.recipe, self.given, self.resume = recipe, recipe, bool(resume)
        RunFolder.check_root(recipe)
        for setting, path in (("save.path", recipe.save.path), ("checkpoint.path", recipe.checkpoint.path)):
            if path:
                check_writable(Path(path), setting)
        self.folder = newest_folder(recipe) if resume else RunFolder(Path())
        self.left_out = False  # whether checkpoints after the chosen one are set aside
        if resume:
            self.left_out = resume == "previous"
            self.checkpoint = chosen_checkpoint(self.storage, previous=self.left_out)
            progress = progress_of(self.checkpoint)
            self.folder.check_same_policy(recipe)
        else:
            _check_no_checkpoints(recipe)
        if starts_ray(recipe):
            check_ahead(recipe)
        self.model_path, self.files = _initial_model(recipe)
        if resume:
            check_same_model(progress.get("model", {}), self.files)
        with nullcontext() if recipe.policy.trust_remote_code else transformers_without_torch():
            tokenizer = load_tokenizer(self.files, recipe.policy.trust_remote_code)
        check_width("learner", recipe.learner.tensor_parallel, config_of(self.files))
        check_slices("learner", recipe.learner.sequence_parallel, config_of(self.files))
        self.second = _second_model(recipe, tokenizer)
        if self.second is not None:
            whose = "the teacher: " if recipe.task == "kd" else "the reference: "
            config = config_of(read_folder(self.second))
            check_slices("learner", recipe.learner.sequence_parallel, config, whose)
            if recipe.task == "kd":
                check_width("learner", recipe.learner.tensor_parallel, config, whose)
        if recipe.data.chat_template:
            tokenizer.chat_template = recipe.data.chat_template
            self.files = {**self.files, "chat_template.jinja": recipe.data.chat_template.encode()}
        self.rows: SupervisedRows = load_rows(recipe, tokenizer, context_tokens(self.files))
        check_vocabulary(self.rows, tokenizer, text_config(self.files).get("vocab_size"))
        self.rows = replace(self.rows, notes=self.rows.notes + end_note(recipe, self.rows, self.files, tokenizer))
        data = recipe.data
        self.order = RowOrder(
            rows=len(self.rows.train),
            batch_rows=data.batch_rows,
            epochs=recipe.run.epochs,
            seed=recipe.run.seed,
            shuffle=data.shuffle,
            drops=data.remainder == "drop",
            most_steps=recipe.run.steps,
            carries=data.remainder == "carry",
            checksum=self.rows.train.checksum,
            labels=self.rows.train.label_checksum,
            whole_batches=recipe.run.schedule_end == "whole_batches",
        )
        if not self.order.steps_per_epoch or not self.order.steps:
            raise UserError(
                f"data.batch_rows: the {len(self.rows.train)} rows do not fill one batch of {data.batch_rows}, and data.remainder is "
                f"{data.remainder}; lower batch_rows, or set remainder to short"
            )
        self.recipe = recipe.with_settings({"run.steps": self.order.steps})
        if resume:
            self._check_changes(progress, accepted=resume_changed)
        if starts_ray(recipe):
            self._fit_memory(lambda: local_room(recipe))
        megabytes = sum(part.nbytes for part in _arrays(self.rows)) // 2**20 + sum(len(x) for x in self.files.values()) // 2**20
        self.cluster = RayCluster(
            self.recipe,
            store_mb=recipe.cluster.object_store_mb or MIN_STORE_MB + 2 * megabytes,
            architectures=config_of(self.files).get("architectures") or (),
            engines=False,
        )

    def _check_changes(self, progress: JsonObject, *, accepted: bool) -> None:
        """Find what has changed since the checkpoint. Raises UserError if the stage cannot go on from it."""
        self.progress_before, order = progress, progress.get("order", {})
        before = progress.get("recipe") or self.folder.recipe_before()
        if before is not None:
            was, now = _content(order), {} if self.recipe.data.task else _content(self.order.state())
            self.changes = changes(before, self.recipe, was, now)
            self.changes.check(self.folder.path, progress.get("steps", 0), accepted=accepted)
        if not accepted:
            check_unchanged(order, self.order, TITLES)

    def run(self) -> RunFolder:
        import ray

        from rlhfless_ray.functions.cluster_nodes import cluster_slots

        with ExitStack() as stack:
            is_new = not self.resume or not self.folder.path.is_dir()
            if not is_new:
                self.folder.check_resumable()
                stack.enter_context(self.folder.locked())
            stack.enter_context(self.cluster.running())
            resource = self.cluster.resource()
            check_slots(self.recipe, slots := cluster_slots(resource), resource)
            if self.memory_fit is None:
                self._fit_memory(lambda: cluster_room(self.cluster, self.recipe, resource))
            assert self.memory_fit is not None
            expected_mb = (self.memory_fit.job.least_mb(), self.memory_fit.step_mb()) if resource == "cpu" else ({}, {})
            if is_new:
                self.folder = self._new_folder()
                stack.enter_context(self.folder.locked())
            stack.enter_context(self.cluster.writes_last_words(self.folder.path, self.folder.leave_status))
            source = self._slot_source(resource, stack)
            resume_notes = self._begin_resume() if self.resume else []
            done = self.progress_before.get("steps", 0) if self.resume else 0
            earlier = self.progress_before.get("recipe") if self.resume else None
            self.folder.begin(self.recipe, f"{platform.machine()}, {slots} {resource} slots", done, self.changes, earlier)
            ledger = Ledger(resource, self.recipe.price.slot_per_hour(resource))
            ledger.name_of = self.cluster.node_name
            self.progress = ProgressDisplay(self.recipe.watch.progress, self.recipe.run.steps or 0, title=self.folder.path.name)
            unread = without_effect(self.given, resource, private=self.cluster.private)
            shows_memory = self.progress.mode != "off" or self.memory_fit.reason
            memory = self.memory_fit.statement(expected_mb[0], resource) if shows_memory else ""
            notes = [*resume_notes, *unread, *self.rows.notes, memory, self.memory_note, self.memory_fit.note]
            notes.append(self.folder.deletion_note(self.recipe))
            for message in filter(None, notes):
                self.progress.message(message)
            self.slots = self._leased_ranks(source, ledger)
            self.recorder = RankRecorder(self.recipe, self.folder, self.progress, ledger, self.slots)
            self.recorder.expected_mb = expected_mb
            self.recorder.memory = MemoryWatch(private=self.cluster.private, job=ray.get_runtime_context().get_job_id())
            stack.callback(self.recorder.memory.close)
            stack.push(self._close)
            self._train(resource)
            self._write_model()
        return self.folder

    def _begin_resume(self) -> list[str]:
        """Set aside what is newer than the chosen checkpoint. Returns messages for the user about this checkpoint and what has changed."""
        aside = [set_aside_after(self.checkpoint)] if self.left_out else []
        unverified = f"{self.checkpoint} has no checksums (of an earlier version), so it is taken unverified"
        notes = [] if RANKS in self.progress_before else [unverified]
        return [*notes, *aside, *remove_torn(self.storage), *self.changes.said(self.progress_before.get("steps", 0))]

    def _fit_memory(self, find_room: Callable[[], Room]) -> None:
        """Check that the ranks fit the memory with the longest row, and decide the settings of updates that are `auto`."""
        row_tokens = self.rows.train.longest_row(together=self.recipe.task != "kto")
        job = StageMemory.of(self.recipe, row_tokens, policy=(config_of(self.files), parameter_count(self.files)))
        self.memory_note, self.memory_fit = check(job, find_room), fit(job, find_room)
        self.recipe = self.memory_fit.job.recipe

    def _new_folder(self) -> RunFolder:
        """Create the run's folder. A resumed run gets its old one again, if only its checkpoints are left."""
        if not self.resume:
            return RunFolder.create(self.recipe)
        return RunFolder.create(self.recipe.with_settings({"run.name": self.folder.path.name}))

    # ---- training -----------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Path:
        """Folder of the checkpoints. Ray Train calls its two parts the storage path and the name."""
        path = self.recipe.checkpoint.path
        return Path(path).resolve() / self.folder.path.name if path else self.folder.path.resolve() / CHECKPOINTS

    def _slot_source(self, resource: str, stack: ExitStack) -> SlotSource:
        """Return the slots that the runs of the cluster share, or those of this run alone."""
        from rlhfless_ray.functions.pool_client import join_pool
        from rlhfless_ray.functions.private_slots import PrivateSlots, name_of_run

        section = self.recipe.cluster
        if self.cluster.private or not section.pool:
            source: SlotSource = PrivateSlots(resource, name_of_run(self.folder.path), is_alone=self.cluster.private)
        else:
            least = self.recipe.min_ranks * self._threads(resource)
            say = lambda text: self.progress.message(text)  # noqa: E731 - the display is created later
            source = join_pool(section, self.recipe.price, resource, least, self.folder.path, not self.resume, say)
        stack.callback(source.close)
        return source

    def _leased_ranks(self, source: SlotSource, ledger: Ledger) -> LeasedRanks:
        from rlhfless_ray.supervise.leased_ranks import LeasedRanks

        recipe, threads = self.recipe, self._threads(source.resource)
        deadline_s = recipe.functions.lease_deadline_s
        learner, name = recipe.learner, self.folder.path.name
        return LeasedRanks(source, ledger, deadline_s, recipe.min_ranks, learner.ranks, threads, name, learner.tensor_parallel)

    def _threads(self, resource: str) -> int:
        return self.recipe.learner.max_slots_per_rank if resource == "cpu" else 1

    def _train(self, resource: str) -> None:
        """Run the ranks in Ray Train, and record what they tell."""
        import ray

        from rlhfless_ray.supervise.rank_start import RankStart
        from rlhfless_ray.supervise.trained_ranks import TrainedRanks

        remove_torn(self.storage)
        self.recorder.open(steps_saved(self.storage))
        start = RankStart(
            recipe=self.recipe,
            order=self.order,
            data=ray.put([self.rows.train, self.rows.heldout]),
            model=self.model_path or ray.put(self.files),
            others=ray.put(without_weights(self.files)) if self.recipe.checkpoint.save_hf else None,
            sizes=model_sizes(self.files),
            second=self.second,
            reward_tokens=self.rows.reward_tokens,
            storage=self.storage,
            inbox=None,
            driver_node=ray.get_runtime_context().get_node_id(),
            device=resource,
            threads=self._threads(resource),
        )
        TrainedRanks(start, self.slots, self.recorder, self.cluster.private).run()

    # ---- the end ------------------------------------------------------------------------------------------------------

    def _write_model(self) -> None:
        """Move the model out of the last checkpoint into the run folder, and copy it to `save.path`."""
        from rlhfless_ray.supervise.rank_start import MODEL

        newest = newest_checkpoint(self.storage)
        if newest is None or not (newest / MODEL).is_dir():
            raise RunError(f"the last checkpoint in {self.storage} holds no model")
        others = without_weights(self.files)

        def moved(part: str) -> Any:
            return lambda target: move_model(newest / part, target, others)

        saved = self.folder.write_model(moved(MODEL))
        shutil.rmtree(newest / MODEL)
        if self.recipe.lora.rank:
            saved = swap_folder(self.folder.path / "adapter", moved("adapter"))
            shutil.rmtree(newest / "adapter")
        if self.recipe.save.path:
            put_model(Path(self.recipe.save.path), read_files(saved))

    def _close(self, kind: object, error: object, trace: object) -> None:
        """Write the last rows, the status, the timeline and the report, however the run ended."""
        stopped = isinstance(error, (Stopped, KeyboardInterrupt))
        if isinstance(error, DiskFull):
            remove_torn(self.storage)  # what it takes is needed for what follows
            error.resumable = steps_saved(self.storage) is not None
        status = "done" if error is None else "stopped" if stopped else "failed"
        close_folder(self.folder, self.progress, self.recorder.last_works(), status, "" if error is None else str(error))


def _content(order: Mapping[str, object]) -> dict[str, str]:
    """Return {key: checksum} of the rows that the keys of the data sets name, from the state of their order."""
    rows = f"{order.get('checksum')}/{order.get('labels')}"
    return {"data.path": rows, "data.paths": rows} if order.get("checksum") else {}


def _check_no_checkpoints(recipe: SupervisedRecipe) -> None:
    """Raise UserError if another run's checkpoints lie where those of a new run will be: Ray Train would continue them."""
    if not recipe.checkpoint.path:
        return
    name = next((path.name for path in RunFolder.candidates(recipe) if not path.exists()), recipe.run.name)
    there = Path(recipe.checkpoint.path) / name
    if newest_checkpoint(there):
        raise UserError(
            f"checkpoint.path: {there} has the checkpoints of another run; resume that run, remove them, or set another path or run.name"
        )


def _initial_model(recipe: SupervisedRecipe) -> tuple[Path | None, Files]:
    """Return the folder that training begins with, and its files. A built-in task's policy has no folder."""
    if recipe.policy.path:
        folder = model_folder(recipe.policy.path, "policy.path").resolve()
        files = read_model(folder)
        check_family(files, is_causal=recipe.task != "rm", trusts_code=recipe.policy.trust_remote_code)
        refuse_quantized(config_of(files))
        if recipe.task == "rm":
            check_classifier(files)
        return folder, files
    return None, first_supervised_policy(recipe)


def _second_model(recipe: SupervisedRecipe, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Return the folder of another reference or of the teacher."""
    key, path = ("teacher.path", recipe.teacher.path) if recipe.teacher.path else ("reference.path", recipe.reference.path)
    return other_model(path, key, tokenizer) if path else None


def _arrays(rows: SupervisedRows) -> list[Any]:
    return [x for part in (rows.train, rows.heldout) for x in (part.tokens, part.mask, part.lengths, part.context_lengths)]
