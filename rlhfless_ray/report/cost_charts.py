"""Charts of cost by kind and activity, and of a step's time by phase."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from placement.pools import OWN, PREEMPTED
from rlhfless_ray.report.charts import Chart, Row, axis_top, bars, rounded
from rlhfless_ray.report.formatting import duration, finite, finite_values, number, percent

ACTIVITIES = ("work", "transfer", "start", "idle")
KINDS = ("prefill", "rollout", "agent", "score", "reference", "critic", "learn", "eval", "warm_start")
PHASES = ("prefill", "rollout", "score", "learn", "publish", "eval", "driver")  # "lease" is contained in them; also names of colours
MAX_BARS = 80


def by_kind(ledger: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Sum leased slot-seconds by kind and activity. Parked rows hold no lease and do not count."""
    table: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ACTIVITIES, 0.0))
    for row in ledger:
        slots, activity = finite(row.get("slots")), str(row.get("activity"))
        if activity != "parked" and slots:
            cells = table[str(row.get("kind"))]
            cells[activity] = cells.get(activity, 0.0) + slots * row["seconds"]
    order = {kind: i for i, kind in enumerate(KINDS)}
    return {kind: table[kind] for kind in sorted(table, key=lambda kind: (order.get(kind, 99), kind))}


def by_pool(ledger: Sequence[Row]) -> list[Row]:
    """Sum each pool of nodes: leased slot-seconds, money, preempted instances and seconds of lost work. Nothing if there is one pool."""
    pools: dict[str, Row] = {}
    for row in ledger:
        name = str(row.get("pool") or OWN)
        cells = pools.setdefault(name, {"pool": name, "slot_s": 0.0, "money": 0.0, "preemptions": 0, "lost_s": 0.0})
        cells["slot_s"] += (finite(row.get("slots")) or 0.0) * row["seconds"]
        cells["money"] += finite(row.get("money")) or 0.0
        if row.get("activity") == PREEMPTED:
            cells["preemptions"] += 1
            cells["lost_s"] += row["seconds"]
    return sorted(pools.values(), key=lambda cells: (cells["pool"] != OWN, cells["pool"])) if len(pools) > 1 else []


def cost(table: Mapping[str, Mapping[str, float]]) -> Chart | None:
    """Draw stacked bars of kind × activity in the colours of the lease timeline. `table`: see `by_kind`."""
    total = sum(sum(cells.values()) for cells in table.values())
    if not total:
        return None
    kinds = list(table)[::-1]
    data = []
    extra = sorted({activity for cells in table.values() for activity in cells} - set(ACTIVITIES))
    names = [kind.replace("_", " ") for kind in kinds]
    for activity in (*ACTIVITIES, *extra):
        values = [table[kind].get(activity, 0.0) for kind in kinds]
        if not any(values):
            continue
        shown = [f"{activity}: {number(x)} slot-s, {100 * x / total:.1f}% of the full cost" for x in values]
        hover = {"customdata": shown, "hovertemplate": "%{customdata}<extra>%{y}</extra>", "orientation": "h", "showlegend": False}
        data.append(bars([rounded(value) for value in values], names, activity, "", **hover) | {"marker": _marker(activity, kinds)})
    layout = {
        "barmode": "stack", "hovermode": "closest", "xaxis": {"title": "slot-seconds", "nticks": 6},
        "yaxis": {"automargin": True, "ticksuffix": "  "}, "bargap": 0.35,
    }  # fmt: skip
    note = (
        "Every leased slot-second of the run: work solid, transfer paler, start striped, idle grey. Start-up, a warm start "
        "(the kind learn), the first evaluation and what follows the last step belong to no step: they count here and in the totals "
        "only. Writing a checkpoint is part of the costs of the step after it."
    )
    return Chart("cost", "Cost by kind and activity", note, data, layout, height=90 + 44 * len(kinds))


def _marker(activity: str, kinds: Sequence[str]) -> Row:
    """Return the colours of an activity's bars, striped for starts."""
    colours = [f"@{kind}" if kind in KINDS else "@other" for kind in kinds]
    opacity = {"work": "", "transfer": "/0.55", "start": "/0.2"}.get(activity, "/0.7")
    shown = {"color": "@idle/0.6" if activity == "idle" else [colour + opacity for colour in colours], "line": {"width": 0}}
    if activity != "start":
        return shown
    stripes = {"shape": "/", "size": 7, "solidity": 0.35, "fillmode": "replace", "fgopacity": 1}
    return {**shown, "pattern": {**stripes, "bgcolor": shown["color"], "fgcolor": [colour + "/0.8" for colour in colours]}}


def phases(rows: Sequence[Row]) -> Chart | None:
    """Draw stacked seconds of a step by phase, averaged over neighbouring steps if there are many."""
    known = [row for row in rows if any(finite(row.get(f"phase/{phase}_s")) is not None for phase in PHASES)]
    if not known:
        return None
    each = -(-len(known) // MAX_BARS)  # the same number of steps per bar keeps the bars equidistant
    bunches = [known[i : i + each] for i in range(0, len(known), each)]
    xs = [(bunch[0]["step"] + bunch[-1]["step"]) / 2 if each > 1 else bunch[0]["step"] for bunch in bunches]
    data: list[Row] = []
    for phase in PHASES:
        ys = [rounded(statistics.mean(finite(row.get(f"phase/{phase}_s")) or 0.0 for row in bunch)) for bunch in bunches]
        if any(ys):
            data.append(bars(xs, ys, phase, f"@{phase}", hovertemplate="%{y:.3~g} s", showlegend=False))
    note = "Wall-clock seconds of a step by phase, coloured as in the table" + (
        f", each bar the mean of {each} steps." if each > 1 else "."
    )
    waits = finite_values(known, "phase/lease_s")
    if waits and sum(waits) > 0:
        whole = sum(finite(row.get(f"phase/{phase}_s")) or 0.0 for row in known for phase in PHASES)
        share = f", {percent(sum(waits) / whole)} of all" if whole else ""
        note += f" This includes waiting for leases: {duration(statistics.median(waits))} in the median{share}."
    layout: Row = {"barmode": "stack", "bargap": 0.12, "yaxis": {"title": "seconds"}}
    if top := axis_top([sum(trace["y"][i] for trace in data) for i in range(len(bunches))], 0.95):
        layout["yaxis"]["range"] = [0, top]
        note += f" Bars above {number(top, 2)} s are cut off; double-click shows them."
    return Chart("phases", "Where a step's time goes", note, data, layout, height=300)


def phase_table(rows: Sequence[Row]) -> list[Row]:
    """Return median, 95th percentile (seconds) and share of all step time by phase, largest first."""
    lines: list[Row] = []
    whole = 0.0
    for phase in PHASES:
        values = sorted(finite_values(rows, f"phase/{phase}_s"))
        if phase == "eval":
            values = [x for x in values if x > 0]  # most steps do not evaluate
        if values and values[-1] > 0:
            whole += sum(values)
            worst = values[min(len(values) - 1, int(0.95 * len(values)))]
            lines.append({"phase": phase, "median": statistics.median(values), "p95": worst, "sum": sum(values)})
    for entry in lines:
        entry["share"] = entry["sum"] / whole
    return sorted(lines, key=lambda entry: -entry["sum"])


def memory_table(rows: Sequence[Row]) -> list[Row]:
    """Return least, predicted, median and largest measured memory (GB) by function, largest first; all processes together last."""
    names = {key.removeprefix("memory/").removesuffix("_peak_mb") for row in rows for key in row if key.endswith("_peak_mb")}
    lines: list[Row] = []
    for name in names:
        peaks = [x / 1000 for x in finite_values(rows, f"memory/{name}_peak_mb")]
        if peaks:
            shown = "all together" if name == "total" else name.replace("_", " ")
            planned = {kind: _last_gb(rows, f"memory/{name}_{kind}_mb") for kind in ("least", "predicted")}
            lines.append({"name": shown, **planned, "median": statistics.median(peaks), "most": max(peaks)})
    return sorted(lines, key=lambda line: (line["name"] == "all together", -line["most"]))


def _last_gb(rows: Sequence[Row], key: str) -> float | None:
    values = finite_values(rows, key)
    return values[-1] / 1000 if values else None


def memory_settings(rows: Sequence[Row]) -> str:
    """Return the settings that the run chose to fit the memory, with the reason, or an empty text."""
    return next((str(row["memory/settings"]) for row in reversed(rows) if row.get("memory/settings")), "")
