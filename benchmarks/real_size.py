"""A policy of 494 M parameters beside TRL: peak memory and time of a step. `python -m benchmarks.real_size [--steps N] [--no-trl]`.

The policy has the shape of Qwen2.5-0.5B and random weights. A step is 4 prompts × 4 samples × 64 tokens. TRL runs in float32 and with
its defaults (bfloat16 autocast, gradient checkpointing); ours in bfloat16 with ZeRO 1, whose master weights are float32 too. Random
policies of this vocabulary end a response early by chance once in 10,000, so the numbers of tokens may differ by a few.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.common.run_process import MeasuredProcess
from benchmarks.peers.run_ours import recipe, run_ours
from benchmarks.peers.run_trl import run_trl, settings
from benchmarks.peers.shared_work import HALF_BILLION, Files

DROP = 1  # first steps, which create the optimizer's state


def ours(files: Files, scratch: Path, steps: int, threads: int) -> MeasuredProcess:
    content = recipe(HALF_BILLION, files, scratch / "runs", steps, threads)
    content["policy"]["dtype"] = "bfloat16"
    content["learner"]["zero_stage"] = 1
    return run_ours(content, scratch)


def summary(run: MeasuredProcess) -> dict[str, Any]:
    times = [step["step_s"] for step in run.steady(DROP)]
    return {
        "peak_mb": run.peak_mb,
        "step_s": median(times),
        "slowest_step_s": max(times),
        "generate_s": median(step["generate_s"] for step in run.steady(DROP)),
        "learn_s": median(step["learn_s"] for step in run.steady(DROP)),
        "tokens": [step["tokens"] for step in run.steps],
        "start_up_s": run.start_up_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of our run")
    parser.add_argument("--trl-steps", type=int, default=4, help="steps of each of TRL's runs")
    parser.add_argument("--no-trl", action="store_true", help="our run alone, without targets")
    options = parser.parse_args()
    console, threads = make_console(), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="real-size-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        files = HALF_BILLION.write(scratch / "work")
        runs = {}
        if not options.no_trl:
            for name, alike in (("TRL, float32", True), ("TRL, its defaults", False)):
                console.print(name, highlight=False)
                work = settings(HALF_BILLION, files, options.trl_steps, threads, alike=alike)
                runs[name] = summary(run_trl(work | {"micro_sequences": 4}, scratch))
        console.print("rlhfless_ray, bfloat16, ZeRO 1", highlight=False)
        runs["rlhfless_ray"] = summary(ours(files, scratch, options.steps, threads))

    table = Table("", "peak GB", "step s", "slowest", "generate", "learn", title=f"{files.parameters / 1e6:.0f} M parameters")
    for name, row in runs.items():
        numbers = ("step_s", "slowest_step_s", "generate_s", "learn_s")
        table.add_row(name, f"{row['peak_mb'] / 1e3:.1f}", *(f"{row[key]:.1f}" for key in numbers))
    console.print(table)
    mine, theirs = runs["rlhfless_ray"], [row for name, row in runs.items() if name != "rlhfless_ray"]
    targets = [Target("slowest step over the median", mine["slowest_step_s"] / mine["step_s"], most=1.5, unit="×")]
    if theirs:
        quicker = min(theirs, key=lambda row: row["step_s"])
        targets += [
            Target("peak memory over TRL's, in its quicker setting", mine["peak_mb"] / quicker["peak_mb"], most=1.1, unit="×"),
            Target("time of a step over TRL's", mine["step_s"] / quicker["step_s"], most=0.6, unit="×"),
        ]
    show_targets(console, targets)
    save("real_size", {"parameters": files.parameters, "runs": runs}, targets, console=console, quick=options.no_trl)


if __name__ == "__main__":
    main()
