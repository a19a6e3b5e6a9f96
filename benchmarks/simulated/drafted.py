"""Drafted tokens in the simulator: what they give to `fixed` and to ours, as it is built and as it is planned.

Every policy takes its best width of engines, and has the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.simulated.cluster_variants import AS_BUILT_POLICY
from benchmarks.simulated.fair_baselines import REDUCE_S, over_fixed
from placement.catalog import catalog
from placement.simulate import Setting, SimulatedRun, simulate

DRAFTS = ("off", "text", "trained")


def measure_drafted(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """Speed and cost by source of drafts and policy: over `fixed` without drafts, and over `fixed` with the same drafts. Means over
    seeds."""
    device = replace(setting.device, reduce_latency_s=REDUCE_S[0])
    wide = setting.but(tensor_parallel="auto", device=device)
    runs: dict[str, list[SimulatedRun]] = {}
    for drafts in DRAFTS:
        chance = acceptance(setting, drafts)
        runs[drafts] = [simulate(wide.but(acceptance=chance), ["fixed", AS_BUILT_POLICY, "ours"], seed) for seed in seeds]
    rows: dict[str, Any] = {}
    for drafts, found in runs.items():
        for name in found[0].policies:
            bases = {"plain": runs["off"], "same": found}
            rows.setdefault(drafts, {})[name] = {key: over_fixed(found, base, name) for key, base in bases.items()}
    return {"seeds": len(seeds), "acceptance": {drafts: acceptance(setting, drafts) for drafts in DRAFTS}, "rows": rows}


def acceptance(setting: Setting, drafts: str) -> float:
    if drafts == "off":
        return 0.0
    return float(catalog.values(catalog.read("acceptance")[drafts])[str(setting.lengths)])
