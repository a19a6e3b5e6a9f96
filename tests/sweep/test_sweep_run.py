"""The example in a reduced form, with real runs on one private Ray: stopped, resumed, and one of its runs fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, command, environment, lives
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def reduced_example(folder: Path) -> Path:
    """recipes/sweep.yaml with four small steps, and a run whose reward function is missing."""
    tree = yaml.safe_load((ROOT / "recipes" / "sweep.yaml").read_text())
    tree["recipe"] = str(ROOT / "recipes" / tree["recipe"])
    tree["root"] = str(folder)
    tree["set"] |= {
        "run.steps": 4,
        "policy.hidden_size": 64,
        "warm_start.steps": 0,
        "prompts.batch_prompts": 8,
        "rollout.max_tokens": 24,
        "rollout.max_actors": 1,
        "evaluate.prompts": 8,
        "evaluate.every_steps": 2,
        "checkpoint.every_steps": 2,
        "watch.wandb": "off",
    }
    tree["grid"]["learner.learning_rate"] = [3.0e-4]
    tree["runs"] = [
        {"name": "fine"},
        {"name": "fine-too", "set": {"rollout.temperature": 0.9}},
        {"name": "broken", "set": {"reward.function": "missing.py:f"}},
    ]
    tree["early_stopping"]["first_step"] = 2
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def states(folder: Path) -> dict[str, dict]:
    path = folder / "sweep" / "sweep.json"
    return {run["name"]: run for run in json.loads(path.read_text())["runs"]} if path.exists() else {}


def test_the_example_is_stopped_and_resumed_and_a_failed_run_ends_no_other(tmp_path: Path) -> None:
    sweep = reduced_example(tmp_path)
    words = [sys.executable, "-m", "rlhfless_ray", "sweep", str(sweep)]
    first = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 400
    while not any(run["step"] >= 1 for run in states(tmp_path).values()):
        assert time.monotonic() < deadline and first.poll() is None, first.stdout and first.stdout.read()
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=300)[0]
    assert first.returncode == 128 + signal.SIGINT, said
    assert "continue with --resume" in said and "report: " in said
    stopped = states(tmp_path)
    assert {run["state"] for run in stopped.values()} <= {"stopped", "waiting", "done", "ended early"} and "stopped" in {
        run["state"] for run in stopped.values()
    }
    for name, run in ((name, run) for name, run in stopped.items() if run["state"] == "stopped"):
        path = tmp_path / "sweep" / name / "status.json"  # not there yet if the run was stopped while it started
        assert path.exists() or run["step"] == 0, name
        assert not path.exists() or not lives(json.loads(path.read_text())["pid"])

    again = command("sweep", str(sweep), "--resume")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "1 of 3 runs failed: broken_learning_rate-0.0003" in again.stderr
    assert "goes on from its checkpoint" in again.stdout
    ended = states(tmp_path)
    fine = {name: run for name, run in ended.items() if name.startswith("fine")}
    assert {run["state"] for run in fine.values()} in ({"done"}, {"done", "ended early"})
    assert ended["broken_learning_rate-0.0003"]["state"] == "failed" and "missing.py" in ended["broken_learning_rate-0.0003"]["reason"]
    for name in (name for name, run in fine.items() if run["state"] == "done"):
        assert [row["step"] for row in rows(tmp_path / "sweep" / name)] == [0, 1, 2, 3, 4] and fine[name]["step"] == 4
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "Over cost: accuracy" in page and all(name in page for name in ended)
