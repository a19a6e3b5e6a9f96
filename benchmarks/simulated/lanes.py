"""What lanes bring: ours with engines of one width a step, as the runtime has them, and with a lane of wider ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.simulated.fair_baselines import REDUCE_S, latency_name, rows_over
from placement.simulate import Setting, simulate
from placement.simulate.lane_policy import LANES, ours_with_lanes

SETTINGS = ("qwen3b-gsm8k-grpo", "qwen3b-gpqa-grpo", "qwen7b-gpqa-grpo")
PREFERS = (0.25, 0.5, 0.75)


def measure_lanes(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """Both, for each all-reduce time and each `prefer`: speed and cost over both baselines, means over seeds."""
    found: dict[str, Any] = {"seeds": len(seeds), "steps": setting.epochs * setting.steps_per_epoch}
    plain = [simulate(setting, ["fixed"], seed) for seed in seeds]
    for seconds in REDUCE_S:
        wide = setting.but(tensor_parallel="auto", device=replace(setting.device, reduce_latency_s=seconds))
        for prefer in PREFERS:
            runs = [simulate(wide.but(prefer=prefer), ["fixed", "ours", (LANES, ours_with_lanes)], seed) for seed in seeds]
            rows = rows_over(runs, plain, runs)
            pairs = [(run.policies["ours"], run.policies[LANES]) for run in runs]
            steps = [step.reason for _, lanes in pairs for step in lanes.steps]
            rows[LANES]["over ours"] = {
                "speedup": float(np.mean([own.step_s / lanes.step_s for own, lanes in pairs])),
                "saving": float(np.mean([1 - lanes.full / own.full for own, lanes in pairs])),
            }
            rows[LANES]["steps_with_lane"] = sum("with a lane" in reason for reason in steps) / len(steps)
            found[f"{latency_name(seconds)}, prefer {prefer:g}"] = rows
    return found
