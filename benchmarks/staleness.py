"""Is what is learned the same at every bound on the lag? `python -m benchmarks.staleness [--quick] [--seeds N …] [--only MODE …] [--draw]`.

Trains the quickstart at each bound, for three seeds. All modes of a seed begin with the same warm-started policy and train on
prompts in the same order. Compares accuracy on held-out prompts after the last step, and draws the reward over seconds and over
slot-seconds (docs/images/staleness.svg). Runs of a mode and seed replace earlier ones in the result file, so that seeds may be run one
by one on a quiet machine. `--draw` draws the picture again from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.charts import save_svg, sparkline, svg_pyplot
from benchmarks.common.results import Target, make_console, result_folder, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import read_metrics
from benchmarks.learns import warm_policy
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.local.cluster import RayCluster

RECIPE = ROOT / "recipes" / "quickstart.yaml"
PICTURE = ROOT / "docs" / "images" / "staleness.svg"
SYNCHRONOUS = "no lag"
BESIDE = ["rollout.partial=continue", "rollout.ahead=true", "learner.max_slots_per_rank=1"]
MODES: dict[str, list[str]] = {
    SYNCHRONOUS: [],
    "one step off": ["rollout.max_lag_steps=1", "learner.max_slots_per_rank=1"],
    "partial, bound 1": ["rollout.partial=continue", "rollout.max_lag_steps=1"],
    "partial, bound 2": ["rollout.partial=continue", "rollout.max_lag_steps=2", "rollout.oversample=2"],
    "beside the update, bound 2": [*BESIDE, "rollout.max_lag_steps=2", "rollout.oversample=2"],
}
COMMON = [
    "evaluate.prompts=1024",  # a standard error of about 1.2 points in each run
    "evaluate.every_steps=1000000",
    "checkpoint.every_steps=1000000",
    "watch.progress='plain'",
    "watch.tensorboard=false",
    "watch.wandb='off'",
    "watch.samples_per_step=1",
]
SAME = 2.0  # points between the mean accuracies of a mode and of synchronous steps
SMOOTH = 9  # steps of the moving average that is drawn


def train(recipe: Recipe) -> dict[str, Any]:
    """Train, and return accuracies and, by step, reward, seconds, slot-seconds and lag."""
    with Runtime(recipe) as run:
        for _ in run:
            pass
        folder = run.folder.path
    rows = read_metrics(folder)
    steps, evaluated = [row for row in rows if row["step"] > 0], [row for row in rows if "eval/accuracy_sampled" in row]
    columns = {"reward": "reward/mean", "step_s": "step_s", "slot_s": "cost/full_slot_s", "old_share": "lag/old_share"}
    columns |= {"effective_share": "learn/effective_share", "sampler_kl": "learn/sampler_kl"}
    return {
        "before": evaluated[0]["eval/accuracy_sampled"],
        "after": evaluated[-1]["eval/accuracy_sampled"],
        "greedy": evaluated[-1]["eval/accuracy_greedy"],
        "lag_max": max(row.get("lag/max", 0.0) for row in steps),
        **{name: [row.get(key) or 0.0 for row in steps] for name, key in columns.items()},
    }


def mean_after(runs: dict[str, Any], how: str = "after") -> float:
    return 100 * float(np.mean([one[how] for one in runs.values()]))


def targets(found: dict[str, dict[str, Any]]) -> list[Target]:
    base = found.get(SYNCHRONOUS, {})
    reached = []
    for mode, runs in found.items():
        if mode != SYNCHRONOUS and runs.keys() == base.keys():
            lost = mean_after(base) - mean_after(runs)
            reached.append(Target(f"{mode}: held-out accuracy lost, mean over {len(runs)} seeds", lost, most=SAME, unit=" points"))
    return reached


def show(found: dict[str, dict[str, Any]], console: Console) -> None:
    heads = ("", "sampled, %", "greedy, %", "by seed", "tokens old", "effective", "seconds", "slot-s", "reward by step")
    table = Table(*heads, title="Held-out accuracy after training", title_justify="left")
    for mode, runs in found.items():
        ones = list(runs.values())
        old, effective = (np.mean([np.mean(one[name][1:]) for one in ones]) for name in ("old_share", "effective_share"))
        seconds, slots = (np.mean([np.sum(one[name]) for one in ones]) for name in ("step_s", "slot_s"))
        curve = np.mean([one["reward"] for one in ones], axis=0)
        table.add_row(
            mode,
            f"{mean_after(runs):.1f}",
            f"{mean_after(runs, 'greedy'):.1f}",
            " ".join(f"{100 * one['after']:.1f}" for one in ones),
            f"{100 * old:.0f} %",
            f"{effective:.3f}" if effective else "",
            f"{seconds:.0f}",
            f"{slots:.0f}",
            sparkline(curve, min(curve), max(curve), 20),
        )
    console.print(table)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the moving average of the reward, mean over seeds, over seconds and over slot-seconds."""
    figure, axes = svg_pyplot().subplots(1, 2, figsize=(9.2, 3.4), sharey=True, layout="constrained")
    for axis, (name, label) in zip(axes, (("step_s", "seconds of training"), ("slot_s", "slot-seconds leased")), strict=True):
        for mode, runs in found.items():
            ones = list(runs.values())
            x = np.cumsum(np.mean([one[name] for one in ones], axis=0))
            y = np.convolve(np.mean([one["reward"] for one in ones], axis=0), np.ones(SMOOTH) / SMOOTH, "valid")
            axis.plot(x[SMOOTH - 1 :], y, label=mode, linewidth=1.5)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"reward, mean of {SMOOTH} steps")
    axes[0].legend(frameon=False, fontsize=8)
    save_svg(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(MODES), default=list(MODES), help="some of the modes")
    parser.add_argument("--quick", action="store_true", help="one seed of 3 steps from a policy that knows little")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw results/staleness.json again")
    options = parser.parse_args()
    path = result_folder(options.quick) / "staleness.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    found: dict[str, dict[str, Any]] = {mode: kept.get("runs", {}).get(mode, {}) for mode in MODES}
    console = make_console()
    if options.draw:
        draw({mode: runs for mode, runs in found.items() if runs}, PICTURE)
        return
    torch.set_num_threads(1)  # of this process: two that wait for each other crawl where anything else runs
    small = ["run.steps=3", "evaluate.prompts=32", "warm_start.steps=30"] if options.quick else []
    overrides = [*COMMON, *small, *options.overrides]
    load = {seed: os.getloadavg()[0] for seed in options.seeds}
    with tempfile.TemporaryDirectory(prefix="rlhfless-staleness-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        for seed in options.seeds[:1] if options.quick else options.seeds:
            base = Recipe.load(RECIPE, [*overrides, f"run.seed={seed}"])
            warm_policy(base)
            cluster = RayCluster(base)
            cluster.start()
            try:
                for mode in options.only:
                    console.print(f"seed {seed}, {mode}", highlight=False)
                    own = [f"run.root={root}", f"run.name={seed}-{list(MODES).index(mode)}", *overrides, f"run.seed={seed}", *MODES[mode]]
                    found[mode][str(seed)] = {"load_before": load[seed], **train(Recipe.load(RECIPE, own))}
                    done = {mode: runs for mode, runs in found.items() if runs}
                    content = {"recipe": RECIPE.name, "overrides": overrides, "modes": MODES, "runs": done}
                    save("staleness", content, targets(done), console=console, quick=options.quick)
            finally:
                cluster.stop()
    done = {mode: runs for mode, runs in found.items() if runs}
    show(done, console)
    show_targets(console, targets(done))
    if not options.quick:
        draw(done, PICTURE)


if __name__ == "__main__":
    main()
