"""The timeline: the ledger as Chrome trace events, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A process is a node, named with its pool if that is not the run's own nodes, and a thread is one of its slots. A slot's track shows the
holder (`rollout`) with its activities (`work`, `transfer`, `idle`, `start`) nested below. Warm memory without a lease has a process of
its own, with one thread per parked instance. The process `run` has the steps and a counter of leased slots by kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from placement.pools import OWN, PREEMPTED
from rlhfless_ray.common.disk_space import writing
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report.cost_charts import PHASES
from rlhfless_ray.report.formatting import finite, natural_order

STEP_KEYS = (
    *("reward/mean", "pool/rollout_actors", "pool/reason", "cost/busy_slot_s", "cost/full_slot_s"),
    *(f"phase/{phase}_s" for phase in ("lease", *PHASES)),
)

Row = JsonObject
Event = JsonObject


def trace_events(rows: Iterable[Row], metrics: Iterable[Row] = ()) -> Iterator[Event]:
    """Yield trace events (microseconds) of ledger rows and, for the steps, of metrics rows (seconds).

    Every ledger row becomes one complete event of category `activity`, or an instant event if it is about a preemption.
    """
    ordered = sorted(rows, key=_interval)
    yield from _process(1, "run", 0)
    yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "steps"}}
    yield from _steps(metrics)
    groups: dict[tuple[bool, str, str], list[Row]] = {}
    for row in ordered:
        pool = str(row.get("pool") or OWN)
        key = row.get("activity") == "parked", "" if pool == OWN else pool, str(row.get("node") or "?")
        groups.setdefault(key, []).append(row)
    for pid, (parked, pool, node) in enumerate(sorted(groups), 10):
        name = f"{'parked instances on' if parked else 'node'} {node}" + (f" (pool {pool})" if pool else "")
        yield from _process(pid, name, 900 + pid if parked else pid)
        rows_of_node = groups[parked, pool, node]
        yield from _tracks(pid, [row for row in rows_of_node if row.get("activity") != PREEMPTED], parked)
        yield from (_preemption(pid, row) for row in rows_of_node if row.get("activity") == PREEMPTED)
    yield from _counters(ordered)


def write_timeline(run_folder: Path) -> Path:
    """Write `timeline.json` from `ledger.csv` and `metrics.jsonl` (either may be missing or incomplete) and return its path."""
    from rlhfless_ray.report.read_run import RunRecord

    record = RunRecord.read(Path(run_folder))
    path = Path(run_folder) / "timeline.json"
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    fresh = path.with_suffix(".json.new")
    with writing(path):
        try:
            with fresh.open("w", encoding="utf-8") as file:  # event by event, because all events of a long run take a GB
                file.write('{"displayTimeUnit":"ms","traceEvents":[')
                for number, event in enumerate(trace_events(record.ledger, record.metrics)):
                    file.write(("," if number else "") + encode(event))
                file.write("]}")
            os.replace(fresh, path)
        except OSError:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
    return path


def _interval(row: Row) -> tuple[int, int]:
    return round(row["from_s"] * 1e6), round(row["to_s"] * 1e6)


def _process(pid: int, name: str, order: int) -> list[Event]:
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}},
    ]


def _preemption(pid: int, row: Row) -> Event:
    about = {"instance": row.get("instance"), "pool": row.get("pool"), "lost_s": row["seconds"]}
    return {"ph": "i", "s": "p", "cat": "preemption", "name": PREEMPTED, "pid": pid, "tid": 1, "ts": _interval(row)[1], "args": about}


def _tracks(pid: int, rows: list[Row], parked: bool) -> Iterator[Event]:
    """Yield one thread per slot or parked instance. Overlapping rows go to further threads, because slices must nest."""
    tracks: dict[str, list[list[Row]]] = {}
    ends: dict[str, list[int]] = {}
    for row in rows:
        slot = str(row.get("instance")) if parked else f"{row.get('resource') or 'slot'} {row.get('device')}"
        begin, end = _interval(row)
        lanes, lane_ends = tracks.setdefault(slot, []), ends.setdefault(slot, [])
        lane = next((i for i, last in enumerate(lane_ends) if last <= begin), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            lane_ends.append(end)
        lanes[lane].append(row)
        lane_ends[lane] = end
    tid = 0
    for slot in sorted(tracks, key=natural_order):
        for lane, members in enumerate(tracks[slot]):
            tid += 1
            name = slot if lane == 0 else f"{slot} (also)"
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            yield from _slices(pid, tid, members)


def _slices(pid: int, tid: int, rows: list[Row]) -> Iterator[Event]:
    together: list[Event] = []  # a holder's slice, followed by the slices nested in it
    tied_to: tuple[object, ...] = ()
    for row in rows:
        begin, end = _interval(row)
        kind = str(row.get("kind"))
        tied = (kind, row.get("instance"), row.get("lease"))
        # Consecutive rows of one holder share a slice, so that a zoomed-out view shows holders instead of fragments.
        if not together or tied_to != tied or begin - (together[0]["ts"] + together[0]["dur"]) > 1000:
            yield from together
            who = {"instance": row.get("instance"), "lease": row.get("lease")}
            together, tied_to = [{"ph": "X", "cat": "holder", "name": kind, "pid": pid, "tid": tid, "ts": begin, "args": who}], tied
        together[0]["dur"] = end - together[0]["ts"]
        args = {key: row[key] for key in ("step", "slots", "memory_mb", "money", "instance", "lease") if row.get(key) is not None}
        args["kind"] = kind
        name = str(row.get("activity"))
        if row.get("what"):
            args["what"] = row["what"]
        where = {"pid": pid, "tid": tid, "ts": begin, "dur": end - begin}
        together.append({"ph": "X", "cat": "activity", "name": name, **where, "args": args})
    yield from together


def _steps(metrics: Iterable[Row]) -> list[Event]:
    events: list[Event] = []
    floor = 0
    for row in metrics:
        to_s, step_s = finite(row.get("time_s")), finite(row.get("step_s"))
        if to_s is None or step_s is None or step_s < 0:
            continue
        begin = max(floor, round((to_s - step_s) * 1e6))
        floor = max(begin, round(to_s * 1e6))
        args = {key: row[key] for key in STEP_KEYS if row.get(key) is not None}
        name = f"step {row.get('step')}"
        events.append({"ph": "X", "cat": "step", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": floor - begin, "args": args})
    return events


def _counters(rows: list[Row]) -> Iterator[Event]:
    """Yield a stacked counter of leased slots by kind, which changes whenever a row begins or ends."""
    changes: dict[int, dict[str, float]] = {}
    kinds: dict[str, float] = {}
    for row in rows:
        slots = finite(row.get("slots")) or 0.0
        begin, end = _interval(row)
        if slots <= 0:
            continue
        kind = str(row.get("kind"))
        kinds[kind] = 0.0
        for at, delta in ((begin, slots), (end, -slots)):
            change = changes.setdefault(at, {})
            change[kind] = change.get(kind, 0.0) + delta
    for at in sorted(changes):
        moved = {kind: delta for kind, delta in changes[at].items() if delta}
        if not moved:
            continue
        for kind, delta in moved.items():
            kinds[kind] = round(kinds[kind] + delta, 6)
        yield {"ph": "C", "pid": 1, "name": "leased slots", "ts": at, "args": dict(kinds)}
