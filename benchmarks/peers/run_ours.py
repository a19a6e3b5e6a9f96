"""This project's side of the comparison: a recipe, a run through the command line, its metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.run_process import MeasuredProcess, read_metrics, run_process
from benchmarks.peers.shared_work import Files, SharedWork


def recipe(work: SharedWork, files: Files, root: Path, steps: int, threads: int) -> dict[str, Any]:
    """The settings that TRL's side has too, on `threads` cores. `prefer: 1`: what is compared here is speed, not cost."""
    longest = work.longest_prompt + work.max_tokens
    return {
        "run": {"name": work.name, "root": str(root), "steps": steps, "seed": work.seed},
        "policy": {"path": str(files.policy)},
        "prompts": {
            "path": str(files.prompts),
            "prompt_column": "prompt",
            "answer_column": "",
            "batch_prompts": work.prompts,
            "shuffle": False,
        },
        "evaluate": {"prompts": 0},
        "rollout": {
            "samples_per_prompt": work.group,
            "max_tokens": work.max_tokens,
            "temperature": work.temperature,
            "max_actors": threads,
        },
        "reward": {"function": f"{files.reward}:reward"},
        "algorithm": {"importance_cap": 0},  # TRL corrects for a sampler only where it has one of its own
        "learner": {
            "learning_rate": work.learning_rate,
            "max_slots_per_rank": threads,
            "micro_batch_tokens": work.micro_sequences * longest,
        },
        "objective": {"prefer": 1.0},
        "cluster": {"cpus": threads},
        "checkpoint": {"every_steps": 10**6},
        "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},  # TRL reports to nobody either
    }


def run_ours(content: dict[str, Any], scratch: Path, *, timeout_s: float = 3600.0) -> MeasuredProcess:
    """Train with the recipe `content`; its run.root must be empty."""
    path = scratch / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    folder = Path(content["run"]["root"]) / content["run"]["name"]
    command = [sys.executable, "-m", "rlhfless_ray", "train", path]
    ended = run_process(command, scratch / "ours.log", watched=folder / "metrics.jsonl", timeout_s=timeout_s)
    rows = read_metrics(folder)
    steps = [step_row(row) for row in rows if row["step"] > 0]
    start_up_s = (ended.appeared_s or float("nan")) - (steps[0]["step_s"] if steps else 0.0)
    return MeasuredProcess("rlhfless_ray", steps, start_up_s, ended.peak_mb, ended.processes, ended.wall_s)


def step_row(row: dict[str, Any]) -> dict[str, float]:
    """A row of metrics.jsonl under the names that both systems share, with ours kept beside them."""
    own = ("phase/", "cost/", "pool/rollout", "learn/mismatch")
    kept = {name: value for name, value in row.items() if name.startswith(own)}
    return {
        "step_s": row["step_s"],
        "generate_s": row["phase/rollout_s"],
        "score_s": row["phase/score_s"],
        "learn_s": row["phase/learn_s"],
        "publish_s": row["phase/publish_s"],
        "time_s": row["time_s"],
        "reward_mean": row["reward/mean"],
        "tokens": row["tokens/generated"],
        "trained_tokens": row["tokens/trained"],
        **kept,
    }
