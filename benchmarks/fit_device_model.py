"""Fit the device model to published training steps, and test it on steps that were not used.

python -m benchmarks.fit_device_model [--write]

Nine parameters are fitted to `placement/catalog/data/published_steps.yaml` by least squares on log ratios (scipy). Steps are
simulated by the code of `placement.simulate`, as policy `fixed` takes them. --write puts the parameters into the catalog's
devices.yaml and phases.yaml. benchmarks/results/device_model.json gets every predicted time.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from rich.table import Table
from scipy.optimize import brentq, least_squares
from scipy.special import ndtri

from benchmarks.common.results import make_console, save
from placement.catalog import catalog
from placement.simulate.phase_times import PhaseTimes
from placement.simulate.setting import Setting, parse
from placement.simulate.simulate_step import StepInput, roll_out
from placement.speed.roofline import decode_step_s

DEVICE = ("decode_efficiency", "step_s", "seq_s")  # of devices.yaml; the others are of phases.yaml
PHASES = ("training_efficiency", "forward_efficiency", "half_efficiency_tokens", "mixture_efficiency", "weight_sync_s", "step_overhead_s")
FIRST_GUESS = (0.9, 4e-3, 5e-5, 0.45, 0.45, 3000.0, 0.2, 4.0, 3.0)
LEAST = (0.5, 1e-4, 1e-7, 0.1, 0.1, 10.0, 0.01, 0.1, 0.1)
MOST = (1.0, 2e-2, 1e-3, 0.95, 0.95, 1e5, 1.0, 20.0, 20.0)
PARTS = ("generation_s", "log_prob_s", "training_s", "weight_sync_s", "step_s")
COLOCATED_MEMORY, SEPARATE_MEMORY = 0.6, 0.8  # gpu_memory_utilization of NeMo RL's recipes, in turn and one step off
NODE = 8  # devices
Published = dict[str, Any]
Parameters = dict[str, float]


def published() -> dict[str, Published]:
    return catalog.read("published_steps")["steps"]


def lengths(step: Published, seed: int = 0) -> np.ndarray:
    """Return (n,) response lengths with the published mean: a log-normal distribution cut at the limit, whose longest is there."""
    count, limit = step["prompts"] * step["samples"], step["response_limit"] - step["prompt_tokens"]
    found = _lengths(count, step["response_tokens"], limit, catalog.values(catalog.read("published_steps"))["spread"])
    return np.random.default_rng(seed).permutation(found)


@cache
def _lengths(count: int, mean: float, limit: int, spread: float) -> np.ndarray:
    normal = ndtri((np.arange(count) + 0.5) / count)

    def drawn(log_median: float) -> np.ndarray:
        return np.minimum(np.exp(log_median + spread * normal), limit)

    found = drawn(brentq(lambda log_median: float(np.mean(drawn(log_median))) - mean, 0.0, 20.0))
    return np.maximum(1, np.round(np.r_[found[:-1], limit]))


def setting_of(step: Published, parameters: Parameters, devices: int) -> Setting:
    """Return the step as a setting of the simulator on this many of its devices, with these parameters."""
    device = catalog.device({"like": step["device"], **{key: parameters[key] for key in DEVICE}})
    given = {key: step[key] for key in ("device", "model", "prompts", "samples", "updates")}
    return replace(
        parse({**given, "nodes": devices // NODE, "devices_per_node": NODE, "algorithm": "grpo"}),
        device=device,
        tensor_parallel=step["generation_width"],
        prompt_limit=step["prompt_tokens"],
        response_limit=step["response_limit"] - step["prompt_tokens"],
        phases={
            **catalog.values(catalog.read("phases")),
            **{key: parameters[key] for key in PHASES},
            "engine_memory": SEPARATE_MEMORY if "generation_devices" in step else COLOCATED_MEMORY,
        },
    )


def predict(step: Published, parameters: Parameters) -> dict[str, float]:
    """Return the seconds of a step and of its parts.

    One step off, generation and learning are side by side. The transfer of weights is then behind both, and the step is the longer
    of the two, as in `fixed_one_step_off`.
    """
    devices, apart = NODE * step["nodes"], step.get("generation_devices", 0)
    times = PhaseTimes.from_setting(setting_of(step, parameters, apart or devices))
    learner = PhaseTimes.from_setting(setting_of(step, parameters, devices - apart)) if apart else times
    drawn, count = lengths(step), step["prompts"] * step["samples"]
    prompts = np.full(count, float(step["prompt_tokens"]))
    given = StepInput(drawn, prompts, np.repeat(np.arange(step["prompts"]), step["samples"]), drawn[:, None])
    wake, sent = (0.0, times.broadcast_s) if apart else (times.warm_s, times.reshard_s)
    run = roll_out(times, given, "fixed", engines=times.engines, prefer=1.0, transfer_s=sent, wake_s=wake)
    tokens = float(given.tokens.sum())
    log_prob = step["passes"] * learner.trainer.forward_s(tokens, learner.devices)
    training = learner.learn_s(tokens, learner.devices)
    whole = max(run.end_s, sent + log_prob + training) if apart else run.end_s + log_prob + training
    return {
        "generation_s": run.end_s - wake - sent - parameters["step_overhead_s"],
        "log_prob_s": log_prob,
        "training_s": training,
        "weight_sync_s": wake + sent,
        "step_s": whole,
    }


def decode_s(point: Published, parameters: Parameters) -> float:
    device = catalog.device({"like": "H100", **{key: parameters[key] for key in DEVICE}})
    return decode_step_s(catalog.model(point["model"]), device, point["generation_width"], 1, point["context_tokens"])


def _residuals(parameters: Parameters) -> Iterator[float]:
    """Yield the logarithm of predicted over published, for everything that the fit uses."""
    for step in published().values():
        if step["split"] == "fit":
            predicted = predict(step, parameters)
            yield from (
                float(np.log(predicted[part] / step[part])) for part in PARTS if part in step and part not in step.get("unused", ())
            )
    for point in catalog.read("published_steps")["decode"].values():
        yield float(np.log(decode_s(point, parameters) / point["decode_s"]))


def fit() -> tuple[Parameters, float]:
    """Return the parameters that fit the published steps best, and the root mean square of the log ratios that remain."""

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.array(list(_residuals(named(np.exp(logs)))))

    found = least_squares(
        residuals, np.log(FIRST_GUESS), bounds=(np.log(LEAST), np.log(MOST)), diff_step=0.01, xtol=1e-5, ftol=1e-5, x_scale="jac"
    )
    return named(np.exp(found.x)), float(np.sqrt(np.mean(np.square(found.fun))))


def named(values: np.ndarray) -> Parameters:
    """Return the parameters by name, to four digits, as the catalog has them."""
    return {key: float(f"{value:.4g}") for key, value in zip((*DEVICE, *PHASES), values, strict=True)}


def committed() -> Parameters:
    """Return the parameters that the catalog has."""
    device, phases = catalog.device("H100"), catalog.values(catalog.read("phases"))
    return {**{key: getattr(device, key) for key in DEVICE}, **{key: float(phases[key]) for key in PHASES}}


def errors(parameters: Parameters, split: str) -> dict[str, float]:
    """Return the relative error of the whole step for each published step of a split."""
    steps = {name: step for name, step in published().items() if step["split"] == split and "step_s" not in step.get("unused", ())}
    return {name: predict(step, parameters)["step_s"] / step["step_s"] - 1 for name, step in steps.items()}


def write(parameters: Parameters) -> None:
    """Put the parameters into the catalog: phases, H100, and the devices whose figures are taken from it."""
    phases, devices = catalog.DATA / "phases.yaml", catalog.DATA / "devices.yaml"
    text = phases.read_text()
    for key in PHASES:
        text = re.sub(rf"^{key}: \[[^,]+,", f"{key}: [{parameters[key]:g},", text, flags=re.MULTILINE)
    phases.write_text(text)
    text = devices.read_text()
    for key in DEVICE:
        text = re.sub(rf"^  {key}: \[[^,]+(, \"(?:fitted|taken from H100))", rf"  {key}: [{parameters[key]:g}\1", text, flags=re.MULTILINE)
    devices.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fit_device_model")
    parser.add_argument("--write", action="store_true", help="put the parameters into the catalog")
    options = parser.parse_args()
    console = make_console()
    parameters, remaining = fit()
    table = Table("step", "split", "published, s", "predicted, s", "error", title="published steps", title_justify="left")
    rows: dict[str, dict[str, Any]] = {}
    for name, step in published().items():
        predicted = predict(step, parameters)
        rows[name] = {"split": step["split"], "published": {part: step[part] for part in PARTS if part in step}, "predicted": predicted}
        table.add_row(
            name, step["split"], f"{step['step_s']:g}", f"{predicted['step_s']:.1f}", f"{predicted['step_s'] / step['step_s'] - 1:+.0%}"
        )
    console.print(table)
    held = np.abs(list(errors(parameters, "held_out").values()))
    console.print({key: f"{value:g}" for key, value in parameters.items()})
    console.print(
        f"held out: median error {np.median(held):.1%}, {np.sum(held <= 0.15)} of {len(held)} within 15 %, largest {held.max():.0%}"
    )
    if options.write:
        write(parameters)
    save("device_model", {"parameters": parameters, "log_rms": remaining, "steps": rows}, console=console)


if __name__ == "__main__":
    main()
