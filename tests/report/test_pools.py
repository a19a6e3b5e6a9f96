"""Pools of nodes in the report: bands of slots, marks of preemptions, and what each pool cost. The ledger is made up."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.report.cost_charts import by_pool
from rlhfless_ray.report.gantt import gantt
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.report import write_report
from rlhfless_ray.report.timeline import trace_events


def row(node: str, device: int, pool: str, from_s: float, to_s: float, activity: str = "work", **more: Any) -> dict[str, Any]:
    about = {"lease": "l", "resource": "gpu", "kind": "rollout", "instance": f"rollout-{node}-{device}", "step": 1, "slots": 1}
    seconds = to_s - from_s
    times = {"from_s": from_s, "to_s": to_s, "seconds": seconds, "memory_mb": 0.0, "money": seconds * (1.0 if pool == "own" else 0.25)}
    return {**about, "node": node, "device": str(device), "activity": activity, **times, "pool": pool, **more}


LEDGER = [
    row("head", 0, "own", 0.0, 10.0),
    row("b", 0, "spot", 0.0, 4.0),
    row("b", 1, "spot", 1.0, 4.0),
    row("b", 0, "spot", 3.5, 4.0, "preempted", slots=0, money=0.0),
    row("b", 1, "spot", 4.0, 4.0, "preempted", slots=0, money=0.0),  # it had left with its notice
    row("a", 0, "large", 2.0, 10.0),
]


def test_slots_of_a_pool_lie_together_with_a_mark_where_an_instance_was_preempted() -> None:
    drawn = gantt(LEDGER, [])
    assert drawn is not None
    assert drawn["lanes"] == ["head gpu 0", "a gpu 0", "b gpu 0", "b gpu 1"], "the run's own nodes first"
    assert drawn["pools"] == [["own", 1], ["large", 1], ["spot", 2]]
    assert drawn["marks"] == [[2, 4000.0, 500.0], [3, 4000.0, 0.0]]
    assert len(drawn["lane"]) == 4, "no lease is drawn twice"
    without = gantt([{key: value for key, value in one.items() if key != "pool"} for one in LEDGER[:3]], [])
    assert without is not None and without["pools"] == [] == without["marks"], "as of earlier ledgers"


def test_each_pool_has_its_money_and_its_lost_work() -> None:
    own, large, spot = by_pool(LEDGER)
    assert own == {"pool": "own", "slot_s": 10.0, "money": 10.0, "preemptions": 0, "lost_s": 0.0}
    assert (large["pool"], large["slot_s"], large["money"]) == ("large", 8.0, 2.0)
    assert spot == {"pool": "spot", "slot_s": 7.0, "money": pytest.approx(1.75), "preemptions": 2, "lost_s": 0.5}
    assert by_pool(LEDGER[:1]) == []


def test_the_timeline_names_pools_and_has_an_instant_for_each_preemption() -> None:
    events = list(trace_events(LEDGER))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["node a (pool large)", "node b (pool spot)", "node head", "run"]
    instants = [event for event in events if event["ph"] == "i"]
    assert [(names[one["pid"]], one["ts"], one["args"]["lost_s"]) for one in instants] == [
        ("node b (pool spot)", 4_000_000, 0.5),
        ("node b (pool spot)", 4_000_000, 0.0),
    ]
    assert sum(event.get("cat") == "activity" for event in events) == 4


def test_the_page_has_a_table_of_the_pools(finished_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    with (folder / "ledger.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(LEDGER[0]))
        writer.writeheader()
        writer.writerows(LEDGER)
    assert RunRecord.read(folder).ledger[0]["pool"] == "own"
    text = write_report(folder).read_text()
    assert "<h3>Pools of nodes</h3>" in text and "<tr><th>own nodes</th><td>10</td>" in text and "<th>spot</th><td>7</td>" in text
    assert "Pools of nodes" not in write_report(finished_run).read_text()
