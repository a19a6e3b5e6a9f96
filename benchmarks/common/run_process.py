"""Running a system as a process of its own: how long it took, what memory it needed, what it said when it failed."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.core_seconds import CoreSeconds
from benchmarks.common.peak_memory import PeakMemory
from benchmarks.common.run_metadata import ROOT

POLL_S = 0.1
GRACE_S = 30.0  # what the runtime may take to free its leases after SIGTERM
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class MeasuredProcess:
    """One run of one system. Rows of `steps` have at least step_s, generate_s, learn_s, reward_mean, tokens."""

    system: str
    steps: list[dict[str, float]]
    start_up_s: float  # from the start of the process to the start of its first step
    peak_mb: float  # 10⁶ bytes, all processes together
    processes: int
    wall_s: float
    versions: dict[str, str] = field(default_factory=dict)

    def steady(self, drop: int) -> list[dict[str, float]]:
        return self.steps[drop:]


@dataclass(frozen=True)
class ProcessResult:
    wall_s: float
    peak_mb: float
    processes: int
    appeared_s: float | None  # seconds until `watched` had a row of step 1
    cores: CoreSeconds | None = None


def run_process(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    watched: Path | None = None,
    timeout_s: float = 3600.0,
    memory: bool = True,
    cores: bool = False,
    folder: Path = ROOT,
) -> ProcessResult:
    """Run to the end in `folder`. Raises RuntimeError with the log's tail when it fails or takes longer than `timeout_s`.

    `memory`, `cores`: whether to sample peak memory, and CPU time.
    """
    start = time.monotonic()
    appeared: float | None = None
    with ExitStack() as stack:
        file = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=dict(environment) if environment is not None else None,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
        peak = PeakMemory(process.pid)
        if memory:
            stack.enter_context(peak)
        used = stack.enter_context(CoreSeconds(process.pid)) if cores else None
        stack.callback(end_process, process)
        while process.poll() is None:
            if appeared is None and watched is not None and _has_step(watched):
                appeared = time.monotonic() - start
            if time.monotonic() - start > timeout_s:
                raise RuntimeError(f"{command[0]} took longer than {timeout_s:.0f} s: {_tail(log)}")
            time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {_tail(log)}")
    return ProcessResult(time.monotonic() - start, peak.peak_mb, peak.processes, appeared, used)


def train(
    recipe: Path, overrides: Sequence[str], root: Path, *, name: str = "run", timeout_s: float = 3600.0
) -> tuple[ProcessResult, list[dict[str, Any]]]:
    """Train by the command line in the folder `name` below `root`. Returns also the rows of metrics.jsonl."""
    root.mkdir(parents=True, exist_ok=True)
    own = (f"run.root={root}", f"run.name={name}", "watch.progress='plain'")
    command = [sys.executable, "-m", "rlhfless_ray", "train", recipe, *own, *overrides]
    return run_process(command, root / f"{name}.log", timeout_s=timeout_s), read_metrics(root / name)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def end_process(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, on which the runtime frees its leases, then SIGKILL, unless it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_with_parent() -> None:
    """Runs in the new process: it gets SIGTERM when the benchmark dies, however that happens."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _has_step(metrics: Path) -> bool:
    return metrics.exists() and b'"step":1,' in metrics.read_bytes().replace(b" ", b"")


def _tail(log: Path) -> str:
    return " | ".join(line for line in log.read_text(errors="replace").splitlines()[-15:] if line.strip())
