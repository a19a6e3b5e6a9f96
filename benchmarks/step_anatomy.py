"""Where a step's time goes, and what start-up costs: `python -m benchmarks.step_anatomy [RECIPE] [section.key=value …]`.

Two views of the same steps: the driver's (the phases of metrics.jsonl) and the instances' (their spans in ledger.csv, see
`common/ledger_anatomy.py`). Steps with an evaluation and the first `--drop` ones are not steady state and are left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.ledger_anatomy import PARTS, StepAnatomy, anatomy, gaps, warm_starts
from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import read_metrics
from rlhfless_ray import Recipe
from rlhfless_ray.functions.ledger import read_ledger

OVERHEAD = 0.03  # of the step, on the critical path
PHASES = ("rollout", "score", "learn", "publish", "lease", "driver")
IN_PHASES = "lease"  # its time lies inside the other phases'


def measure(recipe: Recipe) -> tuple[Path, dict[str, Any]]:
    """Run the recipe in this process; returns its run folder and what start-up took (seconds)."""
    began = time.monotonic()
    from rlhfless_ray.runtime.runtime import Runtime

    imported = time.monotonic()
    run = Runtime(recipe)
    checked = time.monotonic()
    ray_s = 0.0
    start = run.cluster.start

    def timed_start() -> None:
        nonlocal ray_s
        before = time.monotonic()
        start()
        ray_s = time.monotonic() - before

    run.cluster.start = timed_start  # type: ignore[method-assign]
    cold: dict[str, list[dict[str, float]]] = {}
    with run:
        entered = time.monotonic()
        for step in run:
            if step.number == 1:
                cold = cold_starts(run)
    start_up = {
        "import_s": imported - began,
        "check_s": checked - imported,
        "ray_s": ray_s,
        "enter_s": entered - checked,
        "cold_starts": cold,
    }
    return run.folder.path, start_up


def cold_starts(run: Any) -> dict[str, list[dict[str, float]]]:
    """What every instance told of its own start: {kind: [{what: seconds}]}."""
    import ray

    found: dict[str, list[dict[str, float]]] = {}
    stages = run.parts.stages
    for pool in (stages.rollout.pool, stages.score.pool, stages.learn.worker_group.pool):
        for instance in (*pool.working, *pool.parked):
            if instance.opened is not None:
                spans = ray.get(instance.opened, timeout=60)["spans"]
                found.setdefault(instance.kind, []).append({span.what: span.to_s - span.from_s for span in spans})
    return found


def steady(rows: list[dict[str, Any]], drop: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] > drop and not row.get("phase/eval_s")]


def show_steps(rows: list[dict[str, Any]], found: list[StepAnatomy], console: Console) -> None:
    step_s = Spread.of(row["step_s"] for row in rows).median
    table = Table("phase", "seconds: median (quartiles)", "% of step", title="The driver's view", title_justify="left")
    for name in PHASES:
        spread = Spread.of(row[f"phase/{name}_s"] for row in rows)
        shown = f"{name} (inside the others)" if name == IN_PHASES else name
        table.add_row(shown, spread.show(), f"{100 * spread.median / step_s:.1f}")
    table.add_row("step", Spread.of(row["step_s"] for row in rows).show(), "100")
    console.print(table)
    wall_s = Spread.of(a.wall_s for a in found)
    table = Table("part", "seconds: median (quartiles)", "% of step", title="The instances' view", title_justify="left")
    for part in PARTS:
        spread = Spread.of(a.parts[part] for a in found)
        table.add_row(part, spread.show(), f"{100 * spread.median / wall_s.median:.1f}")
    overhead = Spread.of(a.overhead_s for a in found)
    table.add_row("overhead: no instance works", overhead.show(), f"{100 * overhead.median / wall_s.median:.1f}")
    for holder in found[0].overhead_by_holder:
        spread = Spread.of(a.overhead_by_holder[holder] for a in found)
        table.add_row(f"  leases held by {holder}", spread.show(), f"{100 * spread.median / wall_s.median:.1f}")
    idle = Spread.of(a.idle_slot_s / a.held_slot_s for a in found if a.held_slot_s)
    table.add_row("idle share of leased slots", f"{100 * idle.median:.1f} %", "")
    table.add_row("step, its writing included", wall_s.show(), "100")
    console.print(table)


def show_gaps(found: dict[str, Spread], console: Console) -> None:
    table = Table("gap", "milliseconds: median (quartiles)", "times", title="Where the overhead lies", title_justify="left")
    for name, s in sorted(found.items(), key=lambda item: -item[1].median * item[1].count):
        table.add_row(name, Spread(1e3 * s.median, 1e3 * s.low, 1e3 * s.high, s.count).show(), str(s.count))
    console.print(table)


def show_start_up(start_up: dict[str, Any], first: StepAnatomy, warm: dict[str, Spread], console: Console) -> None:
    table = Table("start-up", "seconds", title="What start-up costs", title_justify="left")
    table.add_row("import the runtime", f"{start_up['import_s']:.2f}")
    table.add_row("read and check recipe, prompts, policy", f"{start_up['check_s']:.2f}")
    table.add_row("start Ray", f"{start_up['ray_s']:.2f}")
    table.add_row("learner up, first weights published, first checkpoint", f"{start_up['enter_s'] - start_up['ray_s']:.2f}")
    table.add_row("before step 1, evaluation included (ledger's step 0)", f"{first.wall_s:.2f}")
    for part, seconds in first.parts.items():
        if seconds:
            table.add_row(f"  of it: {part}, any instance", f"{seconds:.2f}")
    for kind, instances in start_up["cold_starts"].items():
        for what in instances[0]:
            spread = Spread.of(instance[what] for instance in instances if what in instance)
            table.add_row(f"cold {kind}: {what}", spread.show())
    for kind, spread in warm.items():
        table.add_row(
            f"warm {kind}: lease handed over → working, ms",
            Spread(1e3 * spread.median, 1e3 * spread.low, 1e3 * spread.high, spread.count).show(),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--steps", type=int, help="default 40")
    parser.add_argument("--drop", type=int, default=5, help="first steps left out")
    parser.add_argument("--quick", action="store_true", help="8 steps")
    parser.add_argument("--keep", type=Path, help="keep the run folder below this folder")
    options = parser.parse_args()
    console = make_console()
    steps = options.steps or (8 if options.quick else 40)
    drop = min(options.drop, steps // 2)
    with tempfile.TemporaryDirectory(prefix="rlhfless-anatomy-") as scratch:
        root = options.keep or Path(scratch)
        own = [f"run.root={root}", f"run.steps={steps}", "evaluate.every_steps=0"]
        recipe = Recipe.load(options.recipe, [*own, *options.overrides])
        folder, start_up = measure(recipe)
        rows = steady(read_metrics(folder), drop)
        ledger = read_ledger(folder / "ledger.csv")
    by_step = anatomy(ledger)
    found = [by_step[row["step"]] for row in rows]
    warm = {kind: Spread.of(seconds) for kind, seconds in warm_starts(ledger, drop + 1).items()}
    console.print(f"{options.recipe.name}: {len(rows)} steady steps of {steps}", highlight=False)
    show_steps(rows, found, console)
    between = {name: Spread.of(seconds) for name, seconds in gaps(ledger, [row["step"] for row in rows]).items()}
    show_gaps(between, console)
    show_start_up(start_up, by_step[0], warm, console)
    middle = Spread.of(a.overhead_share for a in found).median
    whole = sum(a.overhead_s for a in found) / sum(a.wall_s for a in found)
    reached = [
        Target("overhead on the critical path, median step", middle, most=OVERHEAD),
        Target("overhead on the critical path, all steady steps", whole, most=OVERHEAD),
    ]
    show_targets(console, reached)
    content = {
        "recipe": options.recipe.name,
        "overrides": options.overrides,
        "steps": steps,
        "drop": drop,
        "phases": {name: Spread.of(row[f"phase/{name}_s"] for row in rows) for name in PHASES},
        "step_s": Spread.of(row["step_s"] for row in rows),
        "parts": {part: Spread.of(a.parts[part] for a in found) for part in PARTS},
        "overhead_s": Spread.of(a.overhead_s for a in found),
        "overhead_by_holder": {h: Spread.of(a.overhead_by_holder[h] for a in found) for h in found[0].overhead_by_holder},
        "gaps_s": between,
        "start_up": start_up,
        "warm_starts_s": warm,
        "before_step_1": asdict(by_step[0]),
        "anatomy": [asdict(a) for a in found],
    }
    save("step_anatomy", content, reached, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
