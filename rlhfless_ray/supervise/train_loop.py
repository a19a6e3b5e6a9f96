"""The loop over optimizer steps, which each rank of a supervised stage runs under Ray Train."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import zlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import ray.train
import torch

from rlhfless_ray.common.deadlines import fetch
from rlhfless_ray.common.disk_space import FULL, DiskFull
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.rank_state import read_state
from rlhfless_ray.local.laptop.cpu_bfloat16 import note
from rlhfless_ray.local.memory_watch import MemoryWatch
from rlhfless_ray.recipe.supervised_sections import WITH_REFERENCE
from rlhfless_ray.run.checkpoint_files import write_checksums
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.supervise.examples import Examples
from rlhfless_ray.supervise.find_checkpoints import PROGRESS, RANKS, newest_checkpoint
from rlhfless_ray.supervise.rank_start import INBOX, MODEL, VISIBLE, RankStart
from rlhfless_ray.supervise.supervised_rank import StepResult, SupervisedRank
from rlhfless_ray.types import Span
from rlhfless_ray.weights.adapter import CONFIG as ADAPTER_CONFIG
from rlhfless_ray.weights.adapter import with_base
from rlhfless_ray.weights.model_folder import move_model, read_content, write_folder
from rlhfless_ray.weights.tensor_file import Files, checksum

REFERENCES = "reference_logprobs.npz"
SPARE_BYTES = 2**16  # for each rank, beside its files: folders, blocks that are not full, Ray Train's list of checkpoints


def run_rank(start: RankStart) -> None:
    """Train until the last step, or until the driver asks to stop."""
    try:
        _Loop(start).run()
    except (UserError, RunError) as error:  # another attempt would fail in the same way
        fetch(start.inbox.post.remote("error", error), start.recipe.learner.deadline_s, INBOX)


class _Loop:
    def __init__(self, start: RankStart) -> None:
        context = ray.train.get_context()
        self.start, self.recipe, self.order = start, start.recipe, start.order
        self.rank, self.ranks = context.get_world_rank(), context.get_world_size()
        node = ray.get_runtime_context().get_node_id()
        device = os.environ[VISIBLE] if start.devices else str(context.get_local_rank())
        self.post("began", (self.rank, node, device, os.getpid(), psutil.Process().create_time()))
        torch.set_num_threads(start.threads)
        self.memory = None if node == start.driver_node else MemoryWatch(private=True, job="")
        alive = partial(self.post, "alive", None)
        self.work = SupervisedRank(self.recipe, self.order.schedule_steps, self.rank, self.ranks, start.device, alive)
        self.saved = -1
        if sentence := note():
            self.post("note", sentence)

    def post(self, kind: str, content: object) -> bool:
        return bool(self._fetch(self.start.inbox.post.remote(kind, content), INBOX))

    def _fetch(self, ref: object, what: str) -> Any:
        return fetch(ref, self.recipe.learner.deadline_s, f"{what} (learner.deadline_s)")

    def run(self) -> None:
        begin = time.time()
        train, heldout = self._fetch(self.start.data, "the rows")
        done = self._open([train, heldout])
        if self.rank == 0:
            self.post("opened", done)
        self._span("start", "open", begin)
        stops, steps = False, self.order.steps
        # a reward model's config.json has the scale of its rewards, which no checkpoint keeps
        if len(heldout) and (done == 0 or (done == steps and self.recipe.task == "rm")):
            self._evaluate(heldout, done)
        while done < steps and not stops:
            begin = time.time()
            result = self.work.step(train, self.order.step(done))
            done += 1
            stops = self._report_step(done, result, begin)
            if len(heldout) and self._evaluates_after(done):
                self._evaluate(heldout, done)
            section = self.recipe.checkpoint
            if section.every_steps and done % section.every_steps == 0:
                if section.save_hf:
                    self._save_folder(done)
                if section.resumable and done < steps:
                    self._save(done)
        self._save(done, model=done == steps)

    def _evaluates_after(self, done: int) -> bool:
        section, order = self.recipe.evaluate, self.order
        epoch_ends = section.each_epoch and done % order.steps_per_epoch == 0
        return done == order.steps or epoch_ends or bool(section.every_steps and done % section.every_steps == 0)

    def _open(self, data: list[Examples]) -> int:
        """Open the engine, from the newest checkpoint if there is one. Returns the number of finished steps."""
        state, done = None, 0
        model = self.start.model if isinstance(self.start.model, Path) else self._fetch(self.start.model, "the first model")
        references, names, known = self.start.storage / REFERENCES, [], None
        if self.recipe.task in WITH_REFERENCE:
            other = f"-{zlib.crc32(bytes(self.start.second)):08x}" if self.start.second else ""
            names = [examples.checksum + other for examples in data]
            stored = np.load(references) if references.is_file() else {}
            if all(name in stored for name in names):
                known = [stored[name] for name in names]
        with ExitStack() as stack:
            checkpoint = ray.train.get_checkpoint()
            if checkpoint is None and (newest := newest_checkpoint(self.start.storage)):  # Ray Train's list of them was torn
                checkpoint = ray.train.Checkpoint.from_directory(str(newest))
            if checkpoint is not None:
                folder = Path(stack.enter_context(checkpoint.as_directory()))
                state = read_state({file.name: read_content(file) for file in sorted(folder.iterdir()) if file.is_file()})
                done = int(json.loads((folder / PROGRESS).read_text())["steps"])
            reference_sums = self.work.open(model, self.start.second, data, known, state, self.start.reward_tokens)
        if reference_sums and known is None and self.rank == 0:
            references.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=references.parent, suffix=".npz", delete=False) as file:
                np.savez(file, **dict(zip(names, reference_sums, strict=True)))  # type: ignore[arg-type]
            os.replace(file.name, references)
        return done

    def _report_step(self, done: int, result: StepResult, begin_s: float) -> bool:
        """Report a step to the driver. Returns whether the ranks should stop."""
        end_s = time.time()
        seconds = end_s - begin_s
        posted = self._span("work", "update", begin_s, end_s)
        if self.memory is not None:  # the answer follows that to the span
            posted = self.start.inbox.post.remote("memory", (self.rank, self.memory.take()))
        if self.ranks > 1:  # what all ranks tell of a step reaches the driver before it
            self._fetch(posted, INBOX)
            self._sum(0.0)
        stops = False
        if self.rank == 0:
            row = {
                **{f"learn/{name}": value for name, value in result.metrics.items()},
                "learn/grad_norm": result.grad_norm,
                "learn/learning_rate": result.learning_rate,
                "learn/next_learning_rate": result.next_learning_rate,
                "learn/skipped": float(bool(result.skipped)),
                "tokens/trained": float(result.trained_tokens),
                "tokens/per_s": result.tokens / seconds,
                "step_s": seconds,
            }
            stops = self.post("step", (done, row, result.skipped, end_s))
        return bool(self._sum(float(stops)))

    def _evaluate(self, heldout: Examples, done: int) -> None:
        begin = time.time()
        result = self.work.evaluate(heldout)
        self._span("work", "evaluate", begin)
        if self.rank == 0:
            self.post("evaluation", (done, {f"eval/{name}": value for name, value in result.metrics.items()}))

    def _save(self, done: int, model: bool = False) -> None:
        """Report a checkpoint: every rank its part of the state, and of the model if `model`."""
        if self.saved == done:
            return
        begin = time.time()
        with tempfile.TemporaryDirectory(prefix="rlhfless-checkpoint-") as name:
            folder = Path(name)
            own: Files = dict(self.work.trainer.state_files())
            if self.rank == 0:
                own = {**own, PROGRESS: json.dumps(self._progress(done)).encode()}
            has_space = _has_written(folder, own)
            if has_space:
                sums = {name: checksum(content) for name, content in own.items()}
                write_checksums(folder, sums, f"checksums-{self.rank:05d}-of-{self.ranks:05d}.json")
            if model:
                has_space &= self._has_written_model(folder / MODEL)
                if self.recipe.lora.rank:
                    has_space &= self._has_written_model(folder / "adapter", adapter=True)
            if self._sum(float(not has_space)):
                raise DiskFull(folder.parent)
            self._check_space(folder)
            ray.train.report({"steps": done}, checkpoint=ray.train.Checkpoint.from_directory(name))
        self.saved = done
        self._span("work", "checkpoint", begin)
        if self.rank == 0:
            self.post("saved", done)

    def _progress(self, done: int) -> JsonObject:
        recipe = self.recipe.model_dump(mode="json")
        return {"steps": done, "order": self.order.state(), "model": dict(self.start.sizes), "recipe": recipe, RANKS: self.ranks}

    def _save_folder(self, done: int) -> None:
        """Write the model, or the adapter, as a Hugging Face folder beside the checkpoints."""
        begin, has_adapter = time.time(), bool(self.recipe.lora.rank)
        folder = self.start.storage.with_name(f"global_step{done}_hf")
        parts = folder.with_name(f".{folder.name}.parts")  # every rank writes its files here
        if self.rank == 0:
            shutil.rmtree(parts, ignore_errors=True)  # left by a killed run
        self._sum(0.0)
        has_space = self._has_written_model(parts, has_adapter)
        if self._sum(float(not has_space)):
            shutil.rmtree(parts, ignore_errors=True)
            raise DiskFull(folder.parent)
        if self.rank == 0:
            others = self._fetch(self.start.others, "the tokenizer's files")
            swap_folder(folder, lambda target: move_model(parts, target, others))
            parts.rmdir()
        self._span("work", "checkpoint", begin)

    def _check_space(self, folder: Path) -> None:
        """Raise DiskFull on all ranks if the files of a checkpoint have no space at its place.

        Ray Train would stop in the middle of its copy, and tear its list of checkpoints too.
        """
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        needed = self._sum(float(size + SPARE_BYTES))
        there = next(path for path in (self.start.storage, *self.start.storage.parents) if path.is_dir())
        if self._sum(float(needed > shutil.disk_usage(there).free)):
            raise DiskFull(self.start.storage)

    def _sum(self, number: float) -> float:
        """Return the sum of the ranks' numbers."""
        total = torch.tensor([number], dtype=torch.float64, device=self.work.device)
        if self.ranks > 1:
            torch.distributed.all_reduce(total)
        return float(total.item())

    def _model(self, adapter: bool = False) -> Files:
        """Return this rank's files of the model, or of the adapter. Every rank must call it."""
        files = self.work.trainer.model_files(trained=adapter)
        if self.rank:
            return files
        if adapter and isinstance(self.start.model, Path):
            return {**files, ADAPTER_CONFIG: with_base(bytes(files[ADAPTER_CONFIG]), str(self.start.model))}
        return {**files, "config.json": self.work.config()} if self.recipe.task == "rm" and not adapter else files

    def _has_written_model(self, folder: Path, adapter: bool = False) -> bool:
        """Write this rank's files of the model or of the adapter. Returns whether the disk had space."""
        files = self._model(adapter)
        return not files or _has_written(folder, files)

    def _span(self, activity: str, what: str, begin_s: float, end_s: float | None = None) -> Any:
        """Post a span, and return a reference to the answer."""
        span = Span(activity, what, begin_s, time.time() if end_s is None else end_s)
        return self.start.inbox.post.remote("spans", (self.rank, [span]))


def _has_written(folder: Path, files: Files) -> bool:
    """Write files, and return whether the disk had space for them. A rank alone must not fail: the others would wait for it."""
    try:
        write_folder(folder, files)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False
    return True
