"""What control costs at size: `python -m benchmarks.control [--quick] [--lag]`. Replayed engines, real everything else.

The real loop, pools and placement groups on 32 logical GPUs. Engines and learner are replayed (recorded lengths, modelled
speed, real time), so every second on the critical path in which no instance works is the runtime's own. `--lag` runs fixed pools and
partial rollouts beside the update instead, and compares their speed and cost. Steps at both ends do not count there: processes start in
the first ones, and in the last ones fewer responses are begun, since no later step would train them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common.ledger_anatomy import anatomy, gaps
from benchmarks.common.replay_setup import build, logical_gpus, recipe_for, synthetic_lengths
from benchmarks.common.replayed_runtime import ReplayedRuntime
from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_process import read_metrics
from rlhfless_ray.functions.ledger import read_ledger

OVERHEAD = 0.01  # of the step
FASTER = 1.8  # than fixed pools, with partial rollouts
STEPS, LAG_STEPS = 5, 9
UNCOUNTED, LAG_UNCOUNTED = (1, 0), (2, 2)  # first and last steps that do not count
LAGS: dict[str, dict[str, Any]] = {
    "fixed": {"functions": {"slot": "gpu", "elastic": False}},
    "beside the update, bound 1": {"rollout": {"partial": "continue", "ahead": True, "max_lag_steps": 1}},
    "beside the update, bound 2": {"rollout": {"partial": "continue", "ahead": True, "max_lag_steps": 2}},
}
BASE_S, PER_SEQ_S = 8.5e-3, 3e-5  # a 3 B model's decode step on one L40S, by the roofline of its weights and caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=32, help="logical GPUs")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, with --lag {LAG_STEPS}")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prefer", type=float, default=0.5, help="0 cheapest, 1 fastest")
    parser.add_argument("--lag", action="store_true", help="compare partial rollouts with fixed pools")
    parser.add_argument("--quick", action="store_true", help="4 GPUs, small and fast: shows that it runs, measures nothing")
    options = parser.parse_args()
    if options.quick:
        options.gpus, options.steps, options.prompts, options.samples = 4, 5 if options.lag else 3, 16, 4
    options.steps = options.steps or (LAG_STEPS if options.lag else STEPS)
    console = make_console()
    learn_s, max_tokens = (1.0, 256) if options.quick else (10.0, 2048)
    if options.lag:
        compare_lag(options, learn_s, max_tokens, console)
        return
    with tempfile.TemporaryDirectory(prefix="rlhfless-control-") as name:
        found = measure(Path(name), options, learn_s, max_tokens)
    table = Table("", "median (quartiles)", title=f"{options.gpus} logical GPUs, replayed engines and learner", title_justify="left")
    for key, unit in (("step_s", "s"), ("overhead_s", "s"), ("overhead_share", ""), ("driver_cpu_s", "s")):
        table.add_row(f"{key.removesuffix('_s').replace('_', ' ')}{', ' + unit if unit else ''}", found[key].show())
    for gap, spread in sorted(found["gaps"].items(), key=lambda item: -item[1].median * item[1].count):
        in_ms = Spread(1e3 * spread.median, 1e3 * spread.low, 1e3 * spread.high, spread.count)
        table.add_row(f"  gap {gap} ({spread.count}×), ms", in_ms.show())
    table.add_row("actors by step", " ".join(map(str, found["actors"])))
    console.print(table)
    targets = [Target("control on the critical path, share of a step (median)", found["overhead_share"].median, most=OVERHEAD)]
    show_targets(console, targets)
    save("control", {"replayed": True, "options": vars(options), **found}, targets, console=console, quick=options.quick)


def compare_lag(options: Any, learn_s: float, max_tokens: int, console: Console) -> None:
    """Run fixed pools without a lag, and partial rollouts beside the update."""
    found: dict[str, Any] = {}
    for mode, sections in LAGS.items():
        with tempfile.TemporaryDirectory(prefix="rlhfless-control-") as name:
            found[mode] = measure(Path(name), options, learn_s, max_tokens, **sections)
        console.print(f"{mode}: {found[mode]['step_s'].show()} s, {found[mode]['full_slot_s'].show()} slot-s", highlight=False)
    base = found["fixed"]
    targets = []
    for mode, one in found.items():
        if mode != "fixed":
            saved = 100 * (1 - one["full_slot_s"].median / base["full_slot_s"].median)
            console.print(f"{mode}: {saved:.0f} % of the cost saved", highlight=False)
            targets.append(Target(f"{mode}: speed over fixed pools", base["step_s"].median / one["step_s"].median, least=FASTER, unit="×"))
            targets.append(Target(f"{mode}: control, share of a step", one["overhead_share"].median, most=OVERHEAD))
    show_targets(console, targets)
    save("control_lag", {"replayed": True, "options": vars(options), "modes": LAGS, **found}, targets, console=console, quick=options.quick)


def measure(folder: Path, options: Any, learn_s: float, max_tokens: int, **sections: Any) -> dict[str, Any]:
    lengths = synthetic_lengths(4 * options.prompts, options.samples, max_tokens, seed=0)
    world = build(folder, lengths, base_s=BASE_S, per_seq_s=PER_SEQ_S, start_s=1.0, learn_s=learn_s, clock=1.0)
    recipe = recipe_for(
        world,
        folder,
        steps=options.steps,
        prompts=options.prompts,
        samples=options.samples,
        actors=options.gpus,
        max_tokens=max_tokens,
        objective={"prefer": options.prefer},
        **{"functions": {"slot": "gpu"}, **sections},
    )
    cpu, driver = [], psutil.Process()
    with logical_gpus(options.gpus), ReplayedRuntime(recipe) as run:
        before = driver.cpu_times()
        for _ in run:
            now = driver.cpu_times()
            cpu.append(now.user + now.system - before.user - before.system)
            before = now
        path = run.folder.path
    rows = read_metrics(path)
    ledger = read_ledger(path / "ledger.csv")
    first, last = LAG_UNCOUNTED if options.lag else UNCOUNTED
    steady = range(1 + first, options.steps - last + 1)
    parts = anatomy(ledger)
    steps = [parts[number] for number in steady]
    return {
        "step_s": Spread.of(s.wall_s for s in steps),
        "full_slot_s": Spread.of(row["cost/full_slot_s"] for row in rows if row["step"] in steady),
        "overhead_s": Spread.of(s.overhead_s for s in steps),
        "overhead_share": Spread.of(s.overhead_share for s in steps),
        "driver_cpu_s": Spread.of(cpu[first : options.steps - last]),
        "gaps": {name: Spread.of(values) for name, values in gaps(ledger, steady).items()},
        "all_step_s": [row["step_s"] for row in rows if row["step"] > 0],
        "actors": [row["pool/rollout_actors"] for row in rows if row["step"] > 0],
        "cores": len(os.sched_getaffinity(0)),
        "measured_s": time.time(),
        "steps": [asdict(s) for s in steps],
        "lengths": {"mean": float(np.mean(lengths)), "p99": float(np.quantile(lengths, 0.99))},
    }


if __name__ == "__main__":
    main()
