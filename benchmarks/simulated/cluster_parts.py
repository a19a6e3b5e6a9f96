"""What `benchmarks.cluster` simulates: settings with something changed, and the policies that are compared on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.simulated.cluster_variants import ABLATION, AS_BUILT_POLICY, sensitivity
from placement.catalog import catalog
from placement.simulate import Setting, SimulatedRun, named, names, policies_of, simulate

PREFER = 0.75  # where every policy that has a knob is run
REDUCE_S, SLOW_REDUCE_S = 30e-6, 70e-6  # of one all-reduce over PCIe: both are assumptions
SETTINGS = [name for name in names() if name.startswith("qwen")]
TWO = ["qwen3b-gsm8k-grpo", "qwen7b-gpqa-ppo"]  # short answers that fit a device, long ones that do not
RIVALS: tuple[Any, ...] = ("fixed", "fixed+", "global-cut", "rlhfless-paper", AS_BUILT_POLICY, "ours")
BOTH: tuple[Any, ...] = ("fixed", AS_BUILT_POLICY, "ours")
LAGS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"max_lag_steps": 1},
    "1, partial": {"max_lag_steps": 1, "partial": True},
    "2, partial": {"max_lag_steps": 2, "partial": True},
}
Variants = dict[str, tuple[Setting, Sequence[Any]]]  # by name: the setting and its policies; the first variant's `fixed` is the base


@dataclass(frozen=True)
class Part:
    """One table: the settings that it has a row or column for, and the variants of each."""

    settings: list[str]
    variants: Callable[[str], Variants]


def wide(name: str) -> Setting:
    """Return a setting in which every policy takes the width of engines that its forecasts find best."""
    setting = named(name)
    return setting.but(prefer=PREFER, tensor_parallel="auto", device=replace(setting.device, reduce_latency_s=REDUCE_S))


def _technology(name: str) -> Variants:
    setting = wide(name)
    chances = {drafts: float(catalog.values(catalog.read("acceptance")[drafts])[str(setting.lengths)]) for drafts in ("text", "trained")}
    slow = replace(setting.device, reduce_latency_s=SLOW_REDUCE_S)
    changed = {
        "as it is": setting,
        "engines of one device": setting.but(tensor_parallel=1),
        "all-reduces of 70 µs": setting.but(device=slow),
        "drafts from text": setting.but(acceptance=chances["text"]),
        "drafts of a trained drafter": setting.but(acceptance=chances["trained"]),
        "8-bit weights in engines": setting.but(quantization="int8"),
        "for time alone": setting.but(prefer=1.0),
    }
    return {variant: (one, BOTH) for variant, one in changed.items()}


def _lags(name: str) -> Variants:
    found = {bound: wide(name).but(**change) for bound, change in LAGS.items()}
    return {bound: (one, list(policies_of(one)) if LAGS[bound] else BOTH) for bound, one in found.items()}


PARTS = {
    "best": Part(SETTINGS, lambda name: {"as it is": (wide(name), RIVALS)}),
    "technology": Part(TWO, _technology),
    "lag": Part(TWO, _lags),
    "ablation": Part(["qwen3b-gsm8k-grpo", "qwen3b-gpqa-ppo"], lambda name: {"as it is": (named(name).but(prefer=PREFER), ABLATION)}),
    "sensitivity": Part(
        ["qwen3b-gsm8k-grpo"],
        lambda name: {key: (one, ("fixed", "fixed+", "ours")) for key, one in sensitivity(named(name).but(prefer=PREFER)).items()},
    ),
    "large": Part(["llama70b-8-nodes"], lambda name: {"as it is": (named(name).but(prefer=PREFER), RIVALS)}),
}


def measure(variants: Variants, seeds: Sequence[int]) -> dict[str, Any]:
    """Return each policy's figures by variant: speed and saving over `fixed` of the first variant ("plain") and of its own ("same").

    Means over seeds, paired by seed.
    """
    found: dict[str, Any] = {}
    plain: list[SimulatedRun] = []
    for variant, (setting, policies) in variants.items():
        runs = [simulate(setting, policies, seed) for seed in seeds]
        plain = plain or runs
        found[variant] = {name: _row(runs, plain, name) for name in runs[0].policies}
    return found


def _row(runs: list[SimulatedRun], plain: list[SimulatedRun], name: str) -> dict[str, Any]:
    own = [run.policies[name] for run in runs]
    lags = [step.lag for policy in own for step in policy.steps]
    return {
        "plain": _over(runs, plain, name),
        "same": _over(runs, runs, name),
        "step_s": float(np.mean([policy.step_s for policy in own])),
        "rollout_s": float(np.mean([step.rollout_s for policy in own for step in policy.steps])),
        "time_over_bound": float(np.mean([policy.step_s / run.bound_s for policy, run in zip(own, runs, strict=True)])),
        "tokens_by_lag": [float(np.mean(share)) for share in zip(*lags, strict=True)],
        "plan": own[-1].steps[-1].reason,
    }


def _over(runs: list[SimulatedRun], base: list[SimulatedRun], name: str) -> dict[str, float]:
    pairs = [(run.policies[name], other.policies["fixed"]) for run, other in zip(runs, base, strict=True)]
    return {
        "speedup": float(np.mean([fixed.step_s / own.step_s for own, fixed in pairs])),
        "saving": float(np.mean([1 - own.full / fixed.full for own, fixed in pairs])),
    }
