"""What outlives a driver: whom it takes for dead or stopped, what it writes then, and whom it leaves alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.local import watcher_process
from rlhfless_ray.local.laptop.local_ray import STAND_IN
from rlhfless_ray.local.watcher import agent_name
from rlhfless_ray.local.watcher_process import read_status
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.runtime import last_words
from rlhfless_ray.weights.remote_folder import writer
from tests.conftest import ROOT, lives, small_recipe

pytestmark = pytest.mark.slow  # each starts processes

WORDS = """
import json, pathlib, sys
status = pathlib.Path(sys.argv[1], "status.json")
status.write_text(json.dumps({**json.loads(status.read_text()), "reason": sys.argv[2] + "; saved"}))
sys.stderr.write(f"words: {sys.argv[2]}\\n")
"""
QUICK = {"LOOK_MS": 100, "STILL_S": 0.4, "END_S": 1.0}  # constants of the program, so that tests need not wait
PATIENCE_S = 30.0  # of a test, on a busy machine


class Watched:
    """A watcher of stand-ins for a driver and Ray's processes, which only sleep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = self.sleeper()
        self.errors = folder / "stderr"
        program = Path(watcher_process.__file__).read_text()
        for name, value in QUICK.items():
            program, count = re.subn(rf"\b{name} = [\d.]+", f"{name} = {value}", program)
            assert count == 1, name
        program = re.sub(r"\bPROBE_S, CONNECT_S = .*", "PROBE_S, CONNECT_S = 0.2, 1.0", program)
        (folder / "watcher.py").write_text(program)
        command = [sys.executable, "-I", "-S", str(folder / "watcher.py"), str(self.driver.pid)]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)

    sleepers: list[subprocess.Popen[bytes]]

    def sleeper(self) -> subprocess.Popen[bytes]:
        self.sleepers = getattr(self, "sleepers", [])
        self.sleepers.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return self.sleepers[-1]

    def tell(self, **about: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(about).encode() + b"\n")
        self.process.stdin.flush()

    def begin(self, driver: int | None = None, address: str = "", lost_s: float = 10.0, **names: str) -> dict[str, subprocess.Popen[bytes]]:
        """Begin a run of a driver. `names`: names of Ray's processes. Returns them by their keys."""
        status = {"status": "running", "reason": "", "pid": self.driver.pid if driver is None else driver, "steps_done": 3}
        (self.folder / "status.json").write_text(json.dumps(status).ljust(200))
        processes = {key: self.sleeper() for key in names}
        self.tell(ray={processes[key].pid: name for key, name in names.items()}, address=address, lost_s=lost_s)
        self.tell(folder=str(self.folder), words=[sys.executable, "-I", "-S", "-c", WORDS, str(self.folder)])
        time.sleep(0.5)
        return processes

    @property
    def said(self) -> str:
        return self.errors.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.said.count(text) < count:
            assert time.monotonic() < end, self.said
            time.sleep(0.05)

    def ends(self) -> bytes:
        """Return what the driver is told before the watcher ends."""
        assert self.process.stdin is not None and self.process.stdout is not None
        told = self.process.stdout.readline() + self.process.stdout.readline()
        self.process.stdin.close()  # as when the driver ends
        self.process.wait(PATIENCE_S)
        return told


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path)
    yield found
    for process in [found.process, *found.sleepers]:
        process.kill()
        process.wait()


@pytest.mark.parametrize("killed", ["raylet", "agent", "gcs"])
def test_a_dead_process_of_ray_ends_the_run_with_its_name(watched: Watched, killed: str) -> None:
    names = {"agent": "dashboard agent", "raylet": "raylet", "gcs": "GCS"}
    watched.begin(**names)[killed].kill()
    assert watched.ends() == b"died\nend\n"
    assert f"words: Ray's {names[killed]} died" in watched.said and "run failed" not in watched.said
    status = read_status(watched.folder)
    assert status["status"] == "failed" and names[killed] in status["reason"] and status["steps_done"] == 3


def test_a_driver_that_does_not_end_by_itself_is_killed(watched: Watched) -> None:
    watched.begin(raylet="raylet")["raylet"].kill()
    assert watched.driver.wait(PATIENCE_S) == -signal.SIGKILL
    assert watched.process.wait(PATIENCE_S) == 0


def test_a_killed_driver_has_last_words_and_its_processes_end(watched: Watched, tmp_path: Path) -> None:
    left, temporary = watched.sleeper(), tmp_path / "session"
    temporary.mkdir()
    watched.tell(sessions=[left.pid], temporary=str(temporary))
    watched.begin(raylet="raylet")
    assert watched.process.stdin is not None
    watched.process.stdin.close()
    assert watched.process.wait(PATIENCE_S) == 0 and left.wait(PATIENCE_S) == -signal.SIGKILL
    assert f"words: its driver, process {watched.driver.pid}, was killed" in watched.said
    assert read_status(watched.folder)["status"] == "failed" and not temporary.exists()


def test_a_killed_driver_whose_threads_still_hold_its_pipe_is_not_taken_for_a_dead_raylet(watched: Watched) -> None:
    """Ray's processes end with the driver's main thread, which may be before the driver's files are closed."""
    raylet = watched.begin(raylet="raylet")["raylet"]
    watched.driver.kill()
    os.waitid(os.P_PID, watched.driver.pid, os.WEXITED | os.WNOWAIT)
    raylet.kill()
    assert watched.process.wait(PATIENCE_S) == 0
    assert f"words: its driver, process {watched.driver.pid}, was killed" in watched.said


def test_a_run_that_has_ended_or_is_anothers_by_now_is_left_alone(watched: Watched) -> None:
    watched.begin(driver=1, raylet="raylet")
    assert watched.process.stdin is not None
    watched.process.stdin.close()
    assert watched.process.wait(PATIENCE_S) == 0
    assert watched.said == "" and read_status(watched.folder)["status"] == "running"


def test_ray_may_end_once_the_run_has_left_it(watched: Watched) -> None:
    processes = watched.begin(raylet="raylet")
    watched.tell(ray={}, address="", lost_s=0.0)
    time.sleep(0.3)
    processes["raylet"].kill()
    time.sleep(0.6)
    assert watched.said == "" and read_status(watched.folder)["status"] == "running" and lives(watched.process.pid)


def test_stopped_processes_are_named_and_nothing_is_ended(watched: Watched) -> None:
    worker = watched.sleeper()
    watched.tell(sessions=[worker.pid])
    raylet = watched.begin(raylet="raylet")["raylet"]
    stopped = [watched.driver.pid, raylet.pid, worker.pid]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    for process in stopped:
        watched.wait_for(f"`kill -CONT {process}` lets it go on")
    status = read_status(watched.folder)
    assert status["status"] == "running" and "stands still" in status["reason"] and watched.said.count("\n") == 3
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    watched.wait_for("does not stand still any more", 3)
    assert read_status(watched.folder)["reason"] == "" and "words" not in watched.said and all(map(lives, stopped))


def test_a_cluster_that_is_out_of_reach_ends_the_run_and_one_that_comes_back_does_not(watched: Watched) -> None:
    """Its GCS may be on another machine, and may come back: that its process here ends is not the end."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    gcs = watched.begin(gcs="GCS", address=f"127.0.0.1:{port}", lost_s=1.6)["gcs"]
    gcs.kill()
    server.close()
    time.sleep(0.5)
    server = socket.create_server(("127.0.0.1", port))
    time.sleep(1.5)
    assert watched.said == ""
    server.close()
    assert watched.ends() == b"died\nend\n"
    assert f"words: the cluster's GCS at 127.0.0.1:{port} has not been reached for 2 s" in watched.said


@pytest.mark.parametrize(
    ("gone", "code", "of_ray", "said"),
    [
        (True, signal.SIGKILL, "", "its driver, process 7, was killed, as by `kill -9` or for lack of memory"),
        (True, signal.SIGKILL, "raylet", "its driver, process 7, was killed, as by `kill -9` or for lack of memory"),
        (True, 1 << 8, "dashboard agent and raylet", "Ray's dashboard agent and raylet died, without which no run goes on"),
        (True, 0, "raylet", "its driver, process 7, and Ray's raylet died"),
        (False, 0, "raylet", "Ray's raylet died, without which no run goes on"),
    ],
)
def test_who_died_first_is_told_by_the_drivers_exit_code(gone: bool, code: int, of_ray: str, said: str) -> None:
    """A driver takes its private Ray along, and Ray its driver."""
    watch = watcher_process.DriverWatch(7)
    watch.driver_gone, watch.driver_code = gone, code
    assert watch.what_died(of_ray) == said


def test_signals_to_a_whole_job_do_not_end_the_watcher(watched: Watched) -> None:
    raylet = watched.begin(raylet="raylet")["raylet"]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        watched.process.send_signal(number)
    raylet.kill()
    assert watched.ends() == b"died\nend\n"


def test_words_that_cannot_be_written_are_replaced_by_a_sentence(watched: Watched) -> None:
    raylet = watched.begin(raylet="raylet")["raylet"]
    watched.tell(folder=str(watched.folder), words=[sys.executable, "-c", "raise SystemExit(1)"])
    time.sleep(0.5)
    raylet.kill()
    assert watched.ends() == b"died\nend\n" and "run failed: Ray's raylet died" in watched.said


def test_a_driver_that_ray_ended_because_its_node_stood_still_is_told_so(watched: Watched) -> None:
    raylet = watched.begin(raylet="raylet")["raylet"].pid
    os.kill(raylet, signal.SIGSTOP)
    watched.wait_for("stands still")
    assert watched.process.stdin is not None
    watched.process.stdin.close()
    assert watched.process.wait(PATIENCE_S) == 0 and "was killed, as by Ray while Ray's raylet stood still" in watched.said


def test_a_torn_or_missing_status_hinders_nobody(watched: Watched) -> None:
    watched.begin(raylet="raylet")
    (watched.folder / "status.json").write_text("{")
    watched.sleepers[-1].kill()
    assert watched.ends() == b"died\nend\n" and "run failed: Ray's raylet died" in watched.said


DRIVER = """
import pathlib, sys, time, types
from rlhfless_ray.local import watcher
watcher.watcher_process = types.SimpleNamespace(__file__=sys.argv[1])
one = watcher.Watcher()
time.sleep(0.3)
print("begun")
with one.writes_last_words(pathlib.Path("here"), lambda: print("left")):
    one.tell(folder="here")
    time.sleep(1.5)
"""


@pytest.mark.parametrize(("program", "code"), [("input(); print('died\\nend', flush=True); input()", 1), ("raise SystemExit", 0)])
def test_a_driver_ends_when_its_watcher_says_so_and_goes_on_without_one(tmp_path: Path, program: str, code: int) -> None:
    (tmp_path / "program.py").write_text(program)
    told = subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path / "program.py")], capture_output=True, timeout=60, cwd=ROOT)
    assert (told.returncode, told.stdout) == (code, b"begun\n" + b"left\n" * code), told.stderr


def test_agents_are_known_by_their_commands() -> None:
    python = "/usr/bin/python"
    assert agent_name([python, "-I", "-S", STAND_IN, "session", "node"]) == "dashboard agent"
    assert agent_name([python, "-I", "-S", STAND_IN, "session", "node", "127.0.0.1", python]) == "agent of runtime environments"
    assert agent_name(["ray::RuntimeEnvAgent"]) == "agent of runtime environments"
    assert agent_name([python, "-u", "/ray/dashboard/agent.py", "--node-id=1"]) == "dashboard agent"
    assert agent_name(["ray::IDLE"]) == agent_name([]) == agent_name([python, "/ray/default_worker.py"]) == ""


# ---- the words ----------------------------------------------------------------------------------------------------


def run_folder(root: Path) -> RunFolder:
    recipe = Recipe.parse(small_recipe(root))
    folder = RunFolder.create(recipe)
    folder.begin(recipe, "machine", 0)
    Ledger("cpu").append_to(folder.path / "ledger.csv")
    return folder


def test_last_words_name_what_is_saved_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path)
    last_words.main(str(folder.path), "runs/small", "Ray's raylet died")
    assert capsys.readouterr().err == "run failed: Ray's raylet died; nothing is saved yet: start the run again\n"
    for step in (2, 12):
        Checkpoints(Recipe.parse(small_recipe(tmp_path)).checkpoint, folder.path).save(step, writer({"model.safetensors": b""}), {})
    last_words.main(str(folder.path), "runs/small", "Ray's GCS died")
    how = "go on with the same command and --resume, or with `rlhfless train runs/small/recipe.yaml --resume`"
    said = f"Ray's GCS died; step 12 is saved: {how}"
    assert capsys.readouterr().err == f"run failed: {said}\n"
    status = folder.read_status()
    assert (status["status"], status["reason"]) == ("failed", said) and status["ended_at"]
    assert "step 12 is saved: go on with" in (folder.path / "report.html").read_text()


def test_last_words_of_a_generation_and_of_a_supervised_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path)
    (folder.path / "responses.part.jsonl").write_text("")
    assert last_words.what_is_saved(folder, "r") == "the responses so far are saved in r: go on with the same command and --resume"
    checkpoint = tmp_path / "elsewhere" / folder.path.name / "checkpoint_000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text(json.dumps({"steps": 7}))
    tree = {"task": "sft", "checkpoint": {"path": str(tmp_path / "elsewhere")}}
    assert last_words.saved_steps(tree, folder.path) == 7
    assert last_words.saved_steps({"task": "sft"}, folder.path) is None
