"""Charts of planning: pool size, predicted and measured time and cost, and the last step's frontier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from placement.measurements.registry import WORDS
from rlhfless_ray.report.charts import Chart, Row, axis_top, bars, hover_text, line, lines, markers, rounded
from rlhfless_ray.report.formatting import finite, number


def pool(rows: Sequence[Row]) -> Chart | None:
    """Draw the pool size by step, with each decision and its reason on hover."""
    known = [row for row in rows if finite(row.get("pool/rollout_actors")) is not None]
    if not known:
        return None
    if len(known) > 1500:  # keep the steps with a decision and both ends
        known = [row for i, row in enumerate(known) if i in (0, len(known) - 1) or row.get("pool/decision") not in (None, "Hold")]
    known = known if len(known) <= 1500 else known[:: -(-len(known) // 1500)]
    sizes = [finite(row["pool/rollout_actors"]) for row in known]
    steps = [row["step"] for row in known]
    hover = [_decision(row) for row in known]
    steady = {"shape": "hv", "color": "@rollout", "width": 1.2 if len(known) > 150 else 2}
    data: list[Row] = [{
        "type": "scatter", "mode": "lines", "x": steps, "y": sizes, "name": "engines", "line": steady,
        "customdata": hover, "hovertemplate": "%{customdata}<extra></extra>",
        "fill": "tozeroy", "fillcolor": "@rollout/0.08",
    }]  # fmt: skip
    for decision, symbol, colour in (("Grow", "triangle-up", "@score"), ("Shrink", "triangle-down", "@learn")):
        chosen = [i for i, row in enumerate(known) if row.get("pool/decision") == decision]
        if 0 < len(chosen) <= 40:  # more would hide the line
            xs, ys = [steps[i] for i in chosen], [sizes[i] for i in chosen]
            data.append(markers(xs, ys, decision.lower(), colour, symbol, hoverinfo="skip"))
    top = max(size for size in sizes if size is not None)
    layout = {"yaxis": {"title": "engines", "range": [0, top + 0.5], "tickformat": "d", "dtick": max(1, round(top / 5))}}
    note = "How many engines each step used. Point at a step for the decision and its reason."
    return Chart("pool", "Pool size", note, data, layout | {"hovermode": "x"})


def plans(rows: Sequence[Row]) -> list[Chart]:
    """Draw step time, rollout time and rollout cost, predicted and measured."""
    alone = _without_evaluation(rows)
    rollout = "Rollout time of a step as planned and as measured."
    cost = "Slot-seconds that rollout engines held leases for, in steps without evaluation."
    charts = [
        _plan(alone, "plan-step", "Step time", "Whole steps without evaluation.", "plan/step_s", "step_s", "seconds"),
        _plan(rows, "plan", "Rollout time", rollout, "plan/rollout_s", "phase/rollout_s", "seconds"),
        _plan(alone, "plan-cost", "Rollout cost", cost, "plan/cost_slot_s", "cost/rollout_slot_s", "slot-s"),
    ]
    return [chart for chart in charts if chart is not None]


def _without_evaluation(rows: Sequence[Row]) -> list[Row]:
    """Return the steps whose time and leases are those of training alone."""
    return [row for row in rows if not finite(row.get("phase/eval_s"))]


def _plan(rows: Sequence[Row], id: str, what: str, note: str, planned: str, measured: str, unit: str) -> Chart | None:
    metrics = ((measured, "measured", "@rollout", "solid"), (planned, "planned", "@learn", "dot"))
    data = lines(rows, metrics, width=1.8, hovertemplate=f"%{{y:.3~g}} {unit}")
    if not data:
        return None
    note += _accuracy(rows[-1], planned.removeprefix("plan/").split("_")[0])
    axis: Row = {"title": unit, "rangemode": "tozero"}
    if top := axis_top([y for trace in data for y in trace["y"]], 0.97):
        axis = {"title": unit, "range": [0, top]}
        note += f" Steps above {number(top, 2)} {unit} are cut off; double-click shows them."
    return Chart(id, f"{what}, planned and measured", note, data, {"yaxis": axis})


def _accuracy(row: Row, quantity: str) -> str:
    """Say how far off the newest predictions of a quantity were, as a step's row has it."""
    bias, error, wide = (finite(row.get(f"accuracy/{quantity}/{name}")) for name in ("bias", "median_error", "coverage_90"))
    if bias is None or error is None or wide is None:
        return ""
    said = f" Plans were {abs(bias):.0%} {'high' if bias > 0 else 'low'} in all, with a median error of {error:.0%}"
    return f"{said}; {wide:.0%} of the steps were inside the 90 % interval."


def calls(rows: Sequence[Row]) -> Chart | None:
    """Draw the learn phase of the last step that has a plan of calls: planned bars above measured ones."""
    known = [row for row in rows if row.get("plan/calls")]
    if not known:
        return None
    data: list[Row] = []
    planned = known[-1]["plan/calls"]
    for what, colour, start, end in (("measured", "@score", 4, 5), ("planned", "@learn", 2, 3)):
        spans = [one[end] - one[start] for one in planned]
        text = [f"{one[0]} on {one[1]}, {what}: {number(span)} s" for one, span in zip(planned, spans, strict=True)]
        bar = bars([rounded(span) for span in spans], [one[0] for one in planned], what, colour, orientation="h")
        data.append({**bar, "base": [rounded(one[start]) for one in planned], "customdata": text})
        data[-1]["hovertemplate"] = "%{customdata}<extra></extra>"
    note = f"When calls of models ran in step {known[-1]['step']}, as planned and as measured. Point at a call for its slots and seconds."
    axes = {"xaxis": {"title": "seconds", "rangemode": "tozero"}, "yaxis": {"automargin": True, "autorange": "reversed"}}
    return Chart("plan-calls", "Calls of the learn phase", note, data, {**axes, "barmode": "group", "hovermode": "closest"}, height=300)


def calls_table(rows: Sequence[Row]) -> list[Row]:
    """Return the last plan of calls: name, slots, seconds planned and measured, and the median relative error of all steps."""
    known = [row["plan/calls"] for row in rows if row.get("plan/calls")]
    errors: dict[str, list[float]] = {}
    for name, _, *times in (one for plan in known for one in plan):
        errors.setdefault(name, []).append(abs((times[3] - times[2]) / (times[1] - times[0]) - 1))
    return [
        {"name": name, "slots": count, "planned_s": end - start, "measured_s": until - began, "error": statistics.median(errors[name])}
        for name, count, start, end, began, until in (known[-1] if known else [])
    ]


def accuracy_table(rows: Sequence[Row]) -> list[Row]:
    """Return how good the newest predictions of each quantity were: name, number, bias, median error, and shares inside intervals."""
    last = rows[-1] if rows else {}
    names = dict.fromkeys(key.split("/")[1] for key in last if key.startswith("accuracy/"))
    figures = ("records", "bias", "median_error", "coverage_50", "coverage_90")
    table: list[Row] = [
        {"name": WORDS.get(name, name), **{figure: finite(last.get(f"accuracy/{name}/{figure}")) for figure in figures}} for name in names
    ]
    return [row for row in table if None not in row.values()]


def calibration(rows: Sequence[Row]) -> Chart | None:
    """Draw the share of measurements below each quantile of their forecasts: the diagonal if forecasts are calibrated."""
    half, last = rows[len(rows) // 2 :], rows[-1] if rows else {}
    lengths = [row["forecast/pit_deciles"] for row in half if row.get("forecast/pit_deciles")]
    shares = {"response lengths": [statistics.mean(share) for share in zip(*lengths, strict=True)]} if lengths else {}
    shares |= {WORDS[name]: last[key] for name in ("rollout", "cost", "step") if (key := f"accuracy/{name}/deciles") in last}
    if not shares:
        return None
    levels = [k / 10 for k in range(11)]
    data = [line([0, 1], [0, 1], "calibrated", "@muted", style={"dash": "dot"}, width=1.2, mode="lines", hoverinfo="skip")]
    for (name, deciles), colour in zip(shares.items(), ("@rollout", "@learn", "@score", "@eval"), strict=False):
        below = [rounded(min(1.0, sum(deciles[:k]))) for k in range(11)]
        text = f"{name}: %{{y:.0%}} were below the %{{x:.0%}} quantile<extra></extra>"
        data.append(line(levels, below, name, colour, width=1.8, hovertemplate=text))
    note = (
        "Share of measurements below each quantile of their own forecasts: lengths in the second half of the run, times and costs among "
        "the newest steps. Above the diagonal forecasts were too high, below it too low; flat ends mean intervals that are too wide."
    )
    shown: Row = {"tickformat": ".0%", "range": [0, 1.01]}
    axes = {"xaxis": {"title": "predicted quantile", **shown}, "yaxis": {"title": "share of measurements below it", **shown}}
    return Chart("quantiles", "Calibration", note, data, {**axes, "hovermode": "closest"}, height=300)


def frontier(rows: Sequence[Row]) -> Chart | None:
    """Draw the frontier of the last step without evaluation (cost against time), the chosen plan, the measured result, and the bounds."""
    known = [row for row in rows if row.get("plan/frontier_time_s")]
    if not known:
        return None
    row = (_without_evaluation(known) or known)[-1]
    times, costs, actors = (row[f"plan/frontier_{name}"] for name in ("time_s", "cost_slot_s", "actors"))
    data: list[Row] = [{
        "type": "scatter", "mode": "lines+markers", "x": [rounded(c) for c in costs], "y": [rounded(t) for t in times],
        "name": "frontier (forecast)", "line": {"color": "@rollout", "width": 1.6}, "marker": {"size": 5, "color": "@rollout"},
        "customdata": [f"{number(t)} s for {number(c)} slot-s on {n} engines" for t, c, n in zip(times, costs, actors, strict=True)],
        "hovertemplate": "%{customdata}<extra></extra>",
    }]  # fmt: skip
    for name, time_key, cost_key, symbol, colour in (
        ("chosen", "plan/rollout_s", "plan/cost_slot_s", "circle-open", "@learn"),
        ("measured", "phase/rollout_s", "cost/rollout_slot_s", "x", "@score"),
        ("true lengths known", "plan/clairvoyant_s", "plan/clairvoyant_cost_slot_s", "diamond", "@muted"),
    ):
        time_s, cost = finite(row.get(time_key)), finite(row.get(cost_key))
        if time_s is not None and cost is not None:
            text = f"{name}: {number(time_s)} s for {number(cost)} slot-s<extra></extra>"
            data.append(markers([rounded(cost)], [rounded(time_s)], name, colour, symbol, 12, hovertemplate=text))
            data[-1]["marker"]["line"] = {"width": 2, "color": colour}
    layout: Row = {
        "xaxis": {"title": "cost, slot-seconds", "rangemode": "tozero"},
        "hovermode": "closest",
        "yaxis": {"title": "rollout, seconds", "rangemode": "tozero"},
    }
    note = (
        "Plans in decoding time; hover for the number of engines. The points chosen and measured are of the "
        "whole phase, including weights, calls, and slots held for the learner."
    )
    bound_s, bound_cost = finite(row.get("plan/bound_s")), finite(row.get("plan/bound_cost_slot_s"))
    if bound_s is not None and bound_cost is not None:
        note += f" No plan could take less than {number(bound_s)} s, or cost less than {number(bound_cost)} slot-s."
    return Chart("frontier", f"The frontier of step {row['step']}", note, data, layout, height=300)


def _decision(row: Row) -> str:
    what = ": ".join(str(part) for part in (row.get("pool/decision"), row.get("pool/reason")) if part)
    return hover_text(f"<b>step {row['step']}, {number(row['pool/rollout_actors'])} engines</b>", what)
