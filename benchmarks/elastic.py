"""Elastic pools against fixed ones on this machine: `python -m benchmarks.elastic [--quick] [section.key=value …]`.

The real runtime, the same recipe and seed, hence the same tokens: only who holds which core when differs.

fixed, colocated  both phases on all cores, which are held for the whole run
fixed, split      one core for generation and one for learning, both held for the whole run
elastic           the plan of each step decides how many cores each phase leases
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import train


@dataclass(frozen=True)
class Mode:
    """held_slots: slots that the mode holds throughout although the run itself asks for fewer (0: what the ledger says)."""

    name: str
    overrides: tuple[str, ...]
    held_slots: int = 0


def modes(cores: int, prefers: list[float]) -> list[Mode]:
    colocated = (f"rollout.min_actors={cores}", f"rollout.max_actors={cores}", f"learner.max_slots_per_rank={cores}")
    half = max(1, cores // 2)
    split = (f"rollout.min_actors={half}", f"rollout.max_actors={half}", f"learner.max_slots_per_rank={cores - half or 1}")
    most = (f"rollout.max_actors={cores}", f"learner.max_slots_per_rank={cores}")
    return [
        Mode("fixed, colocated", ("functions.elastic=false", *colocated)),
        # While one phase works the other's core waits for it: the run asks for one at a time, the mode pays for both.
        Mode("fixed, split", ("functions.elastic=false", *split), held_slots=cores),
        *(Mode(f"elastic, prefer {p:g}", (f"objective.prefer={p:g}", *most)) for p in prefers),
    ]


def run(mode: Mode, recipe: Path, overrides: list[str], root: Path, drop: int) -> list[dict[str, float]]:
    """Steady steps: step_s, full_slot_s, busy_slot_s, tokens."""
    _, rows = train(recipe, ["evaluate.prompts=0", "watch.wandb='off'", *overrides, *mode.overrides], root)
    return [
        {
            "step_s": row["step_s"],
            "busy_slot_s": row["cost/busy_slot_s"],
            "tokens": row["tokens/generated"],
            "full_slot_s": mode.held_slots * row["step_s"] if mode.held_slots else row["cost/full_slot_s"],
            "actors": row["pool/rollout_actors"],
            "reward": row["reward/mean"],
        }
        for row in rows
        if row["step"] > drop
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--drop", type=int, default=4, help="first steps of a run that are not steady state")
    parser.add_argument("--prefer", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--quick", action="store_true", help="one round of a few steps: shows that it runs, measures nothing")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.drop = 1, 4, 1
    console = make_console()
    every = modes(options.cores, options.prefer)
    found: dict[str, list[dict[str, float]]] = {mode.name: [] for mode in every}
    with tempfile.TemporaryDirectory(prefix="rlhfless-elastic-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        for number in range(options.rounds):
            for mode in every:  # in turn, so that what else the machine does falls on all of them
                console.print(f"round {number + 1} of {options.rounds}: {mode.name}", highlight=False)
                overrides = [f"run.steps={options.steps}", *options.overrides]
                root = scratch / f"{number}-{every.index(mode)}"
                found[mode.name] += run(mode, options.recipe, overrides, root, options.drop)
    check_same_work(found, options.rounds)
    spreads = {
        name: {key: Spread.of(step[key] for step in steps) for key in ("step_s", "full_slot_s", "busy_slot_s", "actors")}
        for name, steps in found.items()
    }
    fixed = min(("fixed, colocated", "fixed, split"), key=lambda n: spreads[n]["full_slot_s"].median)
    table = Table(
        "",
        "step, s",
        "full cost, slot-s",
        "busy",
        "actors",
        f"time of {fixed}",
        "its cost",
        title="One step: medians (quartiles)",
        title_justify="left",
    )
    ratios: dict[str, dict[str, float]] = {}
    for name, spread in spreads.items():
        ratio = {key: spread[key].median / spreads[fixed][key].median for key in ("step_s", "full_slot_s")}
        ratios[name] = ratio
        table.add_row(
            name,
            spread["step_s"].show(),
            spread["full_slot_s"].show(),
            spread["busy_slot_s"].show(),
            f"{spread['actors'].median:g}",
            f"{ratio['step_s']:.2f}×",
            f"{ratio['full_slot_s']:.2f}×",
        )
    console.print(table)
    targets = [
        Target(f"{name}: full cost over the cheaper fixed ({fixed})", ratio["full_slot_s"], most=1.0, unit="×")
        for name, ratio in ratios.items()
        if name.startswith("elastic")
    ]
    show_targets(console, targets)
    content: dict[str, Any] = {
        "recipe": options.recipe.name,
        "overrides": options.overrides,
        "rounds": options.rounds,
        "steps": options.steps,
        "baseline": fixed,
        "modes": spreads,
        "ratios": ratios,
    }
    save("elastic", content, targets, console=console, quick=options.quick)


def check_same_work(found: dict[str, list[dict[str, float]]], rounds: int) -> None:
    """Raises RuntimeError unless every mode generated the same number of tokens in every step: same seed, same samples."""
    tokens = {name: [step["tokens"] for step in steps[: len(steps) // rounds]] for name, steps in found.items()}
    first = next(iter(tokens.values()))
    for name, series in tokens.items():
        if series != first:
            raise RuntimeError(f"{name} generated other tokens than the first mode: {series[:5]} against {first[:5]}")


if __name__ == "__main__":
    main()
