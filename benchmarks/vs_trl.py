"""TRL's GRPOTrainer and this runtime on the same work, in turn: `python -m benchmarks.vs_trl [--quick]`.

Same policy folder, prompts in the same order, group size, response lengths, loss, optimizer, float32 and cores. Beside the
two stands the ceiling: plain torch learning plus bare vLLM generation of the same tokens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_process import MeasuredProcess
from benchmarks.peers.ceiling import Ceiling, measure_ceiling
from benchmarks.peers.curves import measure_curves, show_curves
from benchmarks.peers.peer_env import trl_python
from benchmarks.peers.run_ours import recipe, run_ours
from benchmarks.peers.run_trl import run_trl, settings
from benchmarks.peers.shared_work import LARGE, SMALL, SharedWork

AHEAD = 1.0  # samples per second over TRL's
OF_CEILING = {SMALL.name: 0.85, LARGE.name: 0.95}


@dataclass(frozen=True)
class ComparisonPlan:
    """How much is run. `drop`: first steps of every run that are not steady state."""

    rounds: int = 2
    trl_steps: int = 11
    default_steps: int = 6  # of TRL with its own defaults, in the first round only
    our_steps: int = 28
    drop: int = 3
    repeats: int = 7  # of each part of the ceiling


QUICK = ComparisonPlan(rounds=1, trl_steps=2, default_steps=2, our_steps=4, drop=1, repeats=2)


@dataclass(frozen=True)
class Compared:
    work: SharedWork
    parameters: int
    trl: list[MeasuredProcess]
    ours: list[MeasuredProcess]
    ceilings: list[Ceiling]
    drop: int
    by_default: MeasuredProcess | None = None  # TRL as its defaults are: other numbers than float32's, hence no target's

    def spread(self, runs: list[MeasuredProcess], name: str) -> Spread:
        """Over the steady steps of all rounds."""
        return Spread.of(step[name] for run in runs for step in run.steady(self.drop))

    def samples_per_s(self, runs: list[MeasuredProcess]) -> Spread:
        return Spread.of(self.work.samples / step["step_s"] for run in runs for step in run.steady(self.drop))

    @property
    def ceiling_step_s(self) -> float:
        """Medians over all rounds."""
        return self.ceiling_generate.median + self.ceiling_learn.median

    @property
    def ceiling_generate(self) -> Spread:
        one = Spread.of(t for c in self.ceilings for t in c.one_engine_s)
        many = Spread.of(t for c in self.ceilings for t in c.many_engines_s)
        return one if one.median <= many.median else many

    @property
    def ceiling_learn(self) -> Spread:
        return Spread.of(t for c in self.ceilings for t in c.learn_s)

    def ratios(self) -> dict[str, float]:
        trl, ours = self.spread(self.trl, "step_s").median, self.spread(self.ours, "step_s").median
        return {
            "speedup": trl / ours,
            "generation": self.spread(self.trl, "generate_s").median / self.spread(self.ours, "generate_s").median,
            "learning": self.spread(self.trl, "learn_s").median / self.spread(self.ours, "learn_s").median,
            "ceiling": trl / self.ceiling_step_s,
            "of_ceiling": self.ceiling_step_s / ours,
            "memory": max(r.peak_mb for r in self.ours) / max(r.peak_mb for r in self.trl),
        } | self._over_defaults()

    def _over_defaults(self) -> dict[str, float]:
        """Ours, in float32, over TRL with its own defaults."""
        if self.by_default is None:
            return {}
        names = {"default_speedup": "step_s", "default_generation": "generate_s", "default_learning": "learn_s"}
        return {ratio: self.spread([self.by_default], name).median / self.spread(self.ours, name).median for ratio, name in names.items()}


def compare(work: SharedWork, plan: ComparisonPlan, threads: int, scratch: Path, console: Console) -> Compared:
    files = work.write(scratch / work.name)
    trl, ours, ceilings = [], [], []
    by_default = None
    for number in range(plan.rounds):
        here = scratch / f"{work.name}-{number}"
        here.mkdir()
        console.print(f"{work.name}, round {number + 1} of {plan.rounds}: TRL", highlight=False)
        trl.append(run_trl(settings(work, files, plan.trl_steps, threads), here))
        if by_default is None:
            console.print(f"{work.name}: TRL with its own defaults", highlight=False)
            by_default = run_trl(settings(work, files, plan.default_steps, threads, alike=False), here)
        console.print(f"{work.name}, round {number + 1} of {plan.rounds}: rlhfless_ray", highlight=False)
        ours.append(run_ours(recipe(work, files, here / "runs", plan.our_steps, threads), here))
        console.print(f"{work.name}, round {number + 1} of {plan.rounds}: the ceiling", highlight=False)
        ceilings.append(measure_ceiling(work, files, here, threads=threads, repeats=plan.repeats))
    check_same_work(work, [*trl, by_default], ours)
    return Compared(work, files.parameters, trl, ours, ceilings, plan.drop, by_default)


def check_same_work(work: SharedWork, trl: list[MeasuredProcess], ours: list[MeasuredProcess]) -> None:
    """Raises RuntimeError unless every step of both trained on the same number of tokens."""
    wanted = work.samples * work.max_tokens
    for run in (*trl, *ours):
        for number, step in enumerate(run.steps, 1):
            trained = step.get("trained_tokens", step["tokens"])
            if not step["tokens"] == trained == wanted:
                told = f"{step['tokens']} tokens generated, {trained} trained, {wanted} wanted"
                raise RuntimeError(f"{run.system}, step {number}: {told}")


def show(compared: Compared, console: Console) -> None:
    work, ratios = compared.work, compared.ratios()
    title = (
        f"{work.name} ({compared.parameters / 1e6:.2f} M parameters, float32): {work.samples} samples × {work.max_tokens} "
        "tokens per step; medians (quartiles)"
    )
    table = Table("", "TRL", "rlhfless_ray", "ceiling", "TRL / ours", title=title, title_justify="left")
    table.add_row(
        "samples/s",
        compared.samples_per_s(compared.trl).show(),
        compared.samples_per_s(compared.ours).show(),
        f"{work.samples / compared.ceiling_step_s:.3g}",
        f"{1 / ratios['speedup']:.3g}",
    )
    bare = {
        "step_s": f"{compared.ceiling_step_s:.3g}",
        "generate_s": compared.ceiling_generate.show(),
        "learn_s": compared.ceiling_learn.show(),
    }
    shown_as = {"step_s": "step, s", "generate_s": "generation, s", "learn_s": "learning, s", "score_s": "scoring, s"}
    for name, shown in shown_as.items():
        trl, ours = compared.spread(compared.trl, name), compared.spread(compared.ours, name)
        table.add_row(shown, trl.show(), ours.show(), bare.get(name, ""), f"{trl.median / ours.median:.3g}")
    for shown, get in (("peak memory, MB", lambda r: r.peak_mb), ("start-up, s", lambda r: r.start_up_s)):
        trl, ours = max(map(get, compared.trl)), max(map(get, compared.ours))
        table.add_row(shown, f"{trl:.4g}", f"{ours:.4g}", "", f"{trl / ours:.3g}")
    console.print(table)
    if compared.by_default is not None:
        said = [f"{shown_as[n]} {compared.spread([compared.by_default], n).show()}" for n in ("step_s", "generate_s", "learn_s")]
        console.print(
            f"TRL with its own defaults (bfloat16 autocast, gradient checkpointing, micro-batches of 8): {'; '.join(said)}; "
            f"over ours in float32: {ratios['default_speedup']:.3g}",
            highlight=False,
        )


def targets(compared: Compared) -> list[Target]:
    name, ratios = compared.work.name, compared.ratios()
    return [
        Target(f"{name}: samples/s over TRL", ratios["speedup"], least=AHEAD, unit="×"),
        Target(f"{name}: share of the ceiling ({ratios['ceiling']:.3g}× TRL)", ratios["of_ceiling"], least=OF_CEILING[name]),
    ]


def as_json(compared: Compared) -> dict[str, Any]:
    names = ("step_s", "generate_s", "learn_s", "score_s")
    both = {"trl": compared.trl, "rlhfless_ray": compared.ours}
    return {
        "workload": asdict(compared.work),
        "parameters": compared.parameters,
        "ratios": compared.ratios(),
        "steady": {
            system: {"samples_per_s": compared.samples_per_s(runs), **{n: compared.spread(runs, n) for n in names}}
            for system, runs in both.items()
        },
        "ceiling": {
            "step_s": compared.ceiling_step_s,
            "generate_s": compared.ceiling_generate,
            "learn_s": compared.ceiling_learn,
            "rounds": [asdict(c) for c in compared.ceilings],
        },
        "runs": {system: [asdict(run) for run in runs] for system, runs in both.items()},
        "trl_by_default": asdict(compared.by_default) if compared.by_default else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that it runs, measures nothing")
    parser.add_argument("--rounds", type=int, default=ComparisonPlan.rounds, help="of TRL, this and the ceiling, in turn")
    parser.add_argument("--our-steps", type=int, default=ComparisonPlan.our_steps, help="of this runtime, in each round")
    parser.add_argument("--sizes", nargs="*", choices=[SMALL.name, LARGE.name], default=[SMALL.name, LARGE.name])
    parser.add_argument("--micro-sequences", type=int, help="sequences of a micro-batch, in every system")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores each system may use")
    parser.add_argument("--curve-steps", type=int, help="steps of the reward curves; 0: none", default=None)
    parser.add_argument("--keep", type=Path, help="keep logs and run folders below this folder")
    options = parser.parse_args()
    plan = QUICK if options.quick else ComparisonPlan(rounds=options.rounds, our_steps=options.our_steps)
    console = make_console()
    trl_python()
    scratch = Path(tempfile.mkdtemp(prefix="rlhfless-vs-trl-")) if options.keep is None else options.keep
    scratch.mkdir(parents=True, exist_ok=True)
    found = []
    try:
        for work in (SMALL, LARGE):
            if work.name in options.sizes:
                if options.micro_sequences:
                    work = replace(work, micro_sequences=options.micro_sequences)
                found.append(compare(work, plan, options.threads, scratch, console))
                show(found[-1], console)
        curve_steps = options.curve_steps if options.curve_steps is not None else (3 if options.quick else 40)
        curves = measure_curves(curve_steps, options.threads, scratch, console, quick=options.quick) if curve_steps else None
    finally:
        if options.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    if curves:
        show_curves(curves, console)
    reached = [target for compared in found for target in targets(compared)]
    show_targets(console, reached)
    content = {
        "plan": asdict(plan),
        "threads": options.threads,
        "trl_versions": found[0].trl[0].versions if found else {},
        "sizes": {compared.work.name: as_json(compared) for compared in found},
        "curves": curves,
    }
    save("vs_trl", content, reached, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
