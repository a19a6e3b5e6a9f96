"""Small plots for notebooks: what they show, and that nothing in them breaks the page."""

from __future__ import annotations

import xml.dom.minidom
from pathlib import Path

from placement import Objective, Speed, choose, frontier
from placement.scaling.resize_policy import Hold
from rlhfless_ray import RunView
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.report.inline import curves
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.types import Span


def test_curves_are_whole_svg_with_every_line_inside() -> None:
    drawn = curves({"a & b": ([1, 2, 3], [0.5, -2.0, 7.0]), "one": ([2], [1.0]), "none": ([], [])}, y="slot-s", width=300)
    page = xml.dom.minidom.parseString(drawn._repr_html_())
    (line,) = [path for path in page.getElementsByTagName("path") if path.getAttribute("fill") == "none"]
    points = [tuple(map(float, pair.split())) for pair in line.getAttribute("d")[1:].split("L")]
    assert len(points) == 3 and all(0 <= x <= 300 and 0 <= y <= 220 for x, y in points)
    assert points[2][1] < points[0][1] < points[1][1], "larger values stand higher"
    texts = [text.firstChild.data for text in page.getElementsByTagName("text")]
    assert {"a & b", "one", "slot-s", "step"} <= set(texts) and "none" not in texts
    assert curves({}).text == "" and (drawn + drawn).text.count("<svg") == 2


def test_a_plan_shows_its_reason_and_its_frontier() -> None:
    plans = frontier([120, 80, 75, 900], Speed(0.01, 1e-4), max_actors=4)
    best = choose(plans, Objective(prefer=0.5)).plan
    shown = RolloutPlan(Hold(best.actors, "because a < b", plan=best), best.actors, tuple(plans))._repr_html_()
    assert "because a &lt; b" in shown and "chosen" in shown and shown.count("<circle") >= len(plans) + 1
    assert RolloutPlan(Hold(1, "no choice"), 1)._repr_html_().startswith("<p>no choice</p>")


def test_a_ledger_shows_functions_also_of_rows_that_are_on_disk(tmp_path: Path) -> None:
    ledger = Ledger("cpu", 1.0, started_s=0.0)
    for kind, end in (("rollout", 4.0), ("learn", 10.0)):
        ledger.hold("l", "n", "0", kind, kind, since_s=end - 4)
        ledger.spans(["l"], [Span("work", "x", end - 4, end - 1)])
        ledger._close("l", end)
    ledger.append_to(tmp_path / "ledger.csv")
    whole = ledger._repr_html_()
    assert "rollout" in whole and "75%" in whole
    ledger.forget(ledger.count)
    assert not ledger.rows and ledger._repr_html_() == whole


def test_a_run_folder_is_shown_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"reward/mean":0.5,"step_s":2.0}\n{"step":2,"rew')
    (tmp_path / "status.json").write_text('{"status": "running", "steps_done": 1, "steps_total": 9, "reason": ""}')
    shown = RunView.read(tmp_path)._repr_html_()
    assert "running, step 1 of 9" in shown and "<svg" in shown
    assert "unknown, step ? of ?: status.json is missing" in RunView.read(tmp_path / "none")._repr_html_()
