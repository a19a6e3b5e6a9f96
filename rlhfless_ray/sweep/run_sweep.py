"""Run a sweep: start runs as others end, end those that fall behind, and record the result of each."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import RunError, Stopped, UserError
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.local.slot_check import check_slots
from rlhfless_ray.preflight.memory_check import cluster_room, local_room, starts_ray
from rlhfless_ray.preflight.memory_needs import Room
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder, check_writable
from rlhfless_ray.sweep.halving import Halving
from rlhfless_ray.sweep.sweep_file import PlannedRun, Sweep, check_shares
from rlhfless_ray.sweep.sweep_folder import FINISHED, GrowingMetrics, RunState, State, SweepFolder
from rlhfless_ray.sweep.sweep_memory import check_memory, most_runs, with_part_of_memory
from rlhfless_ray.sweep.sweep_report import write_sweep_report
from rlhfless_ray.sweep.sweep_table import SweepDisplay

POLL_S = 0.5  # interval at which runs are checked
END_S = 600.0  # time for a run to save and end once it was asked to; an update of a large policy takes minutes
HURRY_S = 30.0  # the same after a second Ctrl-C, without saving


@dataclass
class RunningRun:
    """A running run. `asked`: the state in which it was asked to end."""

    run: PlannedRun
    state: RunState
    process: subprocess.Popen[bytes]
    asked: State | None = None


def next_runs(waiting: list[PlannedRun], running: list[PlannedRun], at_most: int, made: Mapping[str, bool]) -> list[PlannedRun]:
    """Return the runs to start now, in the sweep's order.

    A run waits while another run creates its initial policy from scratch. `made`: whether each such policy exists.
    """
    busy = {run.policy_key for run in running if run.policy_key and not made[run.policy_key]}
    chosen: list[PlannedRun] = []
    for run in waiting:
        if len(running) + len(chosen) >= at_most:
            break
        key = run.policy_key
        if key and not made[key]:
            if key in busy:
                continue
            busy.add(key)
        chosen.append(run)
    return chosen


class SweepRunner:
    """A running sweep. `run` returns once every run has ended."""

    def __init__(self, sweep: Sweep, *, resume: bool = False, resume_changed: bool = False) -> None:
        """Check everything that does not need Ray. Raises UserError."""
        file = sweep.file
        self.sweep, self.resume, self.resume_changed = sweep, resume, resume_changed
        self.folder = SweepFolder.resumed(sweep) if resume else SweepFolder.new(sweep)
        if resume:
            check_writable(self.folder.path, "--resume:")
        self.states = {state.name: state for state in self.folder.states}
        self.metrics: dict[str, GrowingMetrics] = {}
        self.waiting = [run for run in sweep.runs if self.states[run.name].state not in FINISHED]
        self.running: list[RunningRun] = []
        most_steps = max(run.recipe.run.steps or 10_000 for run in sweep.runs)
        section = file.early_stopping
        self.halving = Halving(section, file.metric, file.direction, self.states, most_steps) if section else None
        self.environment = dict(os.environ)
        self.at_most, self.note = 1, ""
        self.private = starts_ray(self._first_recipe())
        if self.private:
            self._limit_runs(local_room(self._first_recipe()))

    def run(self) -> Path:
        """Run all runs, and return the sweep's folder.

        Raises RunError if a run failed, and Stopped after a stop signal, once all runs have saved and ended.
        """
        with ExitStack() as stack:
            self._start_cluster(stack)
            if not self.resume:
                self.folder.create()
            stack.enter_context(self.folder.locked())
            self.display = SweepDisplay(self.sweep, self.folder.states)
            stack.push(self._close)
            if self.note:
                self.display.message(self.note)
            for name in self.states:
                self.metrics[name] = GrowingMetrics(self.folder.path / name / "metrics.jsonl")
                self._read(name)  # rows from before a resume end no run, but later runs are compared with them
            while self.waiting or self.running:
                self._start_runs()
                time.sleep(POLL_S)
                STOP.check()
                for running in list(self.running):
                    self._look_at(running)
                self._write("running")
        failed = [state.name for state in self.folder.states if state.state == "failed"]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(self.states)} runs failed: {', '.join(failed)}; their logs are in {self.folder.path / 'logs'}, and "
                "--resume tries them again"
            )
        return self.folder.path

    def _start_cluster(self, stack: ExitStack) -> None:
        """Join the given cluster, or start a private Ray that all runs join."""
        recipe = self._first_recipe()
        cluster = RayCluster(recipe, store_mb=RayCluster.largest_store_mb(recipe), architectures=())
        stack.enter_context(cluster.running())
        import ray

        resource = cluster.resource()
        if not self.private:
            self._limit_runs(cluster_room(cluster, recipe, resource))
        self.environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def _first_recipe(self) -> Recipe | SupervisedRecipe:
        """Return the first run's recipe on the sweep's cluster, whose kind of slots is that of all runs."""
        return self.sweep.runs[0].recipe.model_copy(update={"cluster": self.sweep.file.cluster})

    def _limit_runs(self, room: Room) -> None:
        """Decide how many runs work at once. Raises UserError if so many, or one of the runs, have no slots or no memory."""
        wanted = self.sweep.file.at_most
        if wanted != "auto" and wanted > room.slots:
            raise UserError(f"at_most: {wanted} runs need at least a slot each, but there are {room.slots} ({room.resource}); lower it")
        for run in self.waiting:
            try:
                check_slots(run.recipe, room.slots, room.resource)
            except UserError as error:
                raise UserError(f"run {run.name}: {error}") from None
        at_once = None if wanted == "auto" else max(1, min(wanted, len(self.waiting)))
        fitting, why = most_runs(self.waiting, room, at_once)
        self.at_most = at_once or fitting
        check_shares(self.waiting, self.at_most)
        check_memory(self.waiting, self.at_most, room)
        if wanted == "auto":
            self.note = f"runs at once: {fitting}; {why}"
            self.sweep = replace(self.sweep, file=self.sweep.file.model_copy(update={"at_most": fitting}))
        elif self.at_most > fitting:
            self.note = f"the memory may not be enough for {self.at_most} runs at once: {why}; at_most: auto starts {fitting}"

    def _start_runs(self) -> None:
        from rlhfless_ray.weights.load_policy import cache_folder

        keys = {run.policy_key for run in self.sweep.runs if run.policy_key}
        made = {key: (cache_folder() / "policies" / key).is_dir() for key in keys}
        for run in next_runs(self.waiting, [running.run for running in self.running], self.at_most, made):
            self.waiting.remove(run)
            self._start(run)

    def _start(self, run: PlannedRun) -> None:
        state, path = self.states[run.name], self.folder.path
        folder = path / run.name
        _end_leftover(folder)
        recipe = with_part_of_memory(run.recipe, self.at_most).with_settings({"run.root": str(path)})
        resumes = _has_checkpoint(recipe, folder)
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it saved anything
        file = self.folder.recipe_file(run.name)
        replace_file(file, recipe.to_yaml().encode())
        words = [sys.executable, "-m", "rlhfless_ray", "train", str(file), *self._resume_options(resumes)]
        with (path / "logs" / f"{run.name}.log").open("ab") as log:
            # a session of its own: Ctrl-C reaches the sweep alone, which then asks each run to end
            process = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        state.state, state.reason = "running", ""
        self.running.append(RunningRun(run, state, process))
        self.display.message(f"{run.name}: {'goes on from its checkpoint' if resumes else 'started'}")

    def _resume_options(self, resumes: bool) -> list[str]:
        return (["--resume", "--resume-changed"] if self.resume_changed else ["--resume"]) if resumes else []

    def _read(self, name: str) -> int | None:
        """Read the new rows of a run's metrics. Returns the step at which it turns out to have fallen behind."""
        rows = self.metrics[name].new_rows()
        self.states[name].read(rows, self.sweep.file.metric)
        behind = [int(row["step"]) for row in rows if self.halving is not None and self.halving.ends(name, row)]
        return behind[0] if behind else None

    def _look_at(self, running: RunningRun) -> None:
        """Read what a run has written, end it if it has fallen behind, and take it from the running ones if it has ended."""
        code, state = running.process.poll(), running.state
        behind = self._read(running.run.name)
        if behind is not None and code is None and running.asked is None:
            state.reason = f"it fell behind at step {behind}"
            self._ask(running, "ended early", signal.SIGINT)
        if code is None:
            return
        self.running.remove(running)
        if code == 0:
            state.state, state.reason = "done", ""
        elif running.asked is not None and code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            state.state = running.asked
        else:
            state.state, state.reason = "failed", self._failure(running.run.name, code)
        self.display.message(f"{running.run.name}: {state.state}{f': {state.reason}' if state.reason else f' after {state.step} steps'}")

    def _failure(self, name: str, code: int) -> str:
        """Return the last line that a run printed: the sentence that `rlhfless train` ends with."""
        lines = (self.folder.path / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last[:300] if code > 0 and last else f"ended by signal {-code}" if code < 0 else f"exit code {code}"

    def _ask(self, running: RunningRun, state: State, number: int) -> None:
        running.asked = running.asked or state  # one that fell behind before the sweep was stopped does not go on when it is resumed
        if running.process.poll() is None:
            running.process.send_signal(number)

    def _close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ask running runs to save and end, wait for them, and write table, file and report."""
        stopped = isinstance(error, (Stopped, KeyboardInterrupt))
        number = error.signal_number if isinstance(error, Stopped) else signal.SIGINT
        if self.running:
            self.display.message(f"stopping {len(self.running)} runs, which save first; press Ctrl-C again to wait for nothing")
        STOP.acknowledge()
        for running in self.running:
            self._ask(running, "stopped", number)
        until = time.monotonic() + END_S
        while self.running and time.monotonic() < until:
            time.sleep(POLL_S / 5)
            for running in list(self.running):
                self._look_at(running)
            if STOP.acknowledge() is not None:  # a second Ctrl-C, which ends each run at once
                until = min(until, time.monotonic() + HURRY_S)
                for running in self.running:
                    self._ask(running, "stopped", signal.SIGINT)
        for running in list(self.running):
            running.process.kill()
            running.process.wait(10)
            self._look_at(running)
        states = [state.state for state in self.folder.states]
        whole = all(state in FINISHED for state in states)
        self._write("done" if whole else "stopped" if stopped else "failed")
        self.display.close()
        self.display.message(f"report: {(self.folder.path / 'report.html').resolve()}")
        if isinstance(error, Stopped):
            error.resumable = True

    def _write(self, status: str) -> None:
        self.folder.write(self.sweep, status)
        if status != "running":
            write_sweep_report(self.folder.path)


def _has_checkpoint(recipe: Recipe | SupervisedRecipe, folder: Path) -> bool:
    if isinstance(recipe, Recipe):
        return bool(Checkpoints(recipe.checkpoint, folder).list())
    from rlhfless_ray.supervise.find_checkpoints import has_checkpoint

    return has_checkpoint(recipe)


def _end_leftover(folder: Path) -> None:
    """End the driver of a run that a killed sweep left at work. Raises RunError if it does not end."""
    run, until, signalled = RunFolder(folder), time.monotonic() + END_S, False
    while folder.is_dir():
        try:
            with run.locked():
                return
        except UserError:  # its driver is at work
            status = run.read_status()
            if not signalled and status.get("host") == platform.node() and status.get("pid"):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(status["pid"]), signal.SIGINT)
                signalled = True
        if time.monotonic() > until:
            raise RunError(f"{folder}: another process still writes it after {END_S:.0f} s; end it and use --resume")
        STOP.check()
        time.sleep(POLL_S)
