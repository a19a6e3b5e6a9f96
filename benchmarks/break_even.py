"""When elasticity does not pay: ours against `fixed` as starts get longer, jobs shorter and lengths more alike.

python -m benchmarks.break_even [--seeds N] [--only CURVE …]        draws docs/break_even.png, writes results/break_even.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import FOLDER, make_console, save
from benchmarks.common.run_metadata import ROOT
from benchmarks.simulated.cluster_variants import variant
from placement.simulate import Setting, named, simulate

BASE = "qwen3b-gsm8k-grpo"
PREFER = 0.75
STARTS_S = (0.0, 0.8, 3.0, 10.0, 30.0, 60.0)
MEDIANS = (20, 60, 150, 290, 800)
DEVIATIONS = (0.0, 0.1, 0.25, 0.48, 0.8)


def sweeps() -> dict[str, tuple[str, dict[float, Setting]]]:
    """Curve → (what varies, its settings). Start-up is what a lease that is taken anew costs before its first
    token, weights apart; an engine on devices that are held wakes in the published time."""
    base = named(BASE).but(prefer=PREFER, epochs=2)

    def started(seconds: float) -> Setting:
        return base.but(cold=True, phases={**base.phases, "cold_start_s": max(seconds, 1e-6)})

    return {
        "start-up": ("seconds to start an engine", {s: started(s) for s in STARTS_S}),
        "job": ("median response, tokens", {m: base.but(lengths={"like": "gsm8k", "median_tokens": m}) for m in MEDIANS}),
        "spread": ("standard deviation of log length", {d: base.but(lengths={"like": "gsm8k", "log_deviation": d}) for d in DEVIATIONS}),
    }


def measure(setting: Setting, seeds: int) -> dict[str, float]:
    """Ratios ours / fixed over seeds, and the share of steps in which ours held devices throughout; `released_…`: ours where it
    may not hold any (the same where it never does)."""
    found: dict[str, list[float]] = {"time": [], "full": [], "busy": [], "held": [], "released_time": [], "released_full": []}
    always = variant("released", without=lambda _, k: k.held > 0)
    for seed in range(seeds):
        some = simulate(setting, ["fixed", "ours", *([always] if setting.cold else [])], seed).policies
        fixed, ours = some["fixed"], some["ours"]
        released = some.get("released", ours)
        found["released_time"].append(released.step_s / fixed.step_s)
        found["released_full"].append(released.full / fixed.full)
        found["time"].append(ours.step_s / fixed.step_s)
        found["full"].append(ours.full / fixed.full)
        found["busy"].append(ours.busy / fixed.busy)
        found["held"].append(float(np.mean([any(h.what == "held" for h in s.holds) for s in ours.steps])))
    return {key: float(np.mean(value)) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.break_even")
    parser.add_argument("--quick", action="store_true", help="one seed, two points of each curve, few prompts: shows that it runs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "break_even.png")
    parser.add_argument("--only", nargs="*", choices=list(sweeps()), help="some curves; the others stay as they are")
    options = parser.parse_args()
    console, began, curves = make_console(), time.process_time(), {}
    kept = FOLDER / "break_even.json"
    if options.only and kept.exists():
        curves = json.loads(kept.read_text())["curves"]
        for curve in curves.values():
            curve["points"] = {float(x): r for x, r in curve["points"].items()}
    for name, (what, settings) in sweeps().items():
        if options.only and name not in options.only:
            continue
        if options.quick:
            settings = {x: s.but(prompts=max(8, s.prompts // 8)) for x, s in list(settings.items())[:2]}
        rows = {x: measure(s, 1 if options.quick else options.seeds) for x, s in settings.items()}
        curves[name] = {"varies": what, "points": rows}
        table = Table(
            what, "time, × fixed", "full cost, × fixed", "busy cost, × fixed", "steps held", title=f"{BASE}: {name}", title_justify="left"
        )
        for x, r in rows.items():
            table.add_row(f"{x:g}", *(f"{r[k]:.2f}" for k in ("time", "full", "busy")), f"{r['held']:.0%}")
        console.print(table)
    content = {"setting": BASE, "prefer": PREFER, "seeds": 1 if options.quick else options.seeds, "curves": curves}
    save("break_even", content, console=console, quick=options.quick)
    if not options.quick:
        _plot(curves, options.plot)
        console.print(f"written: {options.plot}", highlight=False)
    console.print(f"{time.process_time() - began:.0f} s of this process", highlight=False)


def _plot(curves: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.6))
    for axis, curve in zip(axes, curves.values(), strict=True):
        xs = list(curve["points"])
        for key, label in (("time", "time"), ("full", "full cost"), ("busy", "busy cost")):
            (line,) = axis.plot(xs, [curve["points"][x][key] for x in xs], "o-", ms=4, label=label)
            if any(r["held"] for r in curve["points"].values()) and key != "busy":
                alone = [curve["points"][x][f"released_{key}"] for x in xs]
                axis.plot(xs, alone, "x--", ms=4, color=line.get_color(), label=f"{label}, all given back")
        axis.axhline(1, color="grey", lw=0.8)
        axis.set_xlabel(curve["varies"])
        axis.set_ylim(0, None)
        if max(xs) > 5:
            axis.set_xscale("symlog" if min(xs) == 0 else "log")
        axis.set_xticks(xs, [f"{x:g}" for x in xs])
        axis.minorticks_off()
        axis.set_xlim(min(xs), None)
    axes[0].set_ylabel("ours / fixed (above 1: elasticity loses)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
