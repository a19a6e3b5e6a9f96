"""Does the quickstart learn, whatever the seed? `python -m benchmarks.three_seeds [--quick] [section.key=value …]`.

Runs the recipe for seeds 0, 1 and 2, one after the other, each as a user would (the command line, in a process of its own),
and compares accuracy on the held-out prompts before and after, at the temperature of training and greedily.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.charts import sparkline
from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import train
from benchmarks.final_model import FinalModel, check_final_model

LEAST_SAMPLED, LEAST_GREEDY = 20.0, 12.0  # points, mean over the seeds; each seed at least half of it
SATURATED = 0.95
TAIL = 4.0  # p99 / p50 of response lengths
EDGE = 5  # steps pooled for the lengths at the start and at the end


@dataclass(frozen=True)
class ResponseLengths:
    p50: float
    p99: float
    r2: float  # of log response length on log prompt length, linear: what the prompt's length alone predicts

    @property
    def tail(self) -> float:
        return self.p99 / self.p50 if self.p50 else float("nan")


@dataclass(frozen=True)
class Seed:
    seed: int
    wall_s: float  # of the whole command
    training_s: float  # of the steps alone
    peak_mb: float  # 10⁶ bytes, all processes together
    before: dict[str, float]  # "sampled" and "greedy" accuracy
    after: dict[str, float]
    rewards: list[float]  # mean of each step
    start: ResponseLengths
    end: ResponseLengths
    final: FinalModel | None

    def rise(self, how: str) -> float:
        """Points."""
        return 100 * (self.after[how] - self.before[how])

    @property
    def slope(self) -> tuple[float, float]:
        """Points per 100 steps over the last third of the reward curve, and its standard error."""
        tail = np.asarray(self.rewards[-max(3, len(self.rewards) // 3) :])
        x = np.arange(len(tail)) - (len(tail) - 1) / 2
        slope = float((x * tail).sum() / (x * x).sum())
        rest = tail - tail.mean() - slope * x
        error = float(np.sqrt((rest**2).sum() / max(1, len(tail) - 2) / (x * x).sum()))
        return 1e4 * slope, 1e4 * error

    @property
    def still_rises(self) -> bool:
        return self.slope[0] > 0 or max(self.after.values()) >= SATURATED


def run_seed(recipe: Path, overrides: list[str], seed: int, root: Path, *, check_model: bool) -> Seed:
    run = root / f"seed-{seed}"
    ended, rows = train(recipe, [f"run.seed={seed}", "watch.samples_per_step=0", *overrides], root, name=run.name)
    evaluated = [row for row in rows if row.get("eval/accuracy_sampled") is not None]
    steps = [row for row in rows if row["step"] > 0]
    ways = [way for way in ("sampled", "greedy") if f"eval/accuracy_{way}" in evaluated[0]]
    before, after = ({way: row[f"eval/accuracy_{way}"] for way in ways} for row in (evaluated[0], evaluated[-1]))
    edge = min(EDGE, len(steps))
    return Seed(
        seed,
        ended.wall_s,
        sum(row["step_s"] for row in steps),
        ended.peak_mb,
        before,
        after,
        [row["reward/mean"] for row in steps],
        lengths(run, [row["step"] for row in steps[:edge]]),
        lengths(run, [row["step"] for row in steps[-edge:]]),
        check_final_model(run) if check_model else None,
    )


def lengths(run: Path, steps: list[int]) -> ResponseLengths:
    """Response and prompt lengths, in tokens, of all samples of some steps."""
    from rlhfless_ray.weights.load_policy import load_tokenizer
    from rlhfless_ray.weights.model_folder import read_folder

    tokenizer = load_tokenizer(read_folder(run / "model"), False)
    rows = [json.loads(line) for step in steps for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()]
    tokens = np.array([row["tokens"] for row in rows], float)
    prompts = np.array([len(ids) for ids in tokenizer([row["prompt"] for row in rows])["input_ids"]], float)
    p50, p99 = np.quantile(tokens, [0.5, 0.99])
    return ResponseLengths(float(p50), float(p99), r_squared(np.log(prompts), np.log(tokens)))


def r_squared(x: np.ndarray, y: np.ndarray) -> float:
    """Share of the variance of y that a straight line in x explains; 0 when either does not vary."""
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def targets(seeds: list[Seed]) -> list[Target]:
    found = []
    for how, least in (("sampled", LEAST_SAMPLED), ("greedy", LEAST_GREEDY)):
        rises = [seed.rise(how) for seed in seeds if how in seed.after]
        if rises:
            found.append(Target(f"mean rise, {how}", float(np.mean(rises)), least=least, unit=" points"))
            found.append(Target(f"least rise of a seed, {how}", min(rises), least=least / 2, unit=" points"))
    rising = sum(s.still_rises for s in seeds)
    found.append(Target("seeds whose curve still rises or is at 95 %", rising, least=len(seeds)))
    tail = min(s.start.tail for s in seeds)
    found.append(Target("p99 / p50 of response lengths at the start, least seed", tail, least=TAIL))
    checked = [s.final for s in seeds if s.final is not None]
    if checked:
        same = sum(final.scores_the_same for final in checked)
        found.append(Target("final models that score the same in transformers and vLLM", same, least=len(checked)))
    return found


def show(seeds: list[Seed], console: Console) -> None:
    table = Table(
        "seed",
        "sampled, %",
        "rise",
        "greedy, %",
        "rise",
        "reward by step",
        "slope/100",
        "p99/p50",
        "R²",
        "training",
        "wall",
        "peak MB",
        "final model: hf / vLLM",
        title="The quickstart over seeds: before → after",
        title_justify="left",
    )
    low, high = min(min(s.rewards) for s in seeds), max(max(s.rewards) for s in seeds)
    for s in seeds:
        pair = {how: f"{100 * s.before[how]:.1f} → {100 * s.after[how]:.1f}" for how in s.after}
        rise = {how: f"{s.rise(how):+.1f}" for how in s.after}
        final = "" if s.final is None else f"{100 * s.final.transformers_accuracy:.1f} / {100 * s.final.vllm_accuracy:.1f}"
        table.add_row(
            str(s.seed),
            pair["sampled"],
            rise["sampled"],
            pair.get("greedy", ""),
            rise.get("greedy", ""),
            sparkline(s.rewards, low, high, 20),
            f"{s.slope[0]:+.1f} ± {s.slope[1]:.1f}",
            f"{s.start.tail:.1f} → {s.end.tail:.1f}",
            f"{s.start.r2:.2f} → {s.end.r2:.2f}",
            f"{s.training_s:.0f} s",
            f"{s.wall_s:.0f} s",
            f"{s.peak_mb:.0f}",
            final,
        )
    means = {how: np.mean([s.rise(how) for s in seeds]) for how in seeds[0].after}
    table.add_row("mean", "", f"{means.get('sampled', np.nan):+.1f}", "", f"{means.get('greedy', np.nan):+.1f}")
    console.print(table)


def as_json(seed: Seed) -> dict[str, Any]:
    rises = {how: seed.rise(how) for how in seed.after}
    return {**asdict(seed), "rise_points": rises, "slope_points_per_100_steps": seed.slope, "still_rises": seed.still_rises}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, 4 steps, 64 held-out prompts")
    parser.add_argument("--no-model-check", action="store_true", help="do not load the final models elsewhere")
    parser.add_argument("--keep", type=Path, help="keep the run folders below this folder")
    options = parser.parse_args()
    console = make_console()
    small = ["run.steps=4", "evaluate.prompts=64", "warm_start.steps=30"] if options.quick else []
    seeds_asked = options.seeds[:1] if options.quick else options.seeds
    root = options.keep or Path(tempfile.mkdtemp(prefix="rlhfless-three-seeds-"))
    seeds = []
    try:
        for seed in seeds_asked:
            console.print(f"seed {seed}", highlight=False)
            overrides = [*small, *options.overrides]
            seeds.append(run_seed(options.recipe, overrides, seed, root, check_model=not options.no_model_check))
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    show(seeds, console)
    reached = targets(seeds)
    show_targets(console, reached)
    overrides = [*small, *options.overrides]
    content = {"recipe": options.recipe.name, "overrides": overrides, "seeds": [as_json(s) for s in seeds]}
    save("three_seeds", content, reached, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
