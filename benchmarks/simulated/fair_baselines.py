"""Ours against baselines that have the same technology: every policy chooses the width of its engines.

Each figure is given over `fixed` with engines of one device, the plain baseline, and over `fixed` at its own best width. Where
released devices find no other use, all of them are billed throughout: every policy is then planned for time alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from placement.simulate import Setting, SimulatedRun, simulate

REDUCE_S = (30e-6, 70e-6)  # of one all-reduce: both are assumptions for devices on PCIe
RIVALS = ("fixed", "fixed+", "global-cut", "rlhfless-paper", "ours")
BILLED = ("fixed", "fixed+", "ours")


def latency_name(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def measure_fair(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """Every policy at its best width, for each all-reduce time: speed and cost over both baselines, means over seeds."""
    found: dict[str, Any] = {"seeds": len(seeds), "steps": setting.epochs * setting.steps_per_epoch}
    plain = [simulate(setting, ["fixed", "ours"], seed) for seed in seeds]
    found["width 1"] = rows_over(plain, plain, plain)
    for seconds in REDUCE_S:
        device = replace(setting.device, reduce_latency_s=seconds)
        wide = setting.but(tensor_parallel="auto", device=device)
        names = RIVALS if seconds == REDUCE_S[0] else BILLED
        runs = [simulate(wide, names, seed) for seed in seeds]
        billed = [simulate(wide.but(prefer=1.0), BILLED, seed) for seed in seeds]
        found[latency_name(seconds)] = {"sold": rows_over(runs, plain, runs), "billed": rows_over(billed, plain, billed, throughout=True)}
    return found


def rows_over(runs: list[SimulatedRun], plain: list[SimulatedRun], same: list[SimulatedRun], throughout: bool = False) -> dict[str, Any]:
    """Speed and saving of each policy over the `fixed` of `plain` and of `same`. throughout: bill every device."""
    rows = {}
    for name in runs[0].policies:
        over = {key: over_fixed(runs, base, name, throughout) for key, base in (("plain", plain), ("same", same))}
        reasons = [step.reason for run in runs for step in run.policies[name].steps]
        rows[name] = {**over, "step_s": float(np.mean([r.policies[name].step_s for r in runs])), "widths": _widths(reasons)}
    return rows


def over_fixed(runs: Sequence[SimulatedRun], base: Sequence[SimulatedRun], name: str, throughout: bool = False) -> dict[str, float]:
    """Speed and saving of a policy over `fixed` in other runs, paired by seed. throughout: bill every device."""

    def cost(run: SimulatedRun, name: str) -> float:
        done = run.policies[name]
        return done.step_s * run.setting.devices if throughout else done.full

    pairs = list(zip(runs, base, strict=True))
    return {
        "speedup": float(np.mean([b.policies["fixed"].step_s / r.policies[name].step_s for r, b in pairs])),
        "saving": float(np.mean([1 - cost(r, name) / cost(b, "fixed") for r, b in pairs])),
    }


def _widths(reasons: Sequence[str]) -> dict[str, int]:
    """How many steps had engines of which width, from the plans' reasons."""
    widths = [reason.partition(" of ")[2].partition(" devices")[0] for reason in reasons]
    return dict(Counter(width if width.isdigit() else "1" for width in widths))
