"""Charts of learning as plotly figures in plain dicts: reward, accuracy, lengths, forecasts and the learner's health.

A colour is a name after `@`, optionally with an opacity after a slash (`@rollout/0.2`); the page inserts its light or dark
palette. A function returns None if the run has no data for it, so no chart is empty.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlhfless_ray.common.data_files import read_data_file
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report.formatting import are_shares, finite, finite_values, number, round_up

Row = JsonObject
MAX_POINTS = 500  # per line: more are not visible and slow the page down


@dataclass
class Chart:
    """A titled figure. `note`: a sentence below the title. `height`: CSS pixels. `kind`: also its CSS class."""

    id: str
    title: str
    note: str
    data: list[Row]
    layout: Row = field(default_factory=dict)
    height: int = 260
    kind: str = "half"


def series(rows: Iterable[Row], key: str) -> tuple[list[int], list[float]]:
    """Return steps and finite values of a metric, rounded to five digits."""
    known = [(row["step"], rounded(value)) for row in rows if (value := finite(row.get(key))) is not None]
    return [step for step, _ in known], [value for _, value in known]


def rounded(value: float) -> float:
    """Round to five digits."""
    return float(f"{value:.5g}")


def thin(rows: Sequence[Row], limit: int = MAX_POINTS) -> list[Row]:
    """Return at most `limit` rows: numbers are averaged over neighbours (maxima stay maxima), other values are the last one's."""
    if len(rows) <= limit:
        return list(rows)
    thinned = []
    for i in range(limit):
        bunch = rows[i * len(rows) // limit : (i + 1) * len(rows) // limit]
        merged = {key: value for row in bunch for key, value in row.items()}  # not every row has every metric
        for key in merged:
            values = finite_values(bunch, key)
            if key != "step" and values and not isinstance(merged[key], str):
                merged[key] = max(values) if key.endswith("max") else sum(values) / len(values)
        thinned.append(merged)
    return thinned


def line(
    xs: Sequence[object], ys: Sequence[object], name: str, colour: str, width: float = 2, dash: str = "solid", **options: object
) -> Row:
    """Return a line trace, with markers if there are few points."""
    style = {"color": colour, "width": width, "dash": dash}
    mode = "lines+markers" if len(xs) <= 40 else "lines"
    trace = {"type": "scatter", "mode": mode, "x": list(xs), "y": list(ys), "name": name, "line": style}
    return trace | {"marker": {"size": 5, "color": colour}, "cliponaxis": False} | options


def lines(rows: Sequence[Row], metrics: Iterable[tuple[str, str, str, str]], width: float = 2, **options: object) -> list[Row]:
    """Return a line trace, thinned, of each metric that the run has. `metrics`: (key, name, colour, dash)."""
    return [
        line(xs, ys, name, colour, width, dash, **options)
        for key, name, colour, dash in metrics
        for xs, ys in [series(thin([row for row in rows if finite(row.get(key)) is not None]), key)]
        if xs
    ]


def line_charts(part: str, rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of a part of charts.yaml, without those that the run has no data for."""
    charts = []
    for spec in read_data_file(__package__, "charts.yaml")[part]:
        data = lines(rows, spec["lines"], **spec.get("options", {}))
        charts.append(Chart(spec["id"], spec["title"], spec["note"], data, spec.get("layout", {}), spec.get("height", 260)))
    return [chart for chart in charts if chart.data]


def markers(xs: Sequence[object], ys: Sequence[object], name: str, colour: str, symbol: str, size: int = 8, **options: object) -> Row:
    """Return a trace of single points."""
    trace = {"type": "scatter", "mode": "markers", "x": list(xs), "y": list(ys), "name": name}
    return trace | {"marker": {"symbol": symbol, "size": size, "color": colour}} | options


def bars(xs: Sequence[object], ys: Sequence[object], name: str, colour: str | Sequence[str], **options: object) -> Row:
    """Return a trace of bars. `colour`: of all, or of each."""
    return {"type": "bar", "name": name, "x": list(xs), "y": list(ys), "marker": {"color": colour, "line": {"width": 0}}} | options


def panels(upper: Row, lower: Row) -> Row:
    """Return the layout of two vertical axes, one above the other."""
    return {"yaxis": upper | {"domain": [0.44, 1]}, "yaxis2": lower | {"domain": [0, 0.34]}}


def hover_text(head: str, what: str) -> str:
    """Return a hover text of short lines. plotly interprets some HTML tags, so text of the run is escaped."""
    return "<br>".join([*([head] if head else []), *(html.escape(part) for part in textwrap.wrap(what, 60))])


def band(rows: Sequence[Row], low: str, high: str, name: str, colour: str) -> list[Row]:
    """Return the traces of the area between two metrics."""
    both = [row for row in rows if finite(row.get(low)) is not None and finite(row.get(high)) is not None]
    xs, bottom = series(both, low)
    _, top = series(both, high)
    if not xs:
        return []
    edge = {"type": "scatter", "mode": "lines", "x": xs, "line": {"width": 0}, "hoverinfo": "skip"}
    return [edge | {"y": bottom, "showlegend": False}, edge | {"y": top, "fill": "tonexty", "fillcolor": colour, "name": name}]


def axis_top(values: Iterable[float], share: float) -> float | None:
    """Return where to cut an axis so that a few outliers, such as a cold start, do not flatten the rest, or None for nowhere.

    `share`: of the values, those that are no outliers.
    """
    ordered = sorted(values)
    usual = ordered[int(share * len(ordered))] if len(ordered) >= 20 else None
    return 2 * usual if usual is not None and ordered[-1] > 4 * usual else None


def smoothed(ys: Sequence[float], half_life: float) -> list[float]:
    """Return the exponential moving average, corrected for its start."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    out = []
    for y in ys:
        total, weight = total * keep + y, weight * keep + 1
        out.append(rounded(total / weight))
    return out


def reward(rows: Sequence[Row]) -> Chart | None:
    xs, ys = series(rows, "reward/mean")
    if not xs:
        return None
    note = "Mean over the scored samples of a step."
    # No band of the samples' standard deviation: with rewards of 0 and 1 it fills the chart and hides the trend.
    stds = {row["step"]: number(row.get("reward/std")) for row in rows}
    hover: Row = {"customdata": [stds[x] for x in xs], "hovertemplate": "%{y:.3f} (std %{customdata})"}
    if len(xs) >= 20:
        thick = line(xs, smoothed(ys, max(3, len(xs) / 30)), "smoothed", "@rollout", width=2.5, mode="lines")
        data = [line(xs, ys, "step", "@rollout/0.4", width=1, mode="lines", **hover), thick | {"hovertemplate": "%{y:.3f}"}]
    else:
        data = [line(xs, ys, "step", "@rollout", **hover)]
    return Chart("reward", "Reward", note, data, {"yaxis": {"title": "reward"}})


def accuracy(rows: Sequence[Row]) -> Chart | None:
    metrics = [("eval/accuracy_sampled", "sampled", "@rollout", "solid"), ("eval/accuracy_greedy", "greedy", "@learn", "solid")]
    data = lines(rows, metrics, mode="lines+markers")
    if not data:
        return None
    shares = are_shares(y for trace in data for y in trace["y"])
    for trace in data:
        trace["hovertemplate"] = "%{y:.1%}" if shares else "%{y:.3f}"
    once = all(len(trace["x"]) == 1 for trace in data)
    note = "Held-out prompts, evaluated once." if once else "Held-out prompts; step 0 is before training."
    axis = {"title": "accuracy", "tickformat": ".0%"} if shares else {"title": "reward"}
    return Chart("accuracy", f"{'Accuracy' if shares else 'Reward'} on held-out prompts", note, data, {"yaxis": axis})


def lengths(rows: Sequence[Row]) -> Chart | None:
    every = len(rows) / 120
    rows = thin(rows, 120)  # otherwise the bands of neighbouring steps overlap
    data = band(rows, "length/p90", "length/p99", "p90 – p99", "@rollout/0.14")
    data += band(rows, "length/p50", "length/p90", "p50 – p90", "@rollout/0.32")
    data += lines(rows, [("length/mean", "mean", "@rollout", "solid")])
    data += lines(rows, [("length/max", "longest", "@muted", "dot")], width=1, mode="lines")
    if not data:
        return None
    note = "Response lengths of a step. The gap between mean and p99 makes slots wait."
    note += f" Each point is the mean of about {every:.0f} steps." if every > 1.5 else ""
    return Chart("lengths", "Response lengths", note, data, {"yaxis": {"title": "tokens", "rangemode": "tozero"}})


def lag(rows: Sequence[Row]) -> Chart | None:
    """Draw the trained tokens by lag with their effective sample size, and below them the KL between versions."""
    rows = [row for row in rows if finite(row.get("lag/old_share")) is not None]
    if not any(row["lag/old_share"] for row in rows):
        return None
    waited, known, rows = [row for row in rows if finite(row.get("partial/weights_wait_s"))], len(rows), thin(rows)
    oldest = max(int(key.removeprefix("lag/share_")) for row in rows for key in row if key.startswith("lag/share_") and row[key])
    data: list[Row] = []
    for k in reversed(range(oldest + 1)):  # the newest on top, where the line of the sample size is
        ys = [rounded(finite(row.get(f"lag/share_{k}")) or 0.0) for row in rows]
        colour = f"@rollout/{0.15 + 0.7 * k / oldest:.2g}"
        name = f"{k} version{'s' * (k != 1)} old" if k else "newest version"
        fill = {"stackgroup": "lag", "fillcolor": colour, "line": {"color": colour, "width": 1}, "hovertemplate": "%{y:.1%}"}
        data.append({"type": "scatter", "mode": "lines", "x": [row["step"] for row in rows], "y": ys, "name": name} | fill)
    share = [("learn/effective_share", "effective sample size", "@score", "solid")]
    data += lines(rows, share, width=2.2, mode="lines", hovertemplate="%{y:.1%}")
    dashes = itertools.cycle(("solid", "dash", "dot"))
    kl = [(f"lag/kl_{k}", f"KL, {k} version{'s' * (k != 1)}", "@learn", next(dashes)) for k in range(1, oldest + 1)]
    data += lines(rows, kl, width=1.6, yaxis="y2", hovertemplate="%{y:.3~g} nats")
    layout = panels(
        {"title": "share of tokens", "tickformat": ".0%", "range": [0, 1]}, {"title": "KL, nats", "rangemode": "tozero", "nticks": 4}
    )
    note = (
        "Trained tokens by the updates made since their version drew them, and the effective sample size that their importance weights "
        "leave. Below: KL per token from those versions to the weights before the update."
    )
    if waited:
        text = f" In {len(waited)} of {known} steps engines went on under the old weights after the update"
        note += f"{text}; step {waited[-1]['step']}: {waited[-1].get('partial/weights_reason')}."
    return Chart("lag", "Age of the trained tokens", note, data, layout, height=300)


def histogram(groups: Sequence[tuple[str, Sequence[float]]]) -> Chart | None:
    """Draw the histograms of one or two groups: (name, lengths in tokens)."""
    groups = [(name, values) for name, values in groups if values]
    if not groups:
        return None
    top = max(max(values) for _, values in groups)
    width = max(1.0, round_up(max(top, 1) / 24))
    bins = math.floor(top / width) + 1
    data = []
    for (name, values), colour in zip(groups, ("@muted", "@rollout"), strict=False):
        colour = "@rollout" if len(groups) == 1 else colour
        counts = Counter(math.floor(value / width) for value in values)
        shares = [rounded(counts[i] / len(values)) for i in range(bins)]
        spans = [f"{number(i * width)} – {number((i + 1) * width - (width >= 2))}" for i in range(bins)]
        hover = {"customdata": spans, "hovertemplate": "%{customdata} tokens: %{y:.1%}"}
        middles = [round((i + 0.5) * width, 2) for i in range(bins)]
        data.append(bars(middles, shares, name, f"{colour}/0.55", width=width * (0.94 if len(groups) == 1 else 1), **hover))
    note = "Share of stored samples by response length" + ("; the last bin includes responses cut at the limit." if top else ".")
    layout = {
        "barmode": "overlay", "bargap": 0, "hovermode": "closest", "xaxis": {"title": "tokens", "rangemode": "tozero"},
        "yaxis": {"title": "share of samples", "tickformat": ".0%"},
    }  # fmt: skip
    return Chart("histogram", "Lengths, first and last steps", note, data, layout)


def forecast(rows: Sequence[Row]) -> Chart | None:
    data = lines(rows, [("forecast/mae_tokens", "mean absolute error", "@learn", "solid")])
    data += lines(rows, [("forecast/bias_tokens", "bias (forecast − truth)", "@muted", "dot")], width=1.5)
    ranks = lines(rows, [("forecast/spearman", "rank quality", "@score", "solid")], yaxis="y2")
    if not data + ranks:
        return None
    axis: Row = {"title": "tokens", "zeroline": True}
    layout = {"yaxis": axis}
    note = "Difference between the forecast and the true length of responses."
    if ranks:
        layout = panels(axis, {"title": "Spearman", "range": [min(0, *ranks[0]["y"]), 1.02]})
        note += " Below: Spearman's rank correlation of both, 1 is a perfect order."
    return Chart("forecast", "Length forecasts", note, data + ranks, layout, height=300)


def health(rows: Sequence[Row]) -> tuple[list[Chart], list[str]]:
    """Return small charts of metrics that vary, and a sentence for each constant one."""
    charts, constant = [], []
    for spec in read_data_file(__package__, "charts.yaml")["health"]:
        key, title, note = spec["metric"], spec["title"], spec["note"]
        xs, ys = series(rows, key)
        if not xs:
            continue
        if len(xs) > 1 and min(ys) == max(ys):
            constant.append(f"{title}: {number(ys[0])} throughout")
            continue
        use_log_scale = min(ys) > 0 and max(ys) / min(ys) > 200
        layout = {"yaxis": {"type": "log", "dtick": 1}} if use_log_scale else {"yaxis": {"nticks": 5}}
        trace = line(xs, ys, title, "@learn", width=1.6, hovertemplate="%{y:.4~g}")
        charts.append(Chart(key.replace("/", "-"), title[0].upper() + title[1:], note, [trace], layout, height=170, kind="third"))
    return charts, constant
