"""Signals to the driver of a small real run and to each process of its private Ray, and what the run says and leaves then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from rlhfless_ray.local.watcher import agent_name

LIMIT_S = 20.0  # from a death to the last words and the report
STOPPED_S = 9.0  # how long a process stands still; a watcher says so after 5 s
START_S, END_S = 240.0, 240.0  # on a machine that does something else too
STEPS = 8
STEPS_STOPPED = 200  # a run goes on while some of Ray's processes stand still, and must not end before they are named
AGENTS = ("dashboard agent", "agent of runtime environments")
KILLED = ("raylet", "GCS", *AGENTS, "driver")
STOPPED = (*KILLED, "ExactEngineActor", "LearnerActor", "RewardActor")


@dataclass
class Struck:
    """What followed a signal."""

    code: int | None
    said: str  # on stderr
    status: dict[str, Any]
    seconds: float  # until driver, status and report were at their end
    left: list[str]  # processes

    def wrong_after_kill(self, what: str) -> list[str]:
        """Return what is not as it should be after SIGKILL."""
        name = "its driver, process" if what == "driver" else f"{what} (process"
        found = {
            "no sentence": name not in self.said or "--resume" not in self.said or "Traceback" in self.said,
            "status": self.status.get("status") != "failed" or name not in self.status.get("reason", ""),
            "exit code": self.code != (-signal.SIGKILL if what == "driver" else 1),
            "late": self.seconds > LIMIT_S,
            "processes left": bool(self.left),
        }
        return [name for name, is_wrong in found.items() if is_wrong]

    def wrong_after_stop(self) -> list[str]:
        """Return what is not as it should be after SIGSTOP and SIGCONT."""
        found = {
            "no sentence": "stands still" not in self.said,
            "status": self.status.get("status") != "done" or bool(self.status.get("reason")),
            "exit code": self.code != 0,
            "processes left": bool(self.left),
        }
        return [name for name, is_wrong in found.items() if is_wrong]


def small_recipe(folder: Path) -> Path:
    """Write the recipe of a run of a few seconds."""
    tree = {
        "run": {"name": "struck", "root": str(folder / "runs"), "steps": STEPS},
        "policy": {"hidden_size": 64, "layers": 2},
        "prompts": {"task": "chain", "batch_prompts": 8, "rows": 64},
        "warm_start": {"steps": 0},
        "evaluate": {"prompts": 0},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 24, "kv_cache_mb": 64, "max_running": 64, "max_actors": 1},
        "reward": {"function": "task"},
        "checkpoint": {"every_steps": 1},
        "watch": {"progress": "plain", "tensorboard": False, "wandb": "off", "samples_per_step": 0},
    }
    file = folder / "struck.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def train(recipe: Path, errors: Path, *options: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "rlhfless_ray", "train", str(recipe), *options]
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with errors.open("wb") as file:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file, env=kept)


def strike(folder: Path, what: str, number: signal.Signals = signal.SIGKILL) -> Struck:
    """Start a run, send a signal to one of its processes once it has saved a step, and wait for what follows.

    After SIGSTOP the process goes on after STOPPED_S, and the run to its end.
    """
    recipe, errors = small_recipe(folder), folder / f"{what}.stderr"
    driver = train(recipe, errors, *([f"run.steps={STEPS_STOPPED}"] if number == signal.SIGSTOP else []))
    run, processes = folder / "runs" / "struck", list[psutil.Process]()
    try:
        _wait(lambda: driver.poll() is not None or any((run / "checkpoints").glob("step_[1-9]*")), START_S, "a saved step")
        processes = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        victim = next(process for process in processes if name_of(process, driver.pid) == what)
        victim.send_signal(number)
        began_s = time.monotonic()
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            with suppress(psutil.Error):  # the run has replaced it
                victim.send_signal(signal.SIGCONT)
        report = run / "report.html"
        _wait(lambda: driver.poll() is not None, END_S, "the driver to end")
        _wait(lambda: report.exists() and not alive(processes), LIMIT_S, "the report", required=False)
        seconds = time.monotonic() - began_s
        status = json.loads((run / "status.json").read_text())
        return Struck(driver.returncode, errors.read_text(), status, seconds, alive(processes))
    finally:
        for process in processes or [psutil.Process(driver.pid)]:
            with suppress(psutil.Error):
                process.kill()
        driver.wait()


def resume(folder: Path) -> int:
    """Go on with the run of a folder. Returns the exit code."""
    return train(folder / "struck.yaml", folder / "resumed.stderr", "--resume").wait(END_S)


def alive(processes: list[psutil.Process]) -> list[str]:
    return [title for process in processes if (title := " ".join(_command(process))) and process.is_running()]


def name_of(process: psutil.Process, driver: int) -> str:
    """Return a process's name as in `KILLED` and `STOPPED`, "" for another one."""
    command = _command(process) or [""]
    program = os.path.basename(command[0])
    if process.pid == driver:
        return "driver"
    if program.startswith("ray::") and "::" in program:
        return program.removeprefix("ray::").split(".")[0]
    return {"raylet": "raylet", "gcs_server": "GCS"}.get(program) or agent_name(command)


def _command(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


def _wait(is_done: Any, seconds: float, what: str, *, required: bool = True) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            if required:
                raise TimeoutError(f"no sign of {what} within {seconds:.0f} s")
            return
        time.sleep(0.1)


def signalled(folder: Path, count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Strike `count` runs, each by another signal to another process. Returns the part of a result as `benchmarks.chaos` has it."""
    kinds = [(what, signal.SIGKILL) for what in KILLED] + [(what, signal.SIGSTOP) for what in STOPPED]
    found: dict[str, Any] = {"faults": {}, "wrong": {}, "left": {}, "seconds": {}}
    for place in np.random.default_rng(seed).permutation(len(kinds))[:count]:
        what, number = kinds[place]
        name = f"{what} {'killed' if number == signal.SIGKILL else 'stopped'}"
        own = folder / name.replace(" ", "-")
        own.mkdir()
        struck = strike(own, what, number)
        wrong = struck.wrong_after_kill(what) if number == signal.SIGKILL else struck.wrong_after_stop()
        if number == signal.SIGKILL and resume(own):
            wrong.append("no resume")
        found["faults"][name], found["seconds"][name] = 1, struck.seconds
        found["wrong"] |= {f"{name}: {one}": 1 for one in wrong}
        say(f"{name}: {', '.join(wrong) or 'as it should be'} after {struck.seconds:.1f} s")
    return found
