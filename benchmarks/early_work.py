"""What early work saves in the real runtime: `python -m benchmarks.early_work [--quick] [--recipe FILE] [--rounds N] [--steps N]`.

Three kinds of runs of one recipe, in turn and then in reverse order:

off      no engine wakes before the update ends
wake     engines wake on slots that the learner leaves free, before its update ends
shipped  by the run's own decisions

The learning rate is next to nothing, so all runs draw the same tokens in each step, and steps are compared in pairs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import read_metrics, run_process
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.autoscaler.step_predictor import StepPredictor
from rlhfless_ray.runtime import updates

KINDS = ("off", "wake", "shipped")
DROP = 4  # first steps, in which processes start and models are fitted
SHOWN = ("step_s", "phase/rollout_s", "phase/learn_s", "phase/lease_s", "cost/full_slot_s")
DRAWS = 2000  # of the bootstrap
LEAST_SAVING = 0.03  # of the step's time, by the run's own decision


def run_kind(kind: str, recipe: Path, root: Path, name: str, steps: int) -> None:
    """Run the recipe in this process, with what its kind does early."""
    own = [f"run.root={root}", f"run.name={name}", f"run.steps={steps}", "evaluate.every_steps=0", "evaluate.prompts=0"]
    own += ["learner.learning_rate=1e-12", "watch.progress=plain", "watch.wandb=off", f"checkpoint.every_steps={10 * steps}"]
    if kind == "wake":
        StepPredictor.takes = lambda self, measure, ahead=False: measure == "early_wake"  # type: ignore[method-assign]
    if kind == "off":
        updates.wake_early = lambda session, update, saves: None
    with Runtime(Recipe.load(recipe, own)) as run:
        for _ in run:
            pass


def compare(rows: dict[str, list[list[dict[str, Any]]]], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return what each kind saves against "off": of time and full cost, with the 90 % interval of a bootstrap over steps.

    `rows`: {kind: metrics of the steps of each round}.
    """
    rng, found = np.random.default_rng(seed), {}
    for kind in KINDS[1:]:
        for name in ("step_s", "cost/full_slot_s"):
            without, with_it = (np.mean([[row[name] for row in one] for one in rows[which]], axis=0) for which in ("off", kind))
            drawn = rng.integers(0, len(without), (DRAWS, len(without)))
            savings = 1 - with_it[drawn].sum(1) / without[drawn].sum(1)
            low, high = np.quantile(savings, (0.05, 0.95))
            found.setdefault(kind, {})[name] = {"saving": 1 - with_it.sum() / without.sum(), "low": low, "high": high}
    return found


def check_same_tokens(rows: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Raise ValueError unless all runs generated the same number of tokens in each step."""
    counts = {tuple(row["tokens/generated"] for row in one) for rounds in rows.values() for one in rounds}
    if len(counts) > 1:
        raise ValueError("the runs drew different tokens, so their steps cannot be compared in pairs")


def measure(recipe: Path, rounds: int, steps: int) -> dict[str, list[list[dict[str, Any]]]]:
    rows: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="rlhfless-early-") as folder:
        root = Path(folder)
        for number in range(rounds):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                name = f"{kind}-{number}"
                own = ("--kind", kind, "--recipe", recipe, "--root", root, "--name", name, "--steps", str(steps))
                run_process([sys.executable, "-m", "benchmarks.early_work", *own], root / f"{name}.log", memory=False)
                rows[kind].append([row for row in read_metrics(root / name) if row["step"] > DROP])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "long_tail.yaml")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind:
        run_kind(given.kind, given.recipe, given.root, given.name, given.steps)
        return
    console = make_console()
    rounds, steps = (1, DROP + 3) if given.quick else (given.rounds, given.steps)
    rows = measure(given.recipe, rounds, steps)
    check_same_tokens(rows)
    found = compare(rows)
    spreads = {kind: {name: Spread.of(row[name] for one in by_round for row in one) for name in SHOWN} for kind, by_round in rows.items()}
    table = Table("kind", *SHOWN, "saves of the time", "of the cost", title=f"Early work, {given.recipe.stem}", title_justify="left")
    for kind in KINDS:
        saved = [f"{one['saving']:+.1%} ({one['low']:+.1%} … {one['high']:+.1%})" for one in found.get(kind, {}).values()] or ["", ""]
        table.add_row(kind, *(spreads[kind][name].show() for name in SHOWN), *saved)
    console.print(table)
    last = [one[-1] for one in rows["shipped"]]
    decided = {"wake": [row.get("rollout/wake_reason", "") for row in last]}
    shipped = found["shipped"]["step_s"]
    targets = [
        Target("time saved by the run's own decisions", 100 * shipped["saving"], least=100 * LEAST_SAVING, unit=" %"),
        Target("  lower end of its 90 % interval", 100 * shipped["low"], least=0.0, unit=" %"),
    ]
    show_targets(console, targets)
    name = "early_work" if given.recipe.stem == "long_tail" else f"early_work_{given.recipe.stem}"
    content = {"recipe": given.recipe.stem, "rounds": rounds, "steps": steps - DROP, "saved": found, "kinds": spreads, "decided": decided}
    save(name, content, targets, console=console, quick=given.quick)


if __name__ == "__main__":
    main()
