"""TRL's side of the comparison, as seen from here: settings out, times back. What runs there is trl_process.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import MeasuredProcess, run_process
from benchmarks.peers.peer_env import HERE, trl_python
from benchmarks.peers.shared_work import Files, SharedWork


def settings(work: SharedWork, files: Files, steps: int, threads: int, *, alike: bool = True) -> dict[str, Any]:
    """`alike`: float32, no gradient checkpointing and the micro-batches of the other systems; else what TRL's defaults say, which is
    bfloat16 autocast, gradient checkpointing and micro-batches of 8."""
    return {
        "policy": str(files.policy),
        "prompts": str(files.prompts),
        "reward": str(files.reward),
        "columns": ["prompt"],
        "prompts_per_step": work.prompts,
        "group": work.group,
        "max_tokens": work.max_tokens,
        "temperature": work.temperature,
        "learning_rate": work.learning_rate,
        "micro_sequences": work.micro_sequences,
        "steps": steps,
        "threads": threads,
        "seed": work.seed,
        "root": str(ROOT),
        "alike": alike,
        "config": {"loss_type": "dapo", "scale_rewards": "group", "lr_scheduler_type": "constant"},
    }


def run_trl(content: dict[str, Any], scratch: Path, script: str = "trl_process.py") -> MeasuredProcess:
    """Run a script of this folder in TRL's environment."""
    result = scratch / "trl_result.json"
    result.unlink(missing_ok=True)
    path = scratch / "trl_settings.json"
    told = {"scratch": str(scratch / "trl"), "result": str(result), "spawned_s": time.time()}
    path.write_text(json.dumps({**content, **told}))
    environment = {**os.environ, "OMP_NUM_THREADS": str(content["threads"]), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    ended = run_process([trl_python(), HERE / script, path], scratch / "trl.log", environment=environment)
    said = json.loads(result.read_text())
    return MeasuredProcess("trl", said["steps"], said["start_up_s"], ended.peak_mb, ended.processes, ended.wall_s, said["versions"])
