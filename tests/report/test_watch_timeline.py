from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.timeline import trace_events, write_timeline


def row(kind: str, activity: str, from_s: float, to_s: float, **more: object) -> dict:
    base = {"lease": "l1", "node": "n", "device": 0, "resource": "cpu", "instance": f"{kind}-0", "step": 1, "slots": 1}
    return base | {"kind": kind, "activity": activity, "from_s": from_s, "to_s": to_s, "seconds": to_s - from_s} | more


def complete(events: list[dict], category: str) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def test_the_file_is_a_trace_that_covers_every_second_of_the_ledger(finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run, tmp_path / "run")
    trace = json.loads(write_timeline(folder).read_text())
    events, ledger = trace["traceEvents"], RunRecord.read(folder).ledger
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for entry in ledger:
        seconds[entry["kind"], entry["activity"]] += entry["seconds"]
    drawn: dict[tuple[str, str], float] = defaultdict(float)
    for event in complete(events, "activity"):
        drawn[event["args"]["kind"], event["name"]] += event["dur"] / 1e6
    assert len(complete(events, "activity")) == len(ledger)
    assert set(drawn) == set(seconds)
    for key, value in seconds.items():
        assert drawn[key] == pytest.approx(value, abs=2e-6 * len(ledger))
    assert all(event["dur"] >= 0 and isinstance(event["ts"], int) for event in events if event["ph"] == "X")
    assert len(complete(events, "step")) == len(RunRecord.read(folder).steps)


def test_slices_of_a_track_nest_as_perfetto_needs_it(finished_run: Path) -> None:
    record = RunRecord.read(finished_run)
    tracks = defaultdict(list)
    for event in trace_events(record.ledger, record.metrics):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"], event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    assert tracks
    for (pid, tid, category), spans in tracks.items():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), (pid, tid, category)
        if category == "activity":
            holders = tracks[pid, tid, "holder"]
            assert all(any(h[0] <= a and b <= h[1] for h in holders) for a, b in spans)


def test_every_track_has_a_name_and_parked_memory_has_its_own_process(finished_run: Path) -> None:
    events = list(trace_events(RunRecord.read(finished_run).ledger))
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(processes.values()) == {"run", "node node-a", "node node-b", "parked instances on node-a", "parked instances on node-b"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= set(threads)
    parked = {event["pid"] for event in events if event["name"] == "parked"}
    assert {processes[pid] for pid in parked} == {"parked instances on node-a", "parked instances on node-b"}
    assert "cpu 0" in threads.values() and "rollout-3" in threads.values()


def test_rows_of_one_holder_share_a_slice_and_a_handed_over_slot_begins_a_new_one() -> None:
    events = list(trace_events([row("rollout", "work", 0, 1), row("rollout", "idle", 1, 1.5), row("learn", "work", 1.5, 2)]))
    assert [(h["name"], h["ts"], h["dur"]) for h in complete(events, "holder")] == [
        ("rollout", 0, 1_500_000), ("learn", 1_500_000, 500_000),
    ]  # fmt: skip


def test_the_counter_follows_the_leased_slots() -> None:
    rows = [row("rollout", "work", 0, 2), row("rollout", "work", 0, 1, device=1), row("learn", "work", 1, 2, device=1)]
    rows.append(row("rollout", "parked", 1, 2, slots=0))
    counters = [(event["ts"], event["args"]) for event in trace_events(rows) if event["ph"] == "C"]
    assert counters == [
        (0, {"rollout": 2, "learn": 0}), (1_000_000, {"rollout": 1, "learn": 1}), (2_000_000, {"rollout": 0, "learn": 0}),
    ]  # fmt: skip


def test_overlapping_rows_are_on_threads_of_their_own() -> None:
    events = list(trace_events([row("learn", "work", 0, 2), row("score", "work", 1, 3)]))
    assert len({event["tid"] for event in complete(events, "activity")}) == 2  # overlapping slices on one thread would be lost


def test_a_folder_without_ledger_gives_an_empty_trace(tmp_path: Path) -> None:
    assert not [e for e in json.loads(write_timeline(tmp_path).read_text())["traceEvents"] if e["ph"] == "X"]


def test_a_step_shows_the_time_of_each_phase() -> None:
    phases = {f"phase/{name}_s": 0.5 for name in ("lease", "prefill", "rollout", "score", "learn", "publish", "eval", "driver")}
    (step,) = complete(list(trace_events([], [{"step": 1, "time_s": 9.0, "step_s": 4.0, "length/mean": 3.0, **phases}])), "step")
    assert step["args"] == phases
