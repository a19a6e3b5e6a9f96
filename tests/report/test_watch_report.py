from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import write_synthetic_run

from rlhfless_ray.report import charts, cost_charts, plan_charts, prefix_charts
from rlhfless_ray.report.formatting import duration, money, number, percent, short, slot_time
from rlhfless_ray.report.gantt import MAX_SEGMENTS, gantt
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.report import learning_charts, write_report
from rlhfless_ray.report.summary import _price, cards, sample_picks, warnings
from rlhfless_ray.report.workflow_report import _evaluation
from rlhfless_ray.sweep.sweep_folder import RunState
from rlhfless_ray.sweep.sweep_report import _curves


class Page(HTMLParser):
    """What a browser would see: text outside scripts, the scripts, and every attribute."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.scripts, self.attributes, self.open = "", [], [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, *pair) for pair in attrs]
        self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1][0] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "script":
            self.scripts.append((self.open[-1][1], data))
        elif not (self.open and self.open[-1][0] == "style"):
            self.text += data

    def json(self, name: str) -> Any:
        return json.loads("".join(data for given, data in self.scripts if given == name))


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


@pytest.fixture(scope="module")
def page(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(shutil.copytree(finished_run, tmp_path_factory.mktemp("report") / "run"))


def test_key_figures_come_from_the_run(page: Page, finished_run: Path) -> None:
    record = RunRecord.read(finished_run)
    shown = {card["label"]: card["value"] for card in cards(record)}
    leased = [row for row in record.ledger if row["activity"] != "parked"]
    assert shown["Accuracy, sampled"] == f"37.0% → {100 * record.metrics[-1]['eval/accuracy_sampled']:.1f}%"
    assert shown["Steps"] == "24 of 24"
    assert shown["Full cost"] == slot_time(sum(row["seconds"] for row in leased))
    assert shown["Busy cost"] == slot_time(sum(row["seconds"] for row in leased if row["activity"] == "work"))
    assert shown["Money"] == money(sum(row["money"] for row in record.ledger))
    for label, value in shown.items():
        assert label in page.text and value in page.text


def test_a_reward_that_is_no_accuracy_is_a_number_not_a_percentage(finished_run: Path) -> None:
    record = RunRecord.read(finished_run)
    for row, (sampled, greedy) in zip(record.metrics[::24], ((-3.1, -3.9), (-2.66, -2.7)), strict=True):
        row |= {"eval/accuracy_sampled": sampled, "eval/accuracy_greedy": greedy}
    rows = [{k: v for k, v in row.items() if i in (0, 24) or "accuracy" not in k} for i, row in enumerate(record.metrics)]
    record.metrics[:] = rows
    shown = {card["label"]: (card["value"], card["under"]) for card in cards(record)}
    assert shown["Held-out reward, sampled"] == ("-3.1 → -2.66", "+0.44, step 0 to 24")
    assert not [label for label in shown if "Accuracy" in label]
    chart = charts.accuracy(rows)
    assert chart is not None and chart.title == "Reward on held-out prompts" and "tickformat" not in chart.layout["yaxis"]


@pytest.mark.parametrize(
    ("runs", "lent", "shown"),
    [
        ([3], [12.5], "12.5 slot-s / 4 slot-s"),
        ([2, 2, 1], [5.0, 12.5, 12.5], "12.5 slot-s / 4 slot-s"),  # the other run has ended
        ([2, 2, 2], [10.0, 0.0, 2.5], "12.5 slot-s / 4 slot-s"),  # it was resumed after its first step
        ([1], [0.0], None),
    ],
)
def test_a_run_that_shared_a_cluster_says_what_it_lent_and_borrowed(
    tmp_path: Path, runs: list[int], lent: list[float], shown: str | None
) -> None:
    told = [
        {"step": k + 1, "shared/runs": n, "shared/lent_slot_s": x, "shared/borrowed_slot_s": 4.0}
        for k, (n, x) in enumerate(zip(runs, lent, strict=True))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    found = {card["label"]: card["value"] for card in cards(RunRecord.read(tmp_path))}
    assert found.get("Lent / borrowed") == shown


def test_every_chart_has_data_and_a_place_on_the_page(page: Page, finished_run: Path) -> None:
    figures = page.json("charts")
    places = {value for tag, key, value in page.attributes if key == "data-chart"}
    assert places == set(figures)
    expected = {"reward", "accuracy", "lengths", "histogram", "pool", "plan", "forecast", "cost", "phases", "learn-grad_norm"}
    assert expected <= set(figures)
    assert not {name for name in figures if name.startswith("supervised")}  # its loss says nothing about what a policy learns
    assert "Loss" not in {card["label"] for card in cards(RunRecord.read(finished_run))}
    for name, figure in figures.items():
        assert figure["data"], name
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in figure["data"]), name
    means = [row["reward/mean"] for row in RunRecord.read(finished_run).steps]
    assert figures["reward"]["data"][0]["y"] == pytest.approx(means, rel=1e-4)
    assert any("Grow: " in text for text in figures["pool"]["data"][0]["customdata"])


def test_an_evaluation_is_no_part_of_the_planned_rollout() -> None:
    """Its engines hold leases of the same kind, so its step would look like a plan that went wrong."""
    frontier = {"plan/frontier_time_s": [1.0], "plan/frontier_cost_slot_s": [1.0], "plan/frontier_actors": [1]}
    planned = {"plan/rollout_s": 1.0, "plan/cost_slot_s": 1.0, "phase/rollout_s": 1.0, **frontier}
    rows = [{"step": n, **planned, "cost/rollout_slot_s": 1.0} for n in (1, 2)]
    rows.append({"step": 3, **planned, "cost/rollout_slot_s": 3.0, "phase/eval_s": 2.0})
    (cost,) = [chart for chart in plan_charts.plans(rows) if chart.id == "plan-cost"]
    found = plan_charts.frontier(rows)
    assert [trace["x"] for trace in cost.data] == [[1, 2], [1, 2]]
    assert found is not None and found.title == "The frontier of step 2"
    only = plan_charts.frontier(rows[2:])
    assert only is not None and only.title == "The frontier of step 3"


def test_the_calls_of_the_newest_plan_are_shown_beside_what_they_took(finished_run: Path, tmp_path: Path) -> None:
    plans = [[["values", 1, 0.0, 1.0, 0.0, 1.5], ["critic update", 2, 1.0, 3.0, 1.6, 3.6]], [["values", 1, 0.0, 1.0, 0.0, 1.1]]]
    rows = [{"step": n, **({"plan/calls": plans[n]} if n < 2 else {})} for n in range(3)]
    chart = plan_charts.calls(rows)
    assert chart is not None and "in step 1" in chart.note
    measured, planned = chart.data
    assert (measured["x"], measured["y"], measured["base"]) == ([1.1], ["values"], [0.0])
    assert (planned["x"], planned["customdata"]) == ([1.0], ["values on 1, planned: 1 s"])
    (row,) = plan_charts.calls_table(rows)
    assert row == {"name": "values", "slots": 1, "planned_s": 1.0, "measured_s": 1.1, "error": pytest.approx(0.3)}
    assert plan_charts.calls(rows[2:]) is None and plan_charts.calls_table(rows[2:]) == []
    folder = shutil.copytree(finished_run, tmp_path / "run")
    assert "The plan of the learn phase" not in page_of(folder).text
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"plan/calls": plans[0]})]) + "\n")
    assert "The plan of the learn phase" in page_of(folder).text


def test_the_page_says_how_good_forecasts_were(finished_run: Path, tmp_path: Path) -> None:
    """A table of each quantity, a sentence below each chart, and the calibration curve. Runs of earlier versions have none of it."""
    folder = shutil.copytree(finished_run, tmp_path / "run")
    assert "How good predictions were" not in page_of(folder).text
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    good = {"records": 24, "bias": 0.021, "median_error": 0.07, "coverage_50": 0.5, "coverage_90": 0.92}
    for name in ("rollout", "score", "pause of a move by pages"):
        rows[-1] |= {f"accuracy/{name}/{figure}": value for figure, value in good.items()}
        rows[-1][f"accuracy/{name}/deciles"] = [0.0] * 5 + [0.2] * 5  # all measurements in the upper half
        rows[-1]["forecast/pit_deciles"] = [0.1] * 10
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(folder)
    for words in ("rollout time", "scoring", "pause of a move by pages", "+2.1 %", "7.0%", "92%"):
        assert words in page.text, words
    assert "Plans were 2% high in all, with a median error of 7%; 92% of the steps were inside the 90 % interval." in page.text
    drawn = {trace["name"]: trace for trace in page.json("charts")["quantiles"]["data"]}
    assert drawn["rollout time"]["y"] == pytest.approx([0.0] * 6 + [0.2, 0.4, 0.6, 0.8, 1.0])
    assert drawn["response lengths"]["y"] == pytest.approx([k / 10 for k in range(11)])


def test_prefix_kv_is_told_step_by_step_with_the_break_even(page: Page, finished_run: Path) -> None:
    rows = RunRecord.read(finished_run).steps
    on = [row for row in rows if row["prefix/on"]]
    assert 0 < len(on) < len(rows)
    assert f"On in {len(on)} of {len(rows)} steps. Step {rows[-1]['step']}: {rows[-1]['prefix/reason']}." in page.text
    assert "with their KV pages" in page.text and "still had to be computed again" in page.text
    figures = page.json("charts")
    by_name = {trace["name"]: trace for trace in figures["prefix-saved"]["data"]}
    assert by_name["expected, on"]["x"] == [row["step"] for row in on] == by_name["measured"]["x"]
    assert by_name["expected, left off"]["x"] == [row["step"] for row in rows if not row["prefix/on"]]
    assert "engine-s of prefill" in by_name["expected, on"]["customdata"][0].replace("<br>", " ")
    shared, needed = figures["prefix-even"]["data"]
    assert shared["y"] == [row["prefix/header_tokens"] for row in rows]
    assert needed["x"] == [row["step"] for row in rows if row["prefix/break_even_tokens"] is not None]
    assert {trace["name"] for trace in figures["prefix-tokens"]["data"]} == {
        "asked",
        "computed if off",
        "distinct",
        "computed once",
        "loaded",
    }


def test_without_a_decision_on_prefix_kv_there_is_no_section(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "run", 5)
    path = folder / "metrics.jsonl"
    path.write_text(re.sub(r', "prefix/[a-z_]+": ("[^"]*"|[-\d.e]+|null)', "", path.read_text()))
    page = page_of(folder)
    assert "Prefix KV" not in page.text and not [name for name in page.json("charts") if name.startswith("prefix")]


def test_what_stays_constant_is_said_instead_of_drawn(page: Page) -> None:
    assert "KL to the reference: 0 throughout" in page.text
    assert "learn-kl" not in page.json("charts")


def test_warnings_name_the_steps(page: Page, finished_run: Path) -> None:
    failed = sum(row["reward/failed"] for row in RunRecord.read(finished_run).steps)
    assert f"{failed} sample{'s' * (failed != 1)} in step 17 could not be scored" in page.text
    assert "1 optimizer step skipped in step 23" in page.text
    assert "1 instance died and was replaced in step 12" in page.text


def test_a_planner_that_failed_is_a_warning_with_its_reason(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "run", 6)
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["step"] == 4:
            row["plan/failed"], row["pool/reason"] = True, "the planner failed; the last good plan is kept: 2 actors"
            row["plan/trouble"] = "planning engines failed (ValueError: odd)"
        if row["step"] == 5:
            row["plan/trouble"] = "the forecast failed (KeyError: 7)"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {warning["title"]: warning["text"] for warning in warnings(RunRecord.read(folder))}["Planning failed"]
    assert "In steps 4, 5;" in found and "ValueError: odd" in found


def test_a_run_without_trouble_says_so(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "run", 5)
    assert [warning["title"] for warning in warnings(RunRecord.read(folder))] == ["Replaced instances"]
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"faults/replaced": 1', '"faults/replaced": 0'))
    assert "None: no failed rewards" in page_of(folder).text


def test_lease_timeline_holds_every_leased_second(page: Page, finished_run: Path) -> None:
    leases, record = page.json("leases"), RunRecord.read(finished_run)
    assert leases["lanes"] == ["node-a cpu 0", "node-a cpu 1", "node-b cpu 0", "node-b cpu 1"]
    spans = [to - begin for begin, to in zip(leases["from"], leases["to"], strict=True)]
    assert sum(spans) / 1000 == pytest.approx(sum(row["seconds"] for row in record.ledger), rel=2e-3)
    assert [step for step, *_ in leases["steps"]] == [row["step"] for row in record.steps]


def test_money_for_parked_memory_is_told_apart(finished_run: Path) -> None:
    record = RunRecord.read(finished_run)
    assert "parked" not in _price(record)
    for row in record.ledger:
        if row["activity"] == "parked":
            row["money"] = 0.001
    count = sum(row["activity"] == "parked" for row in record.ledger)
    assert _price(record).endswith(f"; {money(0.001 * count)} of it for the memory of parked processes")


def test_costs_by_kind_leave_parked_memory_out(finished_run: Path) -> None:
    ledger = RunRecord.read(finished_run).ledger
    table = cost_charts.by_kind(ledger)
    assert list(table) == ["rollout", "score", "learn", "eval", "warm_start"]
    assert "parked" not in table["rollout"]
    assert sum(sum(cells.values()) for cells in table.values()) == pytest.approx(sum(r["seconds"] for r in ledger if r["slots"]))


def test_nothing_is_loaded_from_the_network(page: Page, finished_run: Path, tmp_path: Path) -> None:
    html = write_report(shutil.copytree(finished_run, tmp_path / "run")).read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", html)
    assert not [pair for pair in page.attributes if pair[1] in ("src", "href", "action", "srcset")]
    assert "@import" not in html and "plotly.js v" in html
    assert len(html.encode()) < 8e6


def test_samples_show_best_worst_and_failed(page: Page, finished_run: Path) -> None:
    groups = sample_picks(RunRecord.read(finished_run))
    assert groups[0]["step"] == 1 and groups[-1]["step"] == 24
    labels = {group["step"]: [row["label"] for row in group["rows"]] for group in groups}
    assert "failed" in labels[17] and all(set(names) >= {"best", "worst"} for names in labels.values())
    best = groups[0]["rows"][0]
    assert best["reward"] == "1" and best["response"] in page.text
    assert "reward function took longer than 10 s" in page.text


def test_text_of_the_run_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--"
    folder = write_synthetic_run(tmp_path / "run", 6, hostile=evil)
    (folder / "recipe.yaml").write_text(f"run: {{name: '{evil}'}}\n")
    (folder / "status.json").write_text(json.dumps({"status": evil, "reason": evil, "machine": evil, "versions": {evil: evil}}))
    html = write_report(folder).read_text()
    page = Page(html)
    assert "<img" not in html and "<script>alert" not in html
    assert evil in page.text  # it is there, as text
    assert not [tag for tag, key, value in page.attributes if key == "onerror"]
    assert "alert(1)" in "".join(page.json("charts")["pool"]["data"][0]["customdata"])
    assert "<script>" not in "".join(page.json("charts")["pool"]["data"][0]["customdata"])  # plotly reads tags in hover texts


def test_a_crashed_run_gives_a_report_that_says_what_is_torn(finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run, tmp_path / "run")
    for name in ("metrics.jsonl", "ledger.csv", "samples/step_24.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-40])
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"status": "running", "ended_at": None}))
    page = page_of(folder)
    for name in ("metrics.jsonl", "samples/step_24.jsonl"):
        assert f"{name}: 1 line is not whole and left out" in page.text
    number = len((folder / "ledger.csv").read_bytes().splitlines())
    assert f"ledger.csv: line {number} not whole and left out" in page.text and "metrics.jsonl has no row of step 24." in page.text
    assert "it is still working, or it crashed" in page.text
    assert page.json("charts")["reward"]["data"][0]["x"] == list(range(1, 24))


def test_a_quote_that_is_never_closed_takes_no_other_row(finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run, tmp_path / "run")
    whole = RunRecord.read(folder).ledger
    lines = (folder / "ledger.csv").read_text().splitlines()
    lines[3] = '"' + "x" * 200_000  # longer than the csv module takes
    (folder / "ledger.csv").write_text("\n".join(lines) + "\n")
    record = RunRecord.read(folder)
    assert len(record.ledger) == len(whole) - 1 and record.problems == ["ledger.csv: line 4 not whole and left out, as after a crash."]


def test_an_empty_folder_gives_sentences_and_no_charts(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    for name in ("status.json", "recipe.yaml", "metrics.jsonl", "ledger.csv"):
        assert f"{name} is missing" in page.text
    assert "no files in samples/" in page.text
    assert page.json("charts") == {} and page.json("leases") is None


@pytest.mark.parametrize("broken", ["", "{", "[]", "null", "\x00\xff", "step\n", "a,b\n1,2\n"])
def test_garbage_in_every_file_is_survived(broken: str, finished_run: Path, tmp_path: Path) -> None:
    for name in ("status.json", "recipe.yaml", "metrics.jsonl", "ledger.csv", "samples/step_24.jsonl"):
        folder = shutil.copytree(finished_run, tmp_path / name.replace("/", "-"))
        (folder / name).write_text(broken)
        write_report(folder)


def test_metrics_with_holes_are_drawn_where_they_are_known(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/mean": None}, {"step": 2, "reward/mean": 0.5, "learn/kl": "text"}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = page_of(tmp_path).json("charts")
    assert list(figures) == ["reward"] and figures["reward"]["data"][0]["x"] == [2]


def test_a_repeated_step_counts_once_with_its_last_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"a":1}\n{"step":2,"a":2}\n{"step":2,"a":3}\n')
    assert [row["a"] for row in RunRecord.read(tmp_path).metrics] == [1, 3]


def test_what_a_stop_made_the_run_pay_twice_is_said(finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run, tmp_path / "run")
    header, *lines = (folder / "ledger.csv").read_text().splitlines()
    again = [line for line in lines if line.split(",")[7] == "24" and line.split(",")[6] != "parked"]
    shifted = [f"{line},1" for line in again]
    (folder / "ledger.csv").write_text("\n".join([f"{header},repeated", *(f"{line},0" for line in lines), *shifted]) + "\n")
    spent = slot_time(sum(float(line.split(",")[10]) for line in again))
    page = page_of(folder)
    assert f"{spent} of the full cost was spent on steps that were interrupted" in page.text
    before = gantt(RunRecord.read(finished_run).ledger, [])
    assert page.json("leases")["steps"] and gantt(RunRecord.read(folder).ledger, [])["steps"] == before["steps"]


def test_phases_add_up_to_the_step_and_waiting_for_leases_is_counted_once(page: Page, finished_run: Path) -> None:
    steps = RunRecord.read(finished_run).steps
    figure = page.json("charts")["phases"]
    stacked = [sum(trace["y"][i] for trace in figure["data"]) for i in range(len(steps))]
    assert stacked == pytest.approx([row["step_s"] for row in steps], rel=1e-3)
    assert "This includes waiting for leases" in page.text
    assert sum(row["share"] for row in cost_charts.phase_table(steps)) == pytest.approx(1)
    assert {row["phase"] for row in cost_charts.phase_table(steps)} == {"rollout", "score", "learn", "publish", "eval", "driver"}


@pytest.mark.parametrize(("count", "each"), [(80, 1), (81, 2), (100, 2), (1000, 13)])
def test_bars_of_phases_stand_at_equal_distances(count: int, each: int) -> None:
    chart = cost_charts.phases([{"step": i, "phase/learn_s": 1.0 * i} for i in range(1, count + 1)])
    assert chart is not None
    xs, ys = chart.data[0]["x"], chart.data[0]["y"]
    assert len(xs) <= 80 and xs[0] == (1 + each) / 2
    assert {b - a for a, b in itertools.pairwise(xs[:-1])} <= {each}
    assert ys == pytest.approx(xs, rel=1e-4), "a bar stands over the middle of its steps"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_report(tmp_path / "nowhere")


def test_long_runs_are_thinned() -> None:
    rows = [{"step": i, "a": float(i), "x/max": float(i % 7), "text": str(i)} for i in range(1, 10_001)]
    thinned = charts.thin(rows, 100)
    assert len(thinned) == 100 and thinned[0] == {"step": 100, "a": 50.5, "x/max": 6.0, "text": "100"}
    ledger = [
        {"node": "n", "device": d, "resource": "cpu", "kind": ("rollout", "learn")[i % 2], "activity": "work",
         "instance": "i",
         "step": i // 2, "from_s": i * 0.5, "to_s": i * 0.5 + (0.4 if i % 2 else 0.5), "seconds": 0.5, "slots": 1}
        for d in range(4) for i in range(20_000)
    ]  # fmt: skip
    drawn = gantt(ledger, [])
    assert drawn is not None and len(drawn["from"]) <= MAX_SEGMENTS + 4
    assert drawn["merged_ms"] and len(json.dumps(drawn)) < 2e6


def test_what_few_steps_have_is_drawn_of_long_runs() -> None:
    rows = [{"step": i, "reward/mean": 0.5, **({"eval/accuracy_sampled": i / 1000} if i % 10 == 0 else {})} for i in range(1001)]
    assert charts.series(charts.thin(rows), "eval/accuracy_sampled")[1] == pytest.approx([i / 1000 for i in range(0, 1001, 10)])
    chart = _curves([(RunState("run"), rows)], "eval/accuracy_sampled", "accuracy", "steps")
    assert chart is not None and chart.data[0]["x"] == list(range(0, 1001, 10))


def test_notes_count_the_steps_of_long_runs() -> None:
    """The steps that are drawn are fewer."""
    rows = [{"step": i, "length/mean": 9.0} for i in range(1, 5001)]
    rows = [row | {"prefix/asked_tokens": 1, "prefix/header_tokens": 16, "prefix/break_even_tokens": None} for row in rows]
    lengths = next(chart for chart in learning_charts(RunRecord(Path("run"), metrics=rows)) if chart.id == "lengths")
    even = prefix_charts.break_even(rows)
    assert "the mean of about 42 steps" in lengths.note
    assert even is not None and "In 5000 of 5000 steps" in even.note
    stage = [{"step": i, "learn/loss": 1.0, "eval/loss": 1.0 if i % 100 == 0 else None} for i in range(5001)]
    (loss,) = charts.line_charts("stage", stage)
    assert loss.data[1]["x"] == list(range(0, 5001, 100))
    assert all(len(trace["x"]) <= charts.MAX_POINTS for chart in (lengths, even, loss) for trace in chart.data)


def test_a_failed_evaluation_is_not_said_to_run(tmp_path: Path) -> None:
    for name, status in (("a", "done"), ("b", "failed")):
        write_synthetic_run(tmp_path / "test" / name, 2)
        (tmp_path / "test" / name / "status.json").write_text(json.dumps({"status": status}))
    assert _evaluation(tmp_path, "test").state == "failed"
    (tmp_path / "test" / "b" / "status.json").write_text('{"status": "done"}')
    assert _evaluation(tmp_path, "test").state == "running"


def test_numbers_read_well() -> None:
    assert [number(x) for x in (0, 0.00123, 4.56, 1234.5, 1.2e-7, None, float("nan"))] == [
        "0", "0.00123", "4.56", "1,234", "1.2e-7", "–", "–",
    ]  # fmt: skip
    assert [duration(x) for x in (0.416, 12.34, 200, 7500, 1e5)] == ["0.42 s", "12.3 s", "3 min 20 s", "2 h 05 min", "1 d 3 h"]
    assert [slot_time(x) for x in (12.34, 36_000)] == ["12.3 slot-s", "10 slot-h"]
    assert [short(x) for x in (950, 12_345, 4_560_000)] == ["950", "12.3 k", "4.56 M"]
    assert (percent(0.1234), money(0.00164), money(1234.5)) == ("12.3%", "0.00164", "1,234.50")


def test_drafts_by_source_and_what_they_saved() -> None:
    from rlhfless_ray.report.draft_charts import drafts

    names = ("drafted", "drafts_accepted", "model_drafts_accepted", "drafts_saved_s", "engine_steps")
    rows = [
        {"step": step, **{f"rollout/{name}": value for name, value in zip(names, values, strict=True)}}
        for step, values in enumerate([(100, 60, 20, 30.0, 50), (0, 0, 0, -5.0, 50)], 1)
    ]
    chart = drafts(rows)
    assert chart is not None and "drafts saved 25" in chart.note
    assert {trace["name"]: trace["y"] for trace in chart.data} == {
        "accepted, from text": [0.8, 0.0],
        "accepted, from the drafter": [0.4, 0.0],
        "drafted in vain": [0.8, 0.0],
    }
    assert drafts(rows[1:]) is None and drafts([{"step": 1}]) is None


def test_drafts_by_the_sequences_that_are_left() -> None:
    from rlhfless_ray.report.draft_charts import drafts_within
    from rlhfless_ray.rollout.rollout_result import drafts_by_band
    from rlhfless_ray.types import EngineStep

    first = [EngineStep(40, 40, 0, 1.0, 10, 4), EngineStep(40, 40, 0, 1.0), EngineStep(4, 4, 0, 1.0, 6, 5, by_model=(3, 2))]
    rows = [{"step": k, **drafts_by_band(steps)} for k, steps in enumerate([first, [EngineStep(1, 1, 0, 1.0, 8, 8)]], 1)]
    chart = drafts_within(rows)
    assert chart is not None
    assert {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in chart.data} == {
        "accepted, from text": {"17 and more": 2.0, "2 to 4": 3.0, "1": 8.0},
        "accepted, from the drafter": {"17 and more": 0.0, "2 to 4": 2.0, "1": 0.0},
        "drafted in vain": {"17 and more": 3.0, "2 to 4": 1.0, "1": 0.0},
    }
    assert drafts_within([{"step": 1}]) is None


def test_the_training_of_a_drafter() -> None:
    from rlhfless_ray.report.draft_charts import drafter

    trained = {"drafter/updates": 5, "drafter/train_s": 1.5, "drafter/version": 2, "drafter/kl": 0.7}
    rows = [
        {"step": 1, "rollout/model_drafted": 0, "rollout/model_drafts_accepted": 0, **trained},
        {"step": 2, "rollout/model_drafted": 40, "rollout/model_drafts_accepted": 10},
    ]
    chart = drafter(rows)
    assert chart is not None and "5 updates in 1.50 s" in chart.note and "up to 2 versions" in chart.note
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in chart.data} == {
        "accepted share of its tokens": ([2], [0.25]),
        "log p of policy − drafter, nats": ([1], [0.7]),
    }
    assert drafter(rows[1:]) is None


def test_the_age_of_tokens_is_drawn_where_a_run_has_a_lag() -> None:
    old = [0.0, 0.4, 0.5]
    rows = [{"step": k + 1, "lag/old_share": x, "lag/share_0": 1 - x, "lag/share_1": x, "lag/share_2": 0.0} for k, x in enumerate(old)]
    rows = [row | {"learn/effective_share": 1 - 0.1 * row["lag/share_1"], "lag/kl_1": 0.01 * row["step"]} for row in rows]
    chart = charts.lag(rows)
    assert chart is not None
    drawn = {trace["name"]: trace for trace in chart.data}
    assert list(drawn) == ["1 version old", "newest version", "effective sample size", "KL, 1 version"]  # nothing is 2 versions old
    assert drawn["newest version"]["y"] == [1.0, 0.6, 0.5] and drawn["1 version old"]["y"] == old
    assert drawn["newest version"]["stackgroup"] == drawn["1 version old"]["stackgroup"]
    assert drawn["effective sample size"]["y"] == [1.0, 0.96, 0.95] and drawn["KL, 1 version"]["yaxis"] == "y2"
    rows[1] |= {"partial/weights_wait_s": 0.2, "partial/weights_reason": "old weights to the end"}
    waited = charts.lag(rows)
    assert (
        waited is not None
        and " In 1 of 3 steps engines went on " in waited.note
        and waited.note.endswith("step 2: old weights to the end.")
    )
    assert charts.lag([row | {"lag/old_share": 0.0} for row in rows]) is None  # such a run has no lag, whatever its bound
    assert charts.lag([{"step": 1}]) is None
