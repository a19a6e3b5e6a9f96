"""Whole runs on real parts: what they leave behind, stopping, resuming, faults, and that everything is released."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhfless_ray.functions.ledger import read_ledger
from tests.conftest import ROOT, environment, samples, write_recipe
from tests.run_files import rows as metrics

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def own_surroundings(folder: Path) -> dict[str, str]:
    """An environment that marks the processes of a test, with a folder for their temporary files."""
    temporary = tempfile.mkdtemp(dir="/tmp")  # a short path: sockets lie in it
    return {**environment(), "RLHFLESS_TEST": str(folder), "TMPDIR": temporary}


def ours_alive(own: dict[str, str]) -> list[str]:
    """Command lines of living processes with the mark."""
    marker = f"RLHFLESS_TEST={own['RLHFLESS_TEST']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().decode().replace("\0", " "))
            except OSError:
                continue
    return found


def assert_nothing_left(alive: Callable[[], list[str]], temporary: str) -> None:
    """No process that `alive` finds, and no session folder of Ray's among the temporary files."""
    deadline = time.monotonic() + 90  # a busy machine may need long to end processes
    while alive() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alive() == []
    assert [path.name for path in Path(temporary).iterdir() if path.name.startswith("rlhfless")] == []
    shutil.rmtree(temporary)


def train(own: dict[str, str], *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in these surroundings to its end, after which nothing is left."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=own, capture_output=True, text=True, timeout=480, **more)
    assert_nothing_left(lambda: ours_alive(own), own["TMPDIR"])
    return done


def test_the_run_folder_holds_what_was_promised(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names >= {
        "recipe.yaml",
        "metrics.jsonl",
        "ledger.csv",
        "timeline.json",
        "samples",
        "checkpoints",
        "model",
        "report.html",
        "status.json",
    }
    rows = metrics(uninterrupted)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert json.loads((uninterrupted / "status.json").read_text())["status"] == "done"
    for step in range(1, 5):
        written = samples(uninterrupted, step)
        assert len(written) == 32
        assert rows[step]["reward/mean"] == pytest.approx(np.mean([s["reward"] for s in written]))
        assert {s["version"] for s in written} == {step - 1}  # sampled with the weights of the step before
        assert rows[step]["learn/mismatch_max"] < 1e-4
        assert rows[step]["learn/grad_norm"] > 0
    assert rows[-1]["reward/mean"] > rows[1]["reward/mean"]  # it learns to be short
    assert not any("lag" in name or "effective" in name for row in rows for name in row)


def test_the_ledger_accounts_for_every_phase_and_engines_hold_nothing_while_the_learner_works(uninterrupted):
    rows = read_ledger(uninterrupted / "ledger.csv")
    assert {row.kind for row in rows} == {"rollout", "score", "learn"}
    held = [row for row in rows if row.slots]
    learning = [row for row in held if row.kind == "learn" and row.activity == "work"]
    rollout = [row for row in held if row.kind == "rollout"]
    assert len(learning) >= 4
    for one in learning:
        assert not [1 for other in rollout if min(one.to_s, other.to_s) - max(one.from_s, other.from_s) > 1e-3]  # overlap is off
    by_lease: dict[str, list[tuple[float, float]]] = {}
    for row in held:
        by_lease.setdefault(row.lease, []).append((row.from_s, row.to_s))
    kept = [row for row in rows if row.activity == "parked" and row.memory_mb]
    assert {row.kind for row in kept} >= {"rollout", "learn"} and all(row.money > 0 for row in kept), "what is kept is billed"
    for intervals in by_lease.values():  # one holder at a time
        ordered = sorted(intervals)
        assert all(later[0] - earlier[1] > -1e-3 for earlier, later in itertools.pairwise(ordered))


def test_the_final_model_loads_in_transformers_and_is_the_last_checkpoint(uninterrupted):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "model")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "model")
    saved = load_file(uninterrupted / "checkpoints" / "step_4" / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items() if name in saved)
    assert tokenizer.decode(tokenizer("5Q3=").input_ids) == "5Q3="


TERMINATED = '''
import os, signal
from rlhfless_ray.cli.main import main
from rlhfless_ray.session.rollout_session import RolloutSession

take = RolloutSession.take

def terminated(self, step):
    """SIGTERM comes as the fourth step begins, to all of the driver's group, as batch systems send it: Ray is not in it."""
    if step.number == 4:
        os.killpg(0, signal.SIGTERM)
    take(self, step)

RolloutSession.take = terminated
main()
'''

STOPPED_LATE = '''
import json, os, signal, sys
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.errors import Stopped
from rlhfless_ray.runtime.evaluation import Evaluations

recipe = Recipe.load(sys.argv[1])

evaluate = Evaluations.evaluate

def interrupted(self):
    """Ctrl-C comes inside the last evaluation, after the last update."""
    if self.records.state.steps_done == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return evaluate(self)

Evaluations.evaluate = interrupted

try:
    with Runtime(recipe, resume=True) as run:
        for step in run:
            pass
except Stopped as stop:
    heavy = {"torch", "transformers", "vllm", "datasets"} & set(sys.modules)
    print(json.dumps([stop.resumable, sorted(heavy)]))
'''


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory) -> Path:
    """The same run, told to stop by SIGTERM after its third step, resumed, stopped by Ctrl-C after its last update, and resumed."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = write_recipe(folder, run__sigterm_s=90.0)  # the machine of a test may be busy
    first = train(own_surroundings(folder), "-c", TERMINATED, "train", recipe, start_new_session=True)
    assert first.returncode == 128 + signal.SIGTERM, first.stderr
    assert "continue with --resume" in first.stderr
    run = folder / "runs" / "small"
    assert json.loads((run / "status.json").read_text())["status"] == "stopped"
    assert (run / "report.html").exists() and (run / "checkpoints" / "step_3").is_dir()

    late = train(own_surroundings(folder), "-c", STOPPED_LATE, recipe)
    assert late.returncode == 0, late.stderr
    resumable, heavy = json.loads(late.stdout.splitlines()[-1])
    assert resumable and heavy == [], "a driver of a built-in policy imports none of the heavy libraries"
    assert json.loads((run / "status.json").read_text())["status"] == "stopped" and not (run / "model").exists()
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and "eval/accuracy_greedy" not in rows[-1]

    resumed = train(own_surroundings(folder), "-m", "rlhfless_ray", "train", recipe, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    return run


def test_a_resumed_run_equals_the_uninterrupted_one(uninterrupted, stopped_and_resumed):
    for step in range(1, 5):
        assert samples(stopped_and_resumed, step) == samples(uninterrupted, step)
    one, other = (run / "model" / "model.safetensors" for run in (uninterrupted, stopped_and_resumed))
    assert one.read_bytes() == other.read_bytes()
    rows = metrics(stopped_and_resumed)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["eval/accuracy_greedy"] == metrics(uninterrupted)[-1]["eval/accuracy_greedy"]


def test_a_resumed_run_continues_its_ledger(stopped_and_resumed):
    rows = read_ledger(stopped_and_resumed / "ledger.csv")
    assert {row.step for row in rows} == {0, 1, 2, 3, 4}
    last = metrics(stopped_and_resumed)[-1]
    full = sum(row.seconds * row.slots for row in rows if row.to_s <= last["time_s"])
    assert last["cost/total_full_slot_s"] == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("moment", ["gcs_server", "status.json"])
def test_a_stop_while_it_starts_leaves_nothing_behind_and_promises_nothing(tmp_path, moment):
    """SIGTERM to the whole group while Ray starts, then right after the run folder was made."""
    recipe, own = write_recipe(tmp_path, warm_start__steps=5000, run__seed=time.time_ns() % 2**31), own_surroundings(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhfless_ray", "train", recipe],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=own,
        start_new_session=True,
    )
    run = tmp_path / "runs" / "small"
    while process.poll() is None and not (run / moment).exists() and not any(moment in line for line in ours_alive(own)):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "nothing to resume from yet" in said and "Traceback" not in said
    assert_nothing_left(lambda: ours_alive(own), own["TMPDIR"])
    assert not run.exists() or json.loads((run / "status.json").read_text())["status"] == "stopped"


def living(sessions: set[int]) -> list[str]:
    """Command lines of the processes in these sessions."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Segments by name that these processes have mapped or open."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            lines = (Path("/proc") / str(pid) / "maps").read_text().split()
            found |= {word for word in [*lines, *map(os.readlink, Path(f"/proc/{pid}/fd").iterdir())] if word.startswith("/dev/shm/")}
    return found


def test_a_driver_that_is_killed_leaves_nothing_behind(tmp_path, cold_workers):
    """SIGKILL, after which no line of ours runs, in the midst of a run with engines, a learner and the prefix service."""
    recipe = write_recipe(tmp_path, run__steps=1000, rollout__prefix_kv="on", evaluate__prompts=0)
    temporary = tempfile.mkdtemp(dir="/tmp")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhfless_ray", "train", recipe],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**environment(), "TMPDIR": temporary},
        start_new_session=True,
    )
    for line in process.stdout:
        if line.split()[:1] == ["step"]:
            break
    pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    sessions, segments = set[int](), shared_memory(pids)
    for pid in pids:
        with suppress(ProcessLookupError):  # Ray starts some for a moment
            sessions.add(os.getsid(pid))
    running = living(sessions)
    assert {name for name in ("ServeReplica", "ExactEngineActor", "LearnerActor") if any(name in line for line in running)} == {
        "ServeReplica",
        "ExactEngineActor",
        "LearnerActor",
    }, running
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert_nothing_left(lambda: living(sessions), temporary)
    assert [name for name in segments if Path(name).exists()] == []
