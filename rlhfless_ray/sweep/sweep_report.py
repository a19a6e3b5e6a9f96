"""The report of a sweep: one HTML file over all its runs, which works without a network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report.charts import Chart, Row, bars, line, rounded, smoothed, thin
from rlhfless_ray.report.formatting import duration, finite, money, number, slot_time
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.report import write_page
from rlhfless_ray.sweep.sweep_folder import RunState, best_first, short_name

COLOURS = ("rollout", "learn", "score", "eval", "warm_start", "publish", "prefill", "reference", "critic", "agent")
DASHES = ("solid", "dash", "dot", "dashdot")
AGAINST = {"steps": ("step", "step", "Over steps"), "cost": ("cost/total_full_slot_s", "slot-seconds", "Over cost")}
OF_POLICIES = {"eval/accuracy_sampled": "accuracy", "reward/mean": "reward", "length/mean": "mean length, tokens"}
OF_STAGES = {"eval/loss": "held-out loss", "learn/loss": "loss", "eval/accuracy": "held-out accuracy"}


def write_sweep_report(folder: Path) -> Path:
    """Write `report.html` into a sweep's folder from `sweep.json` and the run folders, and return its path."""
    sweep = json.loads((folder / "sweep.json").read_text())
    runs = [RunState(**run) for run in sweep["runs"]]
    drawn = [(run, rows) for run in runs if (rows := RunRecord.read(folder / run.name).metrics)]
    trains = [any("reward/mean" in row for row in rows) for _, rows in drawn]  # a policy; else the run is a supervised stage
    curves = []
    for names, is_policy in (({sweep["metric"]: short_name(sweep["metric"])}, None), (OF_POLICIES, True), (OF_STAGES, False)):
        shown = [(run, rows if is_policy in (None, kind) else []) for (run, rows), kind in zip(drawn, trains, strict=True)]
        keys = [key for key in names if is_policy is None or key != sweep["metric"]]
        curves += [chart for key in keys for against in AGAINST for chart in [_curves(shown, key, names[key], against)] if chart]
    bars = [chart for chart in (_bars(drawn, "slot_s", "Slot-seconds of each run"), _bars(drawn, "seconds", "Time of each run")) if chart]
    return write_page(
        folder,
        "sweep.html.j2",
        [*curves, *bars],
        name=sweep["name"],
        state=sweep["status"],
        sentence=_sentence(runs, sweep["at_most"]),
        metric=sweep["metric"],
        rows=[_row(run) for run in best_first(runs, sweep["direction"])],
        shared=any(run.lent_slot_s is not None for run in runs),
        compared=any(run.alone for run in runs),
        curves=curves,
        bars=bars,
    )


def _sentence(runs: Sequence[RunState], at_most: int) -> str:
    counts: Counter[str] = Counter(run.state for run in runs)
    ordered = ("done", "ended early", "failed", "stopped", "running", "waiting")
    states = ", ".join(f"{counts[state]} {state}" for state in ordered if counts[state])
    spent = sum(run.slot_s or 0.0 for run in runs)
    return f"{len(runs)} runs, at most {at_most} at once: {states}. All of them cost {slot_time(spent)}."


def _row(run: RunState) -> Row:
    """Return a run with its cells as text."""
    steps = f"{run.step} of {run.steps}" if run.steps else str(run.step)
    settings = ", ".join(f"{key} {value}" for key, value in run.settings.items())
    cells = [steps, number(run.metric, 4), duration(run.seconds), slot_time(run.slot_s), money(run.money)]
    if run.lent_slot_s is not None:
        cells.append(f"{slot_time(run.lent_slot_s)} / {slot_time(run.borrowed_slot_s)}")
    return {"run": run, "settings": settings, "cells": cells}


def _curves(runs: Sequence[tuple[RunState, list[Row]]], key: str, name: str, against: str) -> Chart | None:
    """Draw a metric of all runs in one chart, smoothed if each step has a fluctuating value."""
    x_key, x_name, where = AGAINST[against]
    data, smooth = [], False
    for i, (run, rows) in enumerate(runs):
        known = [row for row in rows if finite(row.get(x_key)) is not None and finite(row.get(key)) is not None]
        points = [(rounded(row[x_key]), row[key]) for row in thin(known)]
        if len(points) < 2:
            continue
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if len(ys) >= 20 and not key.startswith("eval/"):
            ys, smooth = smoothed(ys, max(3, len(ys) / 30)), True
        colour, dash = f"@{COLOURS[i % len(COLOURS)]}", DASHES[i // len(COLOURS) % len(DASHES)]
        data.append(line(xs, [rounded(y) for y in ys], run.name, colour, dash=dash, hovertemplate="%{y:.4~g}"))
    if not data:
        return None
    note = f"{key} of each run" + (", smoothed." if smooth else ".")
    layout: JsonObject = {"yaxis": {"title": name}}
    if against == "cost":
        layout["xaxis"] = {"title": f"{x_name} of the run, start-up included"}
    return Chart(f"{key.replace('/', '-')}-{against}", f"{where}: {name}", note, data, layout, height=320)


def _bars(runs: Sequence[tuple[RunState, list[Row]]], key: str, title: str) -> Chart | None:
    """Draw a bar for each run, beside that of the run alone if it is known."""
    known = [(i, run) for i, (run, _) in enumerate(runs) if getattr(run, key) is not None][::-1]
    if not known:
        return None
    names = [run.name for _, run in known]
    hover = {"orientation": "h", "hovertemplate": "%{x:.4~g}"}
    colours = [f"@{COLOURS[i % len(COLOURS)]}" for i, _ in known]
    data = [bars([rounded(getattr(run, key)) for _, run in known], names, "in the sweep", colours, **hover)]
    if any(run.alone.get(key) for _, run in known):
        data.append(bars([run.alone.get(key) for _, run in known], names, "alone", "@idle/0.6", **hover))
    unit = "slot-seconds" if key == "slot_s" else "seconds"
    layout = {"hovermode": "closest", "xaxis": {"title": unit}, "yaxis": {"automargin": True, "ticksuffix": "  "}, "bargap": 0.35}
    note = "As the run's ledger counts them, start-up and evaluations included." if key == "slot_s" else "From its start to its last step."
    return Chart(f"bars-{key}", title, note, data, layout, height=90 + 34 * len(known))
