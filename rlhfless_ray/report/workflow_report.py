"""The report of a workflow: one page over all stages, made from their run folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report import summary
from rlhfless_ray.report.charts import Chart
from rlhfless_ray.report.formatting import duration, finite
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.report import learning_charts, write_page

SHOWN_CHARTS = 2  # charts of each stage; the others are in its own report


@dataclass(frozen=True)
class StageSection:
    """A stage on the page. `table`: heading and rows of an evaluation."""

    name: str
    kind: str
    state: str
    seconds: float = 0.0
    slot_s: float = 0.0
    money: float = 0.0
    cards: Sequence[JsonObject] = ()
    charts: Sequence[Chart] = ()
    table: Sequence[list[str]] = ()
    link: str = ""

    @property
    def cells(self) -> list[str]:
        costs = (f"{self.slot_s:,.0f}", f"{self.money:.4f}") if self.slot_s else ("", "")
        return [self.kind, self.state, duration(self.seconds) if self.seconds else "", *costs]


def write_workflow_report(folder: Path, stages: Sequence[tuple[str, str]]) -> Path:
    """Write `report.html` into the workflow's folder. `stages`: name and kind of each, in order."""
    sections = [_evaluation(folder, name) if kind == "evaluate" else _stage(folder, name, kind) for name, kind in stages]
    states = [section.state for section in sections]
    done = states.count("done")
    state = "done" if done == len(states) else next((s for s in states if s not in ("done", "waiting")), "running")
    sums = [sum(getattr(section, key) for section in sections) for key in ("seconds", "slot_s", "money")]
    return write_page(
        folder,
        "workflow.html.j2",
        [chart for section in sections for chart in section.charts],
        name=folder.name,
        state=state,
        sentence=f"{done} of {len(states)} stages are done, in {duration(sums[0])} and {sums[1]:,.0f} slot-seconds.",
        sections=sections,
        total=[duration(sums[0]), f"{sums[1]:,.0f}", f"{sums[2]:.4f}"],
    )


def _stage(folder: Path, name: str, kind: str) -> StageSection:
    if not (folder / name).is_dir():
        return StageSection(name, kind, "waiting")
    record = RunRecord.read(folder / name)
    last = record.metrics[-1] if record.metrics else {}
    seconds = max([row["to_s"] for row in record.ledger], default=0.0)
    slot_s, money = (finite(last.get(f"cost/total_{key}")) or 0.0 for key in ("full_slot_s", "money"))
    charts = [replace(chart, id=f"{name}-{chart.id}") for chart in learning_charts(record)[:SHOWN_CHARTS]]
    link = f"{name}/report.html" if (folder / name / "report.html").is_file() else ""
    state = str(record.status.get("status", "unknown"))
    return StageSection(name, kind, state, seconds, slot_s, money, summary.cards(record)[:3], charts, link=link)


def _evaluation(folder: Path, name: str) -> StageSection:
    runs = [path.parent for path in (folder / name).glob("*/status.json")]
    parts = [_stage(folder / name, run.name, "generate") for run in runs]
    try:
        result = json.loads((folder / name / "evaluation.json").read_text())
    except (OSError, ValueError):
        result = {}
    rows = [["model", "data", "prompts", "mean", "pass@k", "difference", "length"]]
    for score in result.get("scores", []):
        best = ", ".join(f"{k}: {value:.3f}" for k, value in score["pass_at"].items())
        mean, change = (f"{score[a]:.3f} ± {score[b]:.3f}" for a, b in (("mean", "error"), ("difference", "difference_error")))
        rows.append([score["model"], score["data"], str(score["prompts"]), mean, best, change, f"{score['length_mean']:.1f}"])
    seconds, slot_s, money = (sum(getattr(part, key) for part in parts) for key in ("seconds", "slot_s", "money"))
    states = [part.state for part in parts if part.state != "done"]  # all are done just before the result is written
    state = "done" if result else [*states, "running"][0] if parts else "waiting"
    return StageSection(name, "evaluate", state, seconds, slot_s, money, table=rows if result else [])
