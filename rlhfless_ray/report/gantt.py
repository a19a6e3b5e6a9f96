"""The report's lease timeline: which function held which slot, compact enough for thousands of steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from placement.pools import OWN, PREEMPTED
from rlhfless_ray.report.charts import Row
from rlhfless_ray.report.formatting import finite, natural_order

MAX_SEGMENTS = 24_000  # about 0.8 MB in the page, drawn in a few milliseconds
JOIN_S = 0.001  # shorter gaps come from rounding

Segments = list[list[Any]]  # of a lane: from and to in seconds, and (kind, activity, instance, step)


def gantt(ledger: Sequence[Row], steps: Sequence[Row]) -> Row | None:
    """Return the data of `gantt.js`: columns of integers (milliseconds; indices into name lists), or None without a ledger.

    Slots of a pool of nodes are neighbours: `pools` has [name, number of its lanes] in order, or nothing if there is one pool. `marks`
    has [lane, end, lost work] of the instances that were preempted.

    Consecutive rows of a slot with the same kind, activity, instance and step become one segment. If more than MAX_SEGMENTS
    remain, the shortest are merged into their left neighbours; `merged_ms` is the longest merged one.
    """
    rows = [row for row in ledger if row["to_s"] > row["from_s"] and row.get("activity") != PREEMPTED]
    preempted = [row for row in ledger if row.get("activity") == PREEMPTED]
    if not rows:
        return None
    several_nodes = len({row.get("node") for row in rows}) > 1
    lanes: dict[str, Segments] = {}
    parked: dict[str, Segments] = {}
    pools: dict[str, str] = {}

    def label_of(row: Row) -> str:
        slot = f"{row.get('resource') or 'slot'} {row.get('device')}"
        return f"{_short(str(row.get('node')))} {slot}" if several_nodes else slot

    for row in rows:
        label = label_of(row)
        lanes.setdefault(label, [])
        pools.setdefault(label, str(row.get("pool") or ""))
        target = (parked if row.get("activity") in ("parked", "unleased") else lanes).setdefault(label, [])
        key = (str(row.get("kind")), str(row.get("activity")), str(row.get("instance") or ""), row.get("step"))
        last = target[-1] if target else None
        if last is not None and last[2] == key and row["from_s"] - last[1] < JOIN_S:
            last[1] = max(last[1], row["to_s"])
        else:
            target.append([row["from_s"], row["to_s"], key])
    threshold = _merge(lanes)
    _merge(parked)
    labels = sorted(lanes, key=lambda label: (pools[label] not in ("", OWN), pools[label], natural_order(label)))
    bands = [[pool, len([*group])] for pool, group in groupby(labels, pools.__getitem__)]
    marks = [[labels.index(label_of(row)), _ms(row["to_s"]), _ms(row["seconds"])] for row in preempted if label_of(row) in lanes]
    names: dict[str, dict[str, int]] = {"kinds": {}, "activities": {}, "instances": {}}
    columns: dict[str, list[object]] = {key: [] for key in ("lane", "from", "to", "kind", "activity", "instance", "step")}
    for i, label in enumerate(labels):
        for from_s, to_s, (kind, activity, instance, step) in [*parked.get(label, ()), *lanes[label]]:
            columns["lane"].append(i)
            columns["from"].append(round(1000 * from_s, 1))
            columns["to"].append(round(1000 * to_s, 1))
            for column, table, name in (("kind", "kinds", kind), ("activity", "activities", activity), ("instance", "instances", instance)):
                columns[column].append(names[table].setdefault(name, len(names[table])))
            columns["step"].append(step)
    end = max(row["to_s"] for row in rows)
    begin = min(row["from_s"] for row in rows)
    return {
        "lanes": labels, "pools": bands if len(bands) > 1 else [], "marks": marks,
        **{key: list(table) for key, table in names.items()}, **columns, "range": [_ms(begin), _ms(end)],
        "steps": _bounds(rows, steps), "merged_ms": None if threshold is None else round(1000 * threshold, 1),
    }  # fmt: skip


def _merge(lanes: dict[str, Segments]) -> float | None:
    total = sum(len(segments) for segments in lanes.values())
    if total <= MAX_SEGMENTS:
        return None
    spans = sorted(segment[1] - segment[0] for segments in lanes.values() for segment in segments)
    threshold: float = spans[total - MAX_SEGMENTS]
    for label, segments in lanes.items():
        kept: Segments = []
        for segment in segments:
            if kept and segment[1] - segment[0] <= threshold and segment[0] - kept[-1][1] <= threshold:
                kept[-1][1] = max(kept[-1][1], segment[1])
            else:
                kept.append(segment)
        lanes[label] = kept
    return threshold


def _bounds(rows: Sequence[Row], steps: Sequence[Row]) -> list[list[float]]:
    """Return [step, from, to] in ms from the metrics, or from the ledger for steps without metrics."""
    bounds: dict[int, list[float]] = {}
    for row in rows:
        if row.get("step") and row.get("activity") != "parked" and not row.get("repeated"):
            span = bounds.setdefault(row["step"], [row["from_s"], row["to_s"]])
            span[0], span[1] = min(span[0], row["from_s"]), max(span[1], row["to_s"])
    for row in steps:
        end, length = finite(row.get("time_s")), finite(row.get("step_s"))
        if end is not None and length is not None:
            bounds[row["step"]] = [end - length, end]
    return [[step, _ms(span[0]), _ms(span[1])] for step, span in sorted(bounds.items())]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def _short(node: str) -> str:
    """Shorten Ray's node ids of 56 hexadecimal digits to six, which are enough to tell them apart."""
    return node[:6] if re.fullmatch(r"[0-9a-f]{20,}", node) else node
