"""What publishing a weight version takes, by size of the policy. `python -m benchmarks.publish [--against CHECKOUT] [--only SIZE …]`.

Times are from the ledgers of real runs. The learner gathers its weights and digests them, and engines load them when the next rollout
begins. `--against` runs the same recipe by the code of another checkout. Policies have random weights, of 494 M parameters in bfloat16.
Each run has one engine and keeps no copy of the learner's state, so that an older checkout may fit the memory too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import run_process
from benchmarks.peers.run_ours import recipe
from benchmarks.peers.shared_work import HALF_BILLION, LARGE, SMALL, Files, SharedWork
from rlhfless_ray.functions.ledger import Row, read_ledger

WORK = {work.name: work for work in (SMALL, LARGE, HALF_BILLION)}
STEPS = {"0.7M": 16, "11M": 8, "494M": 4}
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
READY_S = 2.0  # wanted at 494 M
LARGER = 1.01  # of the bytes of the weights, for what the object store writes beside them


def run(work: SharedWork, files: Files, scratch: Path, checkout: Path) -> dict[str, Any]:
    """Run the recipe by a checkout's code. A run that fails counts with the versions that its engines loaded before."""
    content = recipe(work, files, scratch / "runs", STEPS[work.name], len(os.sched_getaffinity(0)))
    content["policy"]["dtype"] = work.dtype
    content["rollout"]["max_actors"] = 1
    content["checkpoint"]["memory_every_steps"] = 0
    if work.dtype == "bfloat16":
        content["learner"]["zero_stage"] = 1
    scratch.mkdir()
    path, sizes, failed = scratch / "recipe.yaml", scratch / "bytes.json", ""
    path.write_text(yaml.safe_dump(content))
    command = [sys.executable, ROOT / "benchmarks" / "common" / "publish_run.py", path, sizes]
    try:
        run_process(command, scratch / "run.log", environment={**os.environ, "PYTHONPATH": str(checkout)}, folder=checkout)
    except RuntimeError as error:
        failed = str(error).strip().splitlines()[-1]
    found = times(read_ledger(scratch / "runs" / work.name / "ledger.csv"))
    return {**found, "bytes": max(json.loads(sizes.read_text()).values()), "failed": failed}


def times(rows: Sequence[Row]) -> dict[str, Any]:
    """Return medians over the versions that updates made. `ready_s`: from the end of the update until the engine has loaded them."""
    found: list[tuple[float, float, float]] = []
    gathered = sorted({(row.from_s, row.to_s) for row in rows if row.kind == "learn" and row.what == "publish weights"})
    for version, (from_s, to_s) in enumerate(gathered[1:], start=1):
        loads = sorted((row.to_s, row.to_s - row.from_s) for row in rows if row.what == f"load version {version}")
        if loads:
            found.append((to_s - from_s, loads[0][1], loads[0][0] - from_s))
    columns = zip(("gather_s", "load_s", "ready_s"), zip(*found, strict=True), strict=False)
    return {"versions": len(found), **{name: median(column) for name, column in columns}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, which runs the same recipes")
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK), help="some of the sizes")
    options = parser.parse_args()
    console, checkouts = make_console(), {"here": ROOT}
    if options.against:
        checkouts["against"] = options.against.resolve()
    rows: dict[str, dict[str, Any]] = {}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="publish-", ignore_cleanup_errors=True) as name:
        for size in options.only:
            files, rows[size] = WORK[size].write(Path(name) / size), {}
            least = files.parameters * VALUE_BYTES[WORK[size].dtype]
            for label, checkout in checkouts.items():
                console.print(f"{size}, {checkout}", highlight=False)
                rows[size][label] = run(WORK[size], files, Path(name) / f"{size}-{label}", checkout)
            targets.append(Target(f"{size}: bytes over those of the weights", rows[size]["here"]["bytes"] / least, most=LARGER, unit="×"))
    if HALF_BILLION.name in rows:
        ready_s = rows[HALF_BILLION.name]["here"]["ready_s"]
        targets.append(Target("494M: from the end of the update to engines with the version", ready_s, most=READY_S, unit=" s"))
    table = Table("policy", "", "gather s", "load s", "ready after, s", "MB", "versions", title="A weight version, medians")
    for size, found in rows.items():
        for label, row in found.items():
            shown = (f"{row.get(key, float('nan')):.3f}" for key in ("gather_s", "load_s", "ready_s"))
            table.add_row(size if label == "here" else "", label, *shown, f"{row['bytes'] / 1e6:.1f}", f"{row['versions']}")
            if row["failed"]:
                console.print(f"{size}, {label}: the run failed: {row['failed']}", highlight=False)
    console.print(table)
    show_targets(console, targets)
    save("publish", {"rows": rows}, targets, console=console, quick=len(options.only) < len(WORK) or not options.against)


if __name__ == "__main__":
    main()
