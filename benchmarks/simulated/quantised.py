"""8-bit weights in the simulator: what they give to each policy, with engines of one device and of its best width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.results import Target
from benchmarks.simulated.cluster_variants import AS_BUILT, AS_BUILT_POLICY
from benchmarks.simulated.fair_baselines import REDUCE_S, over_fixed
from placement.simulate import Setting, simulate

QUANTIZATION = "int8"  # fp8 is the same in a dense model, as these are
QUANTISED = ("fixed", "fixed+", "global-cut", "rlhfless-paper", AS_BUILT_POLICY, "ours")
WANTED = (1.6, 51.0)  # at width 1, over `fixed` in bf16: speed, and % of the cost saved


def measure_quantised(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """Speed and cost of each policy with 8-bit weights, by width: over plain `fixed` ("plain"), over `fixed` of the same width in bf16
    ("off"), and over `fixed` with 8-bit weights ("same"). Means over seeds."""
    device = replace(setting.device, reduce_latency_s=REDUCE_S[0])
    plain = [simulate(setting, ["fixed"], seed) for seed in seeds]
    rows: dict[str, Any] = {}
    for width, chosen in {"1": setting, "best": setting.but(tensor_parallel="auto", device=device)}.items():
        bases = {"plain": plain, "off": plain if width == "1" else [simulate(chosen, ["fixed"], seed) for seed in seeds]}
        bases["same"] = runs = [simulate(chosen.but(quantization=QUANTIZATION), QUANTISED, seed) for seed in seeds]
        rows[width] = {name: {key: over_fixed(runs, base, name) for key, base in bases.items()} for name in runs[0].policies}
    return {"seeds": len(seeds), "rows": rows}


def quantised_targets(entries: dict[str, Any]) -> list[Target]:
    """Return the targets of ours as built, at width 1 over plain `fixed`, as means over settings."""

    def mean(width: str, policy: str, over: str, key: str) -> float:
        return float(np.mean([entry["rows"][width][policy][over][key] for entry in entries.values()]))

    planned = f"{mean('1', 'ours', 'plain', 'speedup'):.2f}× and −{100 * mean('1', 'ours', 'plain', 'saving'):.0f} %"
    why = f"with what the runtime does not do on GPUs it is {planned}"
    speed, saving = mean("1", AS_BUILT, "plain", "speedup"), 100 * mean("1", AS_BUILT, "plain", "saving")
    found = [
        Target("8-bit weights, as built: speed over plain `fixed`", speed, WANTED[0], unit="×", why=why),
        Target("8-bit weights, as built: cost saved over plain `fixed`", saving, WANTED[1], unit=" %", why=why),
    ]
    return [replace(target, why="") if target.met else target for target in found]
