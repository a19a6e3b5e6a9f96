"""Run a supervised stage: its folder, the ranks under Ray Train, and what is recorded meanwhile."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.deadlines import POLL_S, STOP, fetch
from rlhfless_ray.common.disk_space import FULL, DiskFull
from rlhfless_ray.common.errors import RunError, Stopped, UserError, one_line
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.local.cluster import MIN_STORE_MB, RayCluster
from rlhfless_ray.prompts.builtin_tasks import task as builtin_task
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.report.metrics import Metrics
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.run.closing import close_folder
from rlhfless_ray.run.folder import RunFolder, check_writable, put_files
from rlhfless_ray.supervise.examples import RowOrder
from rlhfless_ray.supervise.inbox import INBOX, Inbox
from rlhfless_ray.supervise.load_rows import load_rows
from rlhfless_ray.supervise.row_reader import SupervisedRows
from rlhfless_ray.weights.load_policy import check_files, context_tokens, load_tokenizer, model_folder, other_model, quiet_libraries
from rlhfless_ray.weights.model_folder import read_files, read_folder, with_dtype, without_weights, write_folder
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from rlhfless_ray.functions.pool_client import PoolClient
    from rlhfless_ray.supervise.leased_ranks import LeasedRanks
    from rlhfless_ray.supervise.train_loop import RankStart

CHECKPOINTS = "checkpoints"
NO_SLOT = {"memory": 2.0**20}  # what a worker of Ray Train takes whose slot is leased: a bundle must not be empty
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
RESIZE_S = 60.0  # interval in which Ray Train looks for slots of more ranks
INBOX_S = 60.0  # deadline of its answers
STOP_S = 60.0  # time for the ranks to finish their step and save after Ctrl-C


class RanksFailed(RunError):
    """A rank was lost, or raised an error that is no mistake of the user's."""


def run_supervised(recipe: SupervisedRecipe, *, resume: bool = False) -> RunFolder:
    """Train to the end and return the run's folder, whose `model/` is the result.

    Args:
        recipe: The recipe.
        resume: Continue the newest run of this name from its checkpoint.

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
    return SupervisedStage(recipe, resume=resume).run()


class SupervisedStage:
    """One supervised stage. The constructor checks everything that needs no Ray."""

    def __init__(self, recipe: SupervisedRecipe, *, resume: bool = False) -> None:
        quiet_libraries()
        self.recipe, self.resume = recipe, resume
        RunFolder.check_root(recipe)
        for setting, path in (("save.path", recipe.save.path), ("checkpoint.path", recipe.checkpoint.path)):
            if path:
                check_writable(Path(path), setting)
        self.model_path, self.files = _initial_model(recipe)
        tokenizer = load_tokenizer(self.files, recipe.policy.trust_remote_code)
        self.second = _second_model(recipe, tokenizer)
        if recipe.data.chat_template:
            tokenizer.chat_template = recipe.data.chat_template
            self.files = {**self.files, "chat_template.jinja": recipe.data.chat_template.encode()}
        self.rows: SupervisedRows = load_rows(recipe, tokenizer, context_tokens(self.files))
        data = recipe.data
        self.order = RowOrder(
            rows=len(self.rows.train),
            batch_rows=data.batch_rows,
            epochs=recipe.run.epochs,
            seed=recipe.run.seed,
            shuffle=data.shuffle,
            drops=data.remainder == "drop",
            most_steps=recipe.run.steps,
        )
        if not self.order.steps_per_epoch:
            raise UserError(
                f"data.batch_rows: the {len(self.rows.train)} rows do not fill one batch of {data.batch_rows}, and data.remainder is drop; "
                "lower batch_rows, or set remainder to short"
            )
        run = recipe.run.model_copy(update={"steps": self.order.steps})
        self.recipe = recipe.model_copy(update={"run": run})
        megabytes = sum(part.nbytes for part in _arrays(self.rows)) // 2**20 + sum(len(x) for x in self.files.values()) // 2**20
        self.cluster = RayCluster(self.recipe, store_mb=recipe.cluster.object_store_mb or MIN_STORE_MB + 2 * megabytes)
        self.slots: LeasedRanks | None = None  # None: Ray Train takes them from Ray's queue
        self.leases_of: dict[int, list[str]] = {}  # ids of the leases of each rank that has started
        self.changes = False  # whether the ranks end in order to start again in another number
        self.failure: BaseException | None = None
        self.lost, self.restarts = 0, False  # since the last row; whether the ranks have not opened since then

    def run(self) -> RunFolder:
        with ExitStack() as stack:
            self.folder = _newest_folder(self.recipe) if self.resume else RunFolder(Path())
            if self.resume:
                stack.enter_context(self.folder.locked())
            stack.enter_context(STOP.listening())
            stack.callback(self.cluster.stop)
            try:
                self.cluster.start()
            except SystemExit:  # Ray's own handler, active while it starts, turns SIGTERM into this
                raise Stopped(signal.SIGTERM) from None
            STOP.listen()
            STOP.check()
            resource = self.cluster.resource()
            slots = self._check_size(resource)
            if resource == "gpu" and not self.cluster.private and (key := self.recipe.cluster.market_key):
                raise UserError(f"{key}: ranks of a supervised stage take GPUs from Ray's queue, not from the pool; leave it out")
            if not self.resume:
                self.folder = RunFolder.create(self.recipe)
                stack.enter_context(self.folder.locked())
            shares = self._join_pool(resource, stack)
            self.folder.begin(self.recipe, f"{platform.machine()}, {slots} {resource} slots", 0)
            self.ledger = Ledger(resource)
            self.ledger.name_of = self.cluster.node_name
            price = self.recipe.price.slot_per_hour(resource)
            self.ledger.price_of = lambda node: price
            self.progress = ProgressDisplay(self.recipe.watch.progress, self.recipe.run.steps or 0, title=self.folder.path.name)
            for message in filter(None, [*self.rows.notes, self.folder.deletion_note]):
                self.progress.message(message)
            stack.push(self._close)
            self.slots = None if shares is None else self._leased_ranks(shares)
            self._train(resource)
            self._write_model()
        return self.folder

    # ---- training -----------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> tuple[Path, str]:
        """Return what Ray Train calls storage path and name: the checkpoints are in the folder of both."""
        path = self.recipe.checkpoint.path
        return (Path(path).resolve(), self.folder.path.name) if path else (self.folder.path.resolve(), CHECKPOINTS)

    def _check_size(self, resource: str) -> int:
        from rlhfless_ray.functions.lease import node_slots

        slots, threads = sum(node_slots(resource).values()), self._threads(resource)
        needed = self.recipe.min_ranks * threads
        if needed > slots:
            unit = "GPUs" if resource == "gpu" else "CPU cores"
            key = "run.min_ranks" if self.recipe.run.min_ranks else "learner.ranks"
            raise UserError(f"{key}: {needed} slots at once, but the cluster has {slots} ({unit}); lower it or add nodes")
        return slots

    def _join_pool(self, resource: str, stack: ExitStack) -> PoolClient | None:
        """Join the slots that the runs of the cluster share. None: Ray Train takes slots from Ray's queue."""
        section = self.recipe.cluster
        if self.cluster.private or not section.pool or resource == "gpu":
            return None
        from rlhfless_ray.functions.pool_client import join_pool

        least = self.recipe.min_ranks * self._threads(resource)
        say = lambda text: self.progress.message(text)  # noqa: E731 - the display is created later
        pool = join_pool(section, self.recipe.price, resource, least, self.folder.path, not self.resume, say)
        stack.callback(pool.close)
        return pool

    def _leased_ranks(self, pool: PoolClient) -> LeasedRanks:
        from rlhfless_ray.supervise.leased_ranks import LeasedRanks

        recipe, threads = self.recipe, self._threads(pool.resource)
        deadline_s = recipe.functions.lease_deadline_s
        return LeasedRanks(pool, self.ledger, deadline_s, recipe.min_ranks, recipe.learner.ranks, threads, self.folder.path.name)

    def _threads(self, resource: str) -> int:
        return self.recipe.learner.max_slots_per_rank if resource == "cpu" else 1

    def _train(self, resource: str) -> None:
        """Run the ranks in Ray Train, and record what they tell."""
        import ray

        from rlhfless_ray.supervise.train_loop import RankStart

        path, name = self.storage
        file = self.folder.path / "ledger.csv"
        self._open_metrics(_steps_saved(path / name))
        self.ledger.resume_from(file, self.done)
        start = RankStart(
            recipe=self.recipe,
            order=self.order,
            data=ray.put([self.rows.train, self.rows.heldout]),
            model=self.model_path or ray.put(self.files),
            second=self.second,
            reward_tokens=self.rows.reward_tokens,
            storage=path / name,
            inbox=None,
            device=resource,
            threads=self._threads(resource),
        )
        if self.slots is None:
            self._run_ranks(start, None)
        else:
            self._run_leased_ranks(start, self.slots)

    def _run_leased_ranks(self, start: RankStart, slots: LeasedRanks) -> None:
        """Run the ranks on slots of the pool. Start them again after a loss, and in another number if the pool says so."""
        losses = 0
        while True:
            self.progress.phase("waiting for slots")
            self.leases_of.clear()
            try:
                self._run_ranks(start, slots.take())
                if not self.changes or self.done == self.recipe.run.steps:
                    return
            except RanksFailed as error:
                losses += 1
                if losses > self.recipe.run.max_restarts:
                    raise
                self._on_loss(f"the ranks start again from the last checkpoint: {error}")
            finally:
                slots.release()

    def _run_ranks(self, start: RankStart, nodes: list[str] | None) -> None:
        """Run the ranks once, and record what they tell until they have ended.

        `nodes`: of the ranks, whose slots are leased. None: Ray Train finds slots, and starts ranks that were lost again.
        """
        import ray

        here = ray.get_runtime_context().get_node_id()
        self.inbox: Any = ray.remote(Inbox).options(num_cpus=0, label_selector={"ray.io/node-id": here}).remote()
        fit = threading.Thread(target=self._fit, args=(replace(start, inbox=self.inbox), nodes), daemon=True)
        self.progress.phase("starting the ranks")
        self.told_s, self.began, self.changes, self.failure = time.monotonic(), False, False, None
        fit.start()
        self._follow(fit)

    def _open_metrics(self, done: int | None) -> None:
        """Open the metrics after the step `done`; rows of later ones are dropped."""
        folder = self.folder.path
        self.metrics = Metrics(folder, self.recipe.watch, folder.name, resume_after_step=done, say=self.progress.message)
        self.done, self.counted, self.opened = done or 0, self.ledger.count, False

    def _on_opened(self, done: int) -> None:
        """The ranks go on after the step `done`: that of the last checkpoint that Ray Train counts as whole."""
        if done == self.done and not self.restarts:
            return
        self.metrics.close()
        self._open_metrics(done)
        file, started_s = self.folder.path / "ledger.csv", self.ledger.started_s
        self.ledger.append_to(file)
        self.ledger.resume_from(file, done)  # marks later rows as repeated
        self.ledger.started_s, self.restarts = started_s, False
        self.progress.message(f"the ranks go on after step {done}")

    def _fit(self, start: RankStart, nodes: list[str] | None) -> None:
        """In a thread: start the ranks and wait for their end. What fails goes to `failure`."""
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        private = self.cluster.private

        class Trainer(TorchTrainer):
            """Without Ray Train's manager of Ray Data's sets, which are none here. On a private Ray also without its cleaner of placement
            groups: it asks the dashboard, which is not there, and its end would be waited for 12 s. The groups end with that Ray."""

            def _create_default_callbacks(inner) -> Any:
                unused = ("DatasetsCallback", *(("PlacementGroupCleanerCallback",) if private else ()))
                callbacks = super()._create_default_callbacks()  # type: ignore[misc]
                return [one for one in callbacks if type(one).__name__ not in unused]

        from rlhfless_ray.supervise.train_loop import train_rank

        logging.getLogger("ray.train").setLevel(logging.ERROR)
        recipe, (path, name) = self.recipe, self.storage
        ranks = recipe.learner.ranks
        workers: Any = ranks if recipe.min_ranks == ranks else (recipe.min_ranks, ranks)
        takes: dict[str, float] = {"CPU": 1, "GPU": 1} if start.device == "gpu" else {"CPU": start.threads}
        selectors = None
        if nodes is not None:
            workers, takes, selectors = len(nodes), NO_SLOT, [{"ray.io/node-id": node} for node in nodes]
        if private:  # its only node is this machine, which nobody drains: a process less
            os.environ[PREEMPTION_WATCHER] = "0"
        try:
            Trainer(
                train_rank,
                train_loop_config={"start": start},
                torch_config=TorchConfig(backend="nccl" if start.device == "gpu" else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=workers,
                    # to grow, Ray Train starts the ranks again from the last checkpoint
                    elastic_resize_monitor_interval_s=RESIZE_S if recipe.checkpoint.every_steps else float("inf"),  # type: ignore[call-arg]
                    use_gpu=start.device == "gpu",
                    resources_per_worker=takes,
                    label_selector=selectors,
                ),
                run_config=RunConfig(
                    name=name,
                    storage_path=str(path),
                    failure_config=FailureConfig(max_failures=recipe.run.max_restarts if nodes is None else 0),
                    checkpoint_config=CheckpointConfig(num_to_keep=recipe.checkpoint.keep),
                ),
            ).fit()
        except BaseException as error:  # of any type, and this thread must not hide it
            self.failure = error
        finally:
            if private:
                del os.environ[PREEMPTION_WATCHER]

    def _follow(self, fit: threading.Thread) -> None:
        """Record what the ranks tell until they have ended. Raises what ended them."""
        stopped_s: float | None = None
        while True:
            ended = not fit.is_alive()
            for kind, content in fetch(self.inbox.take.remote(), INBOX_S, INBOX):
                self.told_s = time.monotonic()
                getattr(self, f"_on_{kind}")(content)
            if ended:
                break
            if STOP.number is not None and stopped_s is None:
                number, stopped_s = STOP.number, time.monotonic()
                self.progress.message("stopping once this step is finished and saved; press Ctrl-C again to stop now")
                fetch(self.inbox.stop.remote(), INBOX_S, INBOX)
                STOP.acknowledge()
                self.stopped = Stopped(number)
            elif stopped_s is None and not self.changes and self.opened and self.slots is not None and (reason := self.slots.change()):
                self.changes = True
                self.progress.message(reason)
                fetch(self.inbox.stop.remote(), INBOX_S, INBOX)
            elif STOP.number is not None or (stopped_s is not None and time.monotonic() - stopped_s > STOP_S):
                raise self.stopped
            self._check_deadline()
            time.sleep(POLL_S)
        if stopped_s is not None and self.done < (self.recipe.run.steps or 0):
            self.stopped.resumable = _steps_saved(Path(*self.storage)) is not None
            raise self.stopped
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what ended the ranks, if they have failed."""
        if self.failure is None:
            return
        root = _root(self.failure)
        if isinstance(root, (UserError, RunError)):
            raise root
        if isinstance(root, OSError) and root.errno in FULL:
            raise DiskFull(Path(root.filename or self.folder.path)) from self.failure
        raise RanksFailed(f"the ranks failed: {one_line(root, 600)}") from self.failure

    def _check_deadline(self) -> None:
        """Raise RunError if the ranks have not started, or have told nothing, for longer than the recipe allows."""
        key, what = ("learner.deadline_s", "the ranks to go on") if self.began else ("functions.lease_deadline_s", "the ranks to start")
        limit_s = self.recipe.learner.deadline_s if self.began else self.recipe.functions.lease_deadline_s
        if time.monotonic() - self.told_s > limit_s:
            raise RunError(f"timed out after {limit_s:.0f} s waiting for {what} ({key})")

    def _on_alive(self, _: None) -> None:
        """A rank is at a long piece of work."""

    def _on_began(self, content: tuple[int, int, str, str, float]) -> None:
        """A rank has started. The first of a new group ends the leases of the one before."""
        rank, ranks, node, device, began_s = content
        self.began = True
        if rank in self.leases_of:
            self.ledger.close()
            self.leases_of.clear()
            self._on_loss(f"a rank was lost: {ranks} of them start again from the last checkpoint")
        if self.slots is None:
            leases = [f"rank-{rank}" + (f"-{slot}" if slot else "") for slot in range(self._threads(self.ledger.resource))]
            for lease in leases:
                self.ledger.hold(lease, node, device, "learner", f"rank {rank}", since_s=began_s)
        else:
            leases = self.slots.assign(rank, node)
        self.leases_of[rank] = leases
        self.progress.phase("opening the model")

    def _on_loss(self, message: str) -> None:
        self.restarts, self.opened = True, False
        self.lost += 1
        self.progress.message(message)

    def _on_spans(self, content: tuple[int, Any]) -> None:
        rank, spans = content
        self.ledger.spans(self.leases_of.get(rank, []), spans)
        if not self.opened:
            self.opened = True
            self.ledger.begin_step(self.done + 1, spans[-1].to_s)
            self.counted = self.ledger.count

    def _on_step(self, content: tuple[int, dict[str, float], str, float]) -> None:
        done, measured, skipped, ended_s = content
        self.ledger.begin_step(done + 1, ended_s)
        own, total = self.ledger.totals_since(self.counted), self.ledger.totals()
        self.counted = self.ledger.count
        row = {
            "step": done,
            "time_s": time.time() - self.ledger.started_s,
            **measured,
            "cost/busy_slot_s": own["busy_slot_s"],
            "cost/full_slot_s": own["full_slot_s"],
            "cost/idle_share": own["idle_share"],
            "cost/money": own["money"],
            "cost/total_full_slot_s": total["full_slot_s"],
            "cost/total_money": total["money"],
            "faults/replaced": self.lost,
            "time_left_s": measured["step_s"] * ((self.recipe.run.steps or 0) - done),
        }
        if self.slots is not None:
            self.slots.expect(row["time_left_s"])
            row |= self.slots.metrics()
        if skipped:
            self.progress.message(f"step {done}: the update was skipped: {skipped}")
        self.lost = 0
        self.metrics.write(row)
        self.ledger.append_to(self.folder.path / "ledger.csv")
        self.folder.write_status(steps_done=done)
        self.progress.step(row)
        self.progress.phase("training")
        self.done = done

    def _on_evaluation(self, content: tuple[int, dict[str, float]]) -> None:
        step, found = content
        self.metrics.amend({"step": step, "time_s": time.time() - self.ledger.started_s, **found})
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
        self.progress.message(f"step {step}: held-out {shown}")

    def _on_saved(self, step: int) -> None:
        self.progress.phase("training")

    def _on_error(self, error: BaseException) -> None:
        self.failure = error

    # ---- the end ------------------------------------------------------------------------------------------------------

    def _write_model(self) -> None:
        """Move the model out of the last checkpoint into the run folder, and copy it to `save.path`."""
        from rlhfless_ray.supervise.train_loop import MODEL

        newest = _newest_checkpoint(Path(*self.storage))
        if newest is None or not (newest / MODEL).is_dir():
            raise RunError(f"the last checkpoint in {Path(*self.storage)} holds no model")
        others = without_weights(self.files)

        def moved(part: str) -> Any:
            def write(target: Path) -> None:
                weights = read_files(newest / part)
                for file in (newest / part).iterdir():
                    shutil.move(file, target / file.name)
                config = {k: v for k, v in weights.items() if k.endswith("config.json")}
                stored = [content for name, content in weights.items() if name.endswith(".safetensors")]
                write_folder(target, with_dtype({**others, **config}, stored) if part == MODEL else others)

            return write

        saved = self.folder.write_model(moved(MODEL))
        shutil.rmtree(newest / MODEL)
        if self.recipe.lora.rank:
            saved = swap_folder(self.folder.path / "adapter", moved("adapter"))
            shutil.rmtree(newest / "adapter")
        if self.recipe.save.path:
            put_files(Path(self.recipe.save.path), read_files(saved))

    def _close(self, kind: Any, error: Any, trace: Any) -> None:
        """Write the last rows, the status, the timeline and the report, however the run ended."""
        stopped = isinstance(error, (Stopped, KeyboardInterrupt))
        if isinstance(error, DiskFull):
            error.resumable = _steps_saved(Path(*self.storage)) is not None
        status = "done" if error is None else "stopped" if stopped else "failed"
        close_folder(self.folder, self.progress, self._last_works(), status, "" if error is None else str(error))

    def _last_works(self) -> Iterator[Callable[[], object]]:
        self.ledger.close()
        yield lambda: self.ledger.append_to(self.folder.path / "ledger.csv")
        if hasattr(self, "metrics"):
            yield self.metrics.close


def _initial_model(recipe: SupervisedRecipe) -> tuple[Path | None, Files]:
    """Return the folder that training begins with, and its files. A built-in task's policy has no folder."""
    if recipe.policy.path:
        folder = model_folder(recipe.policy.path, "policy.path").resolve()
        files = read_folder(folder)
        check_files(files)
        return folder, files
    from rlhfless_ray.learn.tiny_model import scratch_policy

    return None, scratch_policy(recipe, builtin_task(recipe.data.task))


def _second_model(recipe: SupervisedRecipe, tokenizer: Any) -> Path | None:
    """Return the folder of another reference or of the teacher."""
    key, path = ("teacher.path", recipe.teacher.path) if recipe.teacher.path else ("reference.path", recipe.reference.path)
    return other_model(path, key, tokenizer) if path else None


def _arrays(rows: SupervisedRows) -> list[Any]:
    return [x for part in (rows.train, rows.heldout) for x in (part.tokens, part.mask, part.lengths, part.context_lengths)]


def _newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that Ray Train has made in a folder."""
    found = [path for path in folder.glob("checkpoint_*") if (path / "progress.json").is_file()]
    return max(found, key=lambda path: path.name, default=None)


def _steps_saved(folder: Path) -> int | None:
    """Return the steps that the newest checkpoint has done, None without one."""
    newest = _newest_checkpoint(folder)
    return None if newest is None else int(json.loads((newest / "progress.json").read_text())["steps"])


def has_checkpoint(recipe: SupervisedRecipe) -> bool:
    """Return whether a run of this name has a checkpoint to continue from."""
    return bool(_folders_with_checkpoints(recipe))


def _newest_folder(recipe: SupervisedRecipe) -> RunFolder:
    """Return the newest of `<name>`, `<name>-2`, … with a checkpoint. Raises UserError if there is none."""
    found = _folders_with_checkpoints(recipe)
    if not found:
        where = Path(recipe.run.root) / recipe.run.name
        raise UserError(f"--resume: no run with a checkpoint in {where}; start it without --resume")
    return RunFolder(max(found, key=lambda p: (p / "status.json").stat().st_mtime if (p / "status.json").exists() else 0.0))


def _folders_with_checkpoints(recipe: SupervisedRecipe) -> list[Path]:
    root, name = Path(recipe.run.root), recipe.run.name
    family = [p for p in root.glob(f"{name}*") if p.name == name or p.name.removeprefix(f"{name}-").isdigit()]
    elsewhere = recipe.checkpoint.path
    return [p for p in family if _newest_checkpoint(Path(elsewhere) / p.name if elsewhere else p / CHECKPOINTS)]


def _root(error: BaseException) -> BaseException:
    """Return the error that a rank raised, of those that Ray Train wraps around it."""
    failures = getattr(error, "worker_failures", None)
    return next(iter(failures.values())) if failures else error
