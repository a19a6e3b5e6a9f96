"""`ray job submit --working-dir .` on a cluster made by `ray start`, twice at once."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from rlhfless_ray.functions.ledger import read_ledger
from tests.conftest import ROOT, environment, small_recipe
from tests.run_files import rows as rows_of

pytestmark = [pytest.mark.ray, pytest.mark.engine]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def job_environment() -> dict[str, str]:
    kept = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    return {**kept, "PATH": f"{BIN}:{kept['PATH']}", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address of the dashboard of a two-core cluster that `ray start` made. Ended by the id of the process
    that was started. It has a folder of its own: a job finds its cluster by what the folder says was started last."""
    port, dashboard, folder = free_port(), free_port(), tempfile.mkdtemp(prefix="jobs")  # short: sockets lie in it
    head = subprocess.Popen(
        [
            str(BIN / "ray"),
            "start",
            "--head",
            "--block",
            f"--port={port}",
            f"--dashboard-port={dashboard}",
            "--num-cpus=2",
            "--object-store-memory=300000000",
            "--dashboard-agent-listen-port",
            str(free_port()),
            "--temp-dir",
            folder,
        ],
        env=job_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{dashboard}"
    from ray.job_submission import JobSubmissionClient

    deadline = time.monotonic() + 200
    while True:
        try:
            JobSubmissionClient(address).list_jobs()
            break
        except Exception:  # not listening yet, in one of many ways
            assert time.monotonic() < deadline, "the cluster's dashboard did not start"
            time.sleep(0.5)
    yield address
    import psutil

    family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
    for process in family:  # nothing of it is kept: some of Ray's processes would take 10 s to end in order
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=60)
    head.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def working_dir(tmp_path_factory) -> Path:
    """What a user has checked out: the packages, not installed, and a recipe."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in ("rlhfless_ray", "placement"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    tree = small_recipe(folder, run__steps=3, evaluate__prompts=0)
    tree["reward"]["function"] = "reward_file.py:shorter"
    (folder / "small.yaml").write_text(yaml.safe_dump(tree))
    return folder


def submit_when_ready(client: Any, **job: Any) -> str:
    """Submit a job once the node's agent has started, for which Ray's dashboard does not wait. A busy one may also drop a connection."""
    end, number = time.monotonic() + 60.0, f"raysubmit_{secrets.token_hex(8)}"
    while True:
        try:
            return client.submit_job(submission_id=number, **job)
        except (RuntimeError, requests.exceptions.ConnectionError) as error:
            if f"{number} already exists" in str(error):
                return number  # only the answer was lost
            dropped = isinstance(error, requests.exceptions.ConnectionError)
            if not (dropped or "No available agent" in str(error)) or time.monotonic() > end:
                raise
            time.sleep(0.5)


def submit(dashboard: str, working_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            str(BIN / "ray"),
            "job",
            "submit",
            "--address",
            dashboard,
            "--working-dir",
            str(working_dir),
            "--",
            "python",
            "-m",
            "rlhfless_ray",
            "train",
            "small.yaml",
            *overrides,
        ],
        env=job_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stop_at_step_5(client: Any, job: str) -> None:
    deadline = time.monotonic() + 200
    while "step   5/500" not in client.get_job_logs(job):
        assert time.monotonic() < deadline, client.get_job_logs(job)
        time.sleep(0.3)
    client.stop_job(job)
    while client.get_job_status(job) not in ("STOPPED", "FAILED"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def status(run: Path) -> str:
    return json.loads((run / "status.json").read_text())["status"]


def test_two_jobs_at_once_do_not_clash_and_one_that_is_stopped_frees_its_leases_and_can_be_resumed(dashboard, working_dir, tmp_path):
    """Both have the same name. One ends by itself; the other is stopped, and resumed by a driver outside of any job, on a Ray of its own.
    Each process of a job imports everything, so there are few."""
    from ray.job_submission import JobSubmissionClient
    from ray.util.state import list_placement_groups

    client, root = JobSubmissionClient(dashboard), tmp_path / "runs"
    short = submit(dashboard, working_dir, f"run.root={root}")
    entry = f"python -m rlhfless_ray train small.yaml run.root={root} run.steps=500 checkpoint.every_steps=200"
    long = submit_when_ready(client, entrypoint=entry, runtime_env={"working_dir": str(working_dir)})
    said = short.communicate(timeout=400)[0]
    assert short.returncode == 0, said[-3000:]
    assert "step 3/3" in said and "report.html" in said  # the driver's lines are the job's log
    for _ in range(4):  # until the machine is not too busy for the 3 s after which Ray kills
        stop_at_step_5(client, long)
        if {status(run) for run in root.iterdir()} == {"done", "stopped"}:
            break
        long = client.submit_job(entrypoint=f"{entry} --resume", runtime_env={"working_dir": str(working_dir)})
    deadline = time.monotonic() + 60
    while leases := [group for group in list_placement_groups(address=dashboard) if group.state != "REMOVED"]:
        assert time.monotonic() < deadline, leases
        time.sleep(0.3)
    by_status = {status(run): run for run in root.iterdir()}
    assert sorted(path.name for path in root.iterdir()) == ["small", "small-2"] and by_status.keys() == {"done", "stopped"}
    runs = [by_status["done"], by_status["stopped"]]
    rows = [[row for row in rows_of(run) if row["step"] <= 3] for run in runs]
    for run, own in zip(runs, rows, strict=True):  # neither waited for slots until the other ended
        first_lease_s = min(row.from_s for row in read_ledger(run / "ledger.csv"))
        assert first_lease_s + sum(row.get("phase/lease_s", 0.0) for row in own) < min(r[-1]["time_s"] for r in rows) / 2
    first = [(run / "samples" / "step_3.jsonl").read_text() for run in runs]
    assert first[0] == first[1], "the seed is the same"
    stopped = json.loads((runs[1] / "status.json").read_text())["steps_done"]
    assert stopped >= 5 and (runs[1] / "checkpoints" / f"step_{stopped}").is_dir()
    changes = [f"run.root={root}", f"run.steps={stopped + 1}"]
    command = [sys.executable, "-m", "rlhfless_ray", "train", "small.yaml", "--resume", *changes]
    ended = subprocess.run(command, cwd=working_dir, env=job_environment(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert f"step {stopped + 1}/" in ended.stdout
    assert status(runs[1]) == "done"


def test_an_address_where_no_cluster_answers_is_named(working_dir, tmp_path):
    address = f"cluster.address=127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "rlhfless_ray", "train", "small.yaml", f"run.root={tmp_path}", address]
    ended = subprocess.run(command, cwd=working_dir, env=job_environment(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert "no Ray cluster answers there" in ended.stderr and "Traceback" not in ended.stderr
