"""The simulator against a recorded run: terms fitted on the first half of its steps, step times of the second half
predicted.

python -m benchmarks.validate_simulator RUN_FOLDER [--no-save]

Reads metrics.jsonl and samples/step_<n>.jsonl. Fitted: seconds of a decode step (base, per sequence) with a constant of the
rollout, seconds of learning per token with a constant, and the median of all else. The rollout itself is then simulated,
response by response, on as many engines as the run had. Left out: the first step (start-up), steps in which more engines
worked than in any step before (a cold start), and evaluation time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from benchmarks.common.results import Target, save, show_targets
from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement.speed.decode_speed import Speed

NEEDED = ("step", "step_s", "phase/rollout_s", "phase/learn_s", "pool/rollout_actors", "tokens/generated", "length/max", "length/mean")
WITHIN = 15.0  # per cent


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step: seconds of its phases (`other`: all but rollout, learning and evaluation), engines, response
    lengths."""

    number: int
    step_s: float
    rollout_s: float
    learn_s: float
    other_s: float
    engines: int
    lengths: np.ndarray


@dataclass(frozen=True)
class Fitted:
    """What the first half of a run says: a decode step takes speed.base_s + speed.per_seq_s · running; learning learn_s +
    per_token_s · tokens; everything else other_s."""

    speed: Speed
    start_s: float
    learn_s: float
    per_token_s: float
    other_s: float


def read(run: Path) -> list[RecordedStep]:
    """The usable steps of a run folder. Raises SystemExit with one sentence when there are fewer than eight."""
    path = run / "metrics.jsonl"
    if not path.exists():
        raise SystemExit(f"error: {run} has no metrics.jsonl")
    steps, most = [], 0
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a crash tears the last line
        if any(not isinstance(row.get(key), (int, float)) for key in NEEDED):
            continue
        engines = int(row["pool/rollout_actors"])
        grown, most = engines > most, max(most, engines)
        if grown or row["step"] <= 1:
            continue
        evaluation = row.get("phase/eval_s") or 0.0
        other = row["step_s"] - row["phase/rollout_s"] - row["phase/learn_s"] - evaluation
        steps.append(
            RecordedStep(
                int(row["step"]),
                row["step_s"] - evaluation,
                row["phase/rollout_s"],
                row["phase/learn_s"],
                other,
                engines,
                _lengths(run, row),
            )
        )
    if len(steps) < 8:
        raise SystemExit(f"error: {run} has {len(steps)} usable steps; at least 8 are needed")
    return steps


def _lengths(run: Path, row: dict[str, Any]) -> np.ndarray:
    """Response lengths of a step. Where the folder keeps only some samples their quantiles stand for all, scaled to the
    step's sum and with its longest."""
    count = max(1, round(row["tokens/generated"] / row["length/mean"]))
    path = run / "samples" / f"step_{row['step']}.jsonl"
    shown = [json.loads(line).get("tokens") for line in path.read_text().splitlines()] if path.exists() else []
    known = np.array([t for t in shown if isinstance(t, (int, float)) and t >= 1], float)
    if len(known) == count:
        return known
    if not len(known):
        known = np.array([row.get(f"length/{q}") or row["length/mean"] for q in ("mean", "p50", "p90")], float)
    lengths = np.quantile(known, (np.arange(count) + 0.5) / count)
    lengths = np.clip(lengths * row["tokens/generated"] / lengths.sum(), 1, row["length/max"])
    lengths[-1] = row["length/max"]
    return lengths


def fit(steps: list[RecordedStep]) -> Fitted:
    """Least squares with non-negative terms, each step weighted by its own duration (relative errors count)."""
    rollout = np.array([s.rollout_s for s in steps])
    times = np.array([[1.0, s.lengths.max(), s.lengths.sum() / s.engines] for s in steps])
    start, base, per_seq = nnls(times / rollout[:, None], np.ones(len(steps)))[0]
    learn = np.array([max(s.learn_s, 1e-9) for s in steps])
    tokens = np.array([[1.0, s.lengths.sum()] for s in steps])
    constant, per_token = nnls(tokens / learn[:, None], np.ones(len(steps)))[0]
    return Fitted(Speed(max(base, 1e-9), per_seq), start, constant, per_token, float(np.median([s.other_s for s in steps])))


def predict(step: RecordedStep, times: Fitted) -> tuple[float, float]:
    """Seconds of the rollout and of the step, simulated."""
    run = simulate_rollout(
        step.lengths,
        step.lengths[:, None],
        times.speed,
        policy="random",
        prefer=1.0,
        max_actors=step.engines,
        start_s=times.start_s,
        seed=step.number,
        interval_s=1e6,
    )
    return run.time_s, run.time_s + times.learn_s + times.per_token_s * float(step.lengths.sum()) + times.other_s


def validate(run: Path) -> dict[str, Any]:
    steps = read(run)
    half = len(steps) // 2
    times = fit(steps[:half])
    rows = []
    for step in steps[half:]:
        rollout, whole = predict(step, times)
        rows.append(
            {
                "step": step.number,
                "engines": step.engines,
                "measured_s": step.step_s,
                "predicted_s": whole,
                "rollout_measured_s": step.rollout_s,
                "rollout_predicted_s": rollout,
            }
        )
    error = np.array([r["predicted_s"] / r["measured_s"] - 1 for r in rows])
    of_rollout = np.array([r["rollout_predicted_s"] / r["rollout_measured_s"] - 1 for r in rows])
    return {
        "run": run.name,
        "fitted_on": half,
        "predicted": len(rows),
        "terms": {**asdict(times)},
        "error_percent": {
            "median": 100 * float(np.median(np.abs(error))),
            "mean": 100 * float(np.mean(np.abs(error))),
            "p90": 100 * float(np.quantile(np.abs(error), 0.9)),
            "bias": 100 * float(np.mean(error)),
            "total": 100 * abs(sum(r["predicted_s"] for r in rows) / sum(r["measured_s"] for r in rows) - 1),
            "rollout_median": 100 * float(np.median(np.abs(of_rollout))),
        },
        "steps": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.validate_simulator")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--no-save", action="store_true", help="print only; do not write results/validate_simulator.json")
    options = parser.parse_args()
    console = Console(width=120)
    found = validate(options.run)
    error = found["error_percent"]
    title = f"{found['run']}: fitted on {found['fitted_on']} steps, {found['predicted']} predicted"
    table = Table("error of step time, %", "value", title=title, title_justify="left")
    for name, value in error.items():
        table.add_row(name, f"{value:+.1f}" if name == "bias" else f"{value:.1f}")
    console.print(table)
    targets = [Target("mean error of predicted step time", error["mean"], most=WITHIN, unit=" %")]
    show_targets(console, targets)
    if not options.no_save:
        save("validate_simulator", found, targets, console=console)


if __name__ == "__main__":
    main()
