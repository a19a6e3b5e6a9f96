"""SFT or DPO steps beside TRL's SFTTrainer or DPOTrainer: `python -m benchmarks.supervised [--size 11M|494M] [--task sft|dpo]`.

Same policy, rows in the same order, batch, optimizer and cores, in turn. TRL gets the quicker of its settings: micro-batches of 8 rows
or the whole batch, and at 494 M bfloat16 autocast. Rows are random, with responses whose lengths spread as those of real data do. The
first losses of both must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_process import MeasuredProcess, run_process
from benchmarks.peers.peer_env import trl_python
from benchmarks.peers.run_trl import run_trl
from benchmarks.peers.shared_work import HALF_BILLION, LARGE, SYMBOLS, SharedWork

OURS = "rlhfless_ray"
DROP = 1  # first steps, which create the optimizer's state
BETA = 0.1
LONGEST, SHORTEST, MEDIAN, SIGMA = 192, 8, 48.0, 0.8  # tokens of a response, log-normal
MAX_TOKENS = 256
NEAR = 2e-3  # relative difference of the first losses in float32
NEAR_BFLOAT16 = 2e-2


@dataclass(frozen=True)
class Size:
    work: SharedWork
    batch_rows: int
    steps: int
    micro_rows: tuple[int, ...]  # settings of TRL that are tried
    bfloat16: bool


SIZES = {"11M": Size(replace(LARGE, vocabulary=128), 32, 8, (8, 32), False), "494M": Size(HALF_BILLION, 8, 4, (8,), True)}


def write_rows(path: Path, task: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def text(length: int) -> str:
        return "".join(SYMBOLS[i] for i in rng.integers(len(SYMBOLS), size=length))

    def response() -> str:
        return text(int(np.clip(rng.lognormal(np.log(MEDIAN), SIGMA), SHORTEST, LONGEST)))

    with path.open("w") as file:
        for _ in range(count):
            sides = ("completion",) if task == "sft" else ("chosen", "rejected")
            row = {"prompt": text(int(rng.integers(16, 33))), **{side: response() for side in sides}}
            file.write(json.dumps(row) + "\n")


def train_trl(task: str, size: Size, policy: Path, rows: Path, micro: int, threads: int, scratch: Path) -> MeasuredProcess:
    settings = {
        "task": task,
        "policy": str(policy),
        "rows": str(rows),
        "steps": size.steps,
        "batch_rows": size.batch_rows,
        "micro_rows": micro,
        "bf16": size.bfloat16,
        "checkpointing": False,
        "learning_rate": size.work.learning_rate,
        "beta": BETA,
        "max_tokens": MAX_TOKENS,
        "threads": threads,
    }
    return run_trl(settings, scratch, "trl_supervised_process.py")


def train_ours(task: str, size: Size, policy: Path, rows: Path, threads: int, scratch: Path) -> MeasuredProcess:
    root = scratch / "runs"
    columns = {"response_column": "completion"} if task == "sft" else {}
    content = {
        "task": task,
        "run": {"name": task, "root": str(root), "steps": size.steps},
        "policy": {"path": str(policy), "dtype": "bfloat16" if size.bfloat16 else "float32"},
        "data": {"path": str(rows), "batch_rows": size.batch_rows, "max_tokens": MAX_TOKENS, "shuffle": False, **columns},
        "learner": {"learning_rate": size.work.learning_rate, "max_slots_per_rank": threads, "zero_stage": 1 if size.bfloat16 else 0},
        "cluster": {"cpus": threads},
        "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},
        **({"loss": {"beta": BETA}} if task == "dpo" else {}),
    }
    shutil.rmtree(root, ignore_errors=True)
    path = scratch / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    metrics = root / task / "metrics.jsonl"
    ended = run_process([sys.executable, "-m", "rlhfless_ray", "train", path], scratch / "ours.log", watched=metrics)
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [
        {"step_s": row["step_s"], "tokens": row["tokens/per_s"] * row["step_s"], "loss": row["learn/loss"]} for row in found if row["step"]
    ]
    start_up_s = (ended.appeared_s or float("nan")) - steps[0]["step_s"]
    return MeasuredProcess(OURS, steps, start_up_s, ended.peak_mb, ended.processes, ended.wall_s)


def tokens_per_s(runs: list[MeasuredProcess]) -> Spread:
    return Spread.of(step["tokens"] / step["step_s"] for run in runs for step in run.steady(DROP))


def check_same_work(size: Size, trl: MeasuredProcess, ours: MeasuredProcess) -> None:
    """Raises RuntimeError unless both computed the same tokens, and the same loss before the first update."""
    a, b = trl.steps[0], ours.steps[0]
    if abs(a["tokens"] - b["tokens"]) > 0.5 or abs(a["loss"] / b["loss"] - 1) > (NEAR_BFLOAT16 if size.bfloat16 else NEAR):
        raise RuntimeError(f"not the same work: TRL has {a}, rlhfless_ray {b}")


def measure(task: str, size: Size, rounds: int, policy: Path, threads: int, scratch: Path) -> dict[str, list[MeasuredProcess]]:
    """Return the runs of each system; TRL's settings are systems of their own."""
    rows = scratch / f"{task}.jsonl"
    write_rows(rows, task, size.batch_rows * size.steps, size.work.seed)
    found: dict[str, list[MeasuredProcess]] = {}
    for _ in range(rounds):
        for micro in size.micro_rows:
            found.setdefault(f"TRL, micro-batches of {micro}", []).append(train_trl(task, size, policy, rows, micro, threads, scratch))
        found.setdefault(OURS, []).append(train_ours(task, size, policy, rows, threads, scratch))
    for name, runs in found.items():
        if name != OURS:
            check_same_work(size, runs[0], found[OURS][0])
    return found


def summary(runs: list[MeasuredProcess]) -> dict[str, Any]:
    return {
        "tokens_per_s": tokens_per_s(runs),
        "step_s": Spread.of(step["step_s"] for run in runs for step in run.steady(DROP)),
        "peak_mb": max(run.peak_mb for run in runs),
        "start_up_s": max(run.start_up_s for run in runs),
        "runs": [asdict(run) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="11M")
    parser.add_argument("--task", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each system, in turn")
    parser.add_argument("--quick", action="store_true", help="two steps only: shows that it runs, measures nothing")
    options = parser.parse_args()
    console, threads, size = make_console(), len(os.sched_getaffinity(0)), SIZES[options.size]
    if options.quick:
        size = replace(size, steps=2)
    trl_python()
    with tempfile.TemporaryDirectory(prefix="supervised-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        files = size.work.write(scratch / "work")
        found = {name: summary(runs) for name, runs in measure(options.task, size, options.rounds, files.policy, threads, scratch).items()}
    title = f"{options.task}, {files.parameters / 1e6:.0f} M parameters, {size.batch_rows} rows a step"
    table = Table("", "tokens/s", "step, s", "peak GB", "start-up, s", title=title)
    for name, row in found.items():
        numbers = (row["tokens_per_s"].show(), row["step_s"].show(), f"{row['peak_mb'] / 1e3:.2f}", f"{row['start_up_s']:.1f}")
        table.add_row(name, *numbers)
    console.print(table)
    theirs = max((row for name, row in found.items() if name != OURS), key=lambda row: row["tokens_per_s"].median)
    targets = [
        Target("tokens/s over TRL's", found[OURS]["tokens_per_s"].median / theirs["tokens_per_s"].median, least=1.0, unit="×"),
        Target("peak memory over TRL's", found[OURS]["peak_mb"] / theirs["peak_mb"], most=1.0, unit="×"),
    ]
    show_targets(console, targets)
    content = {"task": options.task, "parameters": files.parameters, "batch_rows": size.batch_rows, "systems": found}
    save(f"supervised_{options.task}_{options.size}", content, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
