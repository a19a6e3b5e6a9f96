"""Write the report: one HTML file made from a run folder, which works without a network and after a crash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report import charts, cost_charts, draft_charts, plan_charts, prefix_charts, summary
from rlhfless_ray.report.charts import Chart, thin
from rlhfless_ray.report.formatting import duration, money, number, percent
from rlhfless_ray.report.gantt import gantt
from rlhfless_ray.report.read_run import RunRecord

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = Path(__file__).parent / "page"


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder, complete or not, and return its path.

    Missing or incomplete files become sentences in the report. Raises FileNotFoundError if the folder does not exist.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"run folder {folder}: no such folder")
    record = RunRecord.read(folder)
    steps = record.steps
    drawn = thin(steps)
    learning = learning_charts(record)
    planning = _present(
        plan_charts.pool(steps),
        plan_charts.frontier(steps),
        *plan_charts.plans(steps),
        plan_charts.calls(steps),
        plan_charts.calibration(steps),
        charts.forecast(drawn),
        *charts.line_charts("calibration", drawn),
        draft_charts.drafts(steps),
        draft_charts.drafts_within(steps),
        draft_charts.drafter(steps),
    )
    prefix = _present(prefix_charts.tokens(drawn), prefix_charts.saved(drawn), prefix_charts.break_even(steps))
    health, constant = charts.health(drawn)
    if record.is_supervised:  # its loss is shown above, and it has no plans
        health, planning = [chart for chart in health if chart.id != "learn-loss"], []
    table = cost_charts.by_kind(record.ledger)
    cost = _present(cost_charts.cost(table))
    phases = _present(cost_charts.phases(steps))
    samples = summary.sample_picks(record)  # before `record.problems` is used, because reading samples may add to it
    every = [*learning, *planning, *prefix, *health, *cost, *phases]
    leases = gantt(record.ledger, steps)
    return write_page(
        folder,
        "report.html.j2",
        every,
        leases,
        **summary.header(record),
        cards=summary.cards(record),
        warnings=summary.warnings(record),
        supervised=record.is_supervised,
        problems=record.problems,
        learning=learning,
        planning=planning,
        accuracy_table=plan_charts.accuracy_table(steps),
        calls_table=plan_charts.calls_table(steps),
        prefix=prefix,
        prefix_said=prefix_charts.sentences(steps) if prefix else [],
        health=health,
        constant=constant,
        cost=cost,
        cost_table=table,
        pool_table=cost_charts.by_pool(record.ledger),
        full_cost=sum(sum(cells.values()) for cells in table.values()),
        activities=cost_charts.ACTIVITIES,
        phases=phases,
        phase_table=cost_charts.phase_table(steps),
        memory_table=cost_charts.memory_table(steps),
        memory_settings=cost_charts.memory_settings(steps),
        samples=samples,
        recipe=record.recipe,
    )


def learning_charts(record: RunRecord) -> list[Chart]:
    """Return the run's learning curves, without those that it has no data for."""
    if record.is_supervised:
        return charts.line_charts("stage", record.metrics)
    return _present(
        charts.reward(thin(record.steps)),
        charts.accuracy(record.metrics),
        charts.lengths(record.steps),
        charts.histogram(summary.length_groups(record)),
        charts.lag(record.steps),
    )


def write_page(folder: Path, template: str, drawn: Sequence[Chart], leases: JsonObject | None = None, **values: object) -> Path:
    """Write `report.html`, a page with its charts and the scripts that draw them, and return its path.

    `leases`: data of the lease timeline, if the page has one.
    """
    text = _template(template).render(
        **values,
        leases=leases,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        css=(PAGE / "report.css").read_text(encoding="utf-8"),
        scripts=[(PAGE / name).read_text(encoding="utf-8") for name in ("gantt.js", "report.js")],
        charts_json=_json({chart.id: {"data": chart.data, "layout": chart.layout, "height": chart.height} for chart in drawn}),
        leases_json=_json(leases),
        plotly=_plotly() if drawn else "",
    )
    path = folder / "report.html"
    replace_file(path, text.encode())
    return path


@cache
def _template(name: str) -> Template:
    """Compile a page's template once per process: compiling takes half the time of a short run's report."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": duration, "money": money, "number": number, "percent": percent}
    return environment.get_template(name)


def _present(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _json(value: object) -> str:
    """Encode as JSON that cannot close the script element which contains it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _plotly() -> str:
    """Return plotly.js (4.8 MB), with an escaped `h` in the web addresses of its map code.

    JavaScript reads the strings unchanged, and a search for external links in a report finds none.
    """
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    for quote in ('"', "'"):
        for attribute in ("href", "src"):
            source = source.replace(f"{attribute}={quote}http", f"{attribute}={quote}\\x68ttp")
    return source.replace("</script", "<\\/script")
