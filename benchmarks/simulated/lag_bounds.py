"""What a bound on the lag of trained tokens brings, for ours and for every baseline whose authors describe it.

All policies choose the width of their engines, and all costs are in: transfers, wakes, and contexts computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.results import Target
from benchmarks.simulated.fair_baselines import rows_over
from placement.simulate import Setting, SimulatedRun, policies_of, simulate
from placement.simulate.one_step_off import NOT_BUILT
from placement.simulate.partial_policies import AHEAD

BOUNDS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"max_lag_steps": 1},
    "1, partial": {"max_lag_steps": 1, "partial": True},
    "2, partial": {"max_lag_steps": 2, "partial": True},
}
OVER_PLAIN, OVER_BEST = (2.0, 50.0), (1.5, 35.0)  # wanted at a bound of one step: speed, and % of the cost saved


def measure_lags(setting: Setting, seeds: Sequence[int], some: Sequence[str] = (), before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Each policy at each bound: speed and cost over synchronous `fixed`, plain and at its best width. Means over seeds.

    some: policies that alone are run, at bounds above 0; the other rows are those of `before`.
    """
    wide = setting.but(tensor_parallel="auto")
    plain = [simulate(setting, ["fixed"], seed) for seed in seeds]
    counts = {"seeds": len(seeds), "steps": setting.epochs * setting.steps_per_epoch}
    if some and (before is None or any(before[key] != counts[key] for key in counts)):
        raise SystemExit(f"lag: {setting.name} is not there, or of other seeds: run it with all policies")
    found: dict[str, Any] = {**(before or {}), **counts} if some else counts
    best: list[SimulatedRun] = []
    for bound, change in BOUNDS.items():
        changed, synchronous = wide.but(**change), ["fixed"] if some else ["fixed", "ours"]
        names = [name for name in policies_of(changed) if name in some or not some] if change else synchronous
        runs = [simulate(changed, names, seed) for seed in seeds]
        best = best or runs
        rows = rows_over(runs, plain, best)
        for name, row in rows.items():
            shares = [step.lag for run in runs for step in run.policies[name].steps]
            row["tokens_by_lag"] = [float(np.mean(share)) for share in zip(*shares, strict=True)]
        found[bound] = {**found.get(bound, {}), **rows}
    return found


def mean_over(entries: dict[str, Any], bound: str, policy: str, base: str) -> tuple[float, float]:
    """Speed over a baseline and share of its cost saved, means over settings. base: "plain" or "same"."""
    over = [entry[bound][policy][base] for entry in entries.values()]
    return float(np.mean([row["speedup"] for row in over])), float(np.mean([row["saving"] for row in over]))


def lag_targets(entries: dict[str, Any]) -> list[Target]:
    """What ours was to reach at a bound of one step: as the runtime does partial rollouts, in results that have it."""
    found, bound = [], "1, partial"
    mine = "ours" if all("ours" in entry[bound] for entry in entries.values()) else NOT_BUILT
    for base, said, (speed, saved) in (("plain", "plain `fixed`", OVER_PLAIN), ("same", "`fixed` at its best width", OVER_BEST)):
        (reached, kept), (faster, cheaper) = (mean_over(entries, bound, policy, base) for policy in (mine, NOT_BUILT))
        why = f"PPO's early gradients and a learner that changes its size, not built, reach {faster:.2f}× and {100 * cheaper:.0f} %"
        if mine == NOT_BUILT:
            why = f"responses that end within their step reach {mean_over(entries, '1', NOT_BUILT, base)[0]:.2f}×"
        found.append(Target(f"lag of one step: speed over {said}", reached, speed, unit="×", why=why))
        found.append(Target(f"lag of one step: cost saved over {said}", 100 * kept, saved, unit=" %", why=why))
    rivals = {policy for entry in entries.values() for policy in entry[bound]} - {"ours", AHEAD, NOT_BUILT}
    behind = [
        f"{name} ({policy}, {100 * (entry[bound][mine]['step_s'] / entry[bound][policy]['step_s'] - 1):.1f} %)"
        for name, entry in entries.items()
        for policy in sorted(rivals)
        if entry[bound][policy]["step_s"] < entry[bound][mine]["step_s"]
    ]
    pairs = len(entries) * len(rivals)
    name = "lag of one step: faster than a baseline with the same bound"
    found.append(Target(name, pairs - len(behind), pairs, why=f"behind: {', '.join(behind)}"))
    return [replace(target, why="") if target.met else target for target in found]
