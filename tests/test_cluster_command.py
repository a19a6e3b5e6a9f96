"""The table of `rlhfless cluster`, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless_ray.cli.cluster_command import kinds_of_nodes, show

COSTS = {"slot_s": 7200.0, "money": 2.0, "today_slot_s": 3600.0, "money_today": 1.0}


def pool(labels: dict[str, dict[str, str]]) -> dict[str, Any]:
    run = {
        **{"name": "mine", "since_s": 60.0, "silent_s": 0.0, "share": None, "priority": 1, "held": 5, "target": 6, "waits": 1},
        **{"slots_by_node": {"a": 2, "b": 3}, "lent_slot_s": 0.0, "borrowed_slot_s": 0.0, "reason": "it bids", **COSTS},
    }
    past = {"name": "before", "lasted_s": 9.0, "ended_s_ago": 3.0, **COSTS}
    nodes = {"a": 4, "b": 8, "c": 8}
    whole = {"resource": "gpu", "slots": 20, "nodes": nodes, "held": 5, "runs": [run], "past": [past], "labels": labels}
    return {**whole, "began_s": 0.0, "handovers": 0, "free_slot_s": 0.0}


def test_a_run_s_slots_are_shown_by_kind_of_node(capsys: pytest.CaptureFixture[str]) -> None:
    show(pool({"a": {}, "b": {"market": "spot"}, "c": {"market": "spot"}}))
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.replace("┃", "│").splitlines()]
    head = next(line for line in lines if "holds" in line)
    spot, other = head.index("on market=spot"), head.index("on other nodes")
    found = {line[1]: (line[spot], line[other]) for line in lines if len(line) == len(head)}
    assert found["mine"] == ("3", "2") and found["all runs"] == ("of 16", "of 4") and found["before"] == ("", "")


def test_nodes_that_are_all_alike_take_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    alike = pool({"a": {"zone": "x"}, "b": {"zone": "x"}})
    assert kinds_of_nodes(alike) == {} == kinds_of_nodes({**alike, "labels": {}})
    show(alike)
    assert "zone" not in capsys.readouterr().out
