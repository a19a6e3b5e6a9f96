"""One page with the curves and costs of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.report.charts import series
from rlhfless_ray.report.formatting import duration, finite, money, total
from rlhfless_ray.report.inline import curves
from rlhfless_ray.report.read_run import RunRecord

CURVES = {  # heading → metric
    "Mean reward": "reward/mean",
    "Held-out accuracy": "eval/accuracy_sampled",
    "Response length (tokens)": "length/mean",
    "KL to the reference": "learn/kl",
    "Step (s)": "step_s",
    "Cost of a step (slot-s)": "cost/full_slot_s",
}
STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #8884}"
    "td:first-child,th:first-child{text-align:left}section{display:inline-block;margin:0 1rem 1rem 0;vertical-align:top}"
)


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of these run folders, and return it. It works without a network."""
    runs = {folder.name if len({f.name for f in folders}) == len(folders) else str(folder): RunRecord.read(folder) for folder in folders}
    rows = [_row(name, run) for name, run in runs.items()]
    head = ("run", "status", "steps", "last reward", "last accuracy", "time", "slot-seconds", "money")
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    figures = []
    for title, metric in CURVES.items():
        lines = {name: series(run.metrics, metric) for name, run in runs.items()}
        if any(len(x) > 1 for x, _ in lines.values()):
            figures.append(f"<section><h3>{title}</h3>{curves(lines, width=440).text}</section>")
    page = (
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{len(runs)} runs</title>"
        f"<style>{STYLE}</style><h1>{len(runs)} runs</h1><table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{table}</table>"
        f"{''.join(figures)}"
    )
    replace_file(out, page.encode())
    return out


def _row(name: str, run: RunRecord) -> list[str]:
    steps = run.steps
    last = steps[-1] if steps else {}
    accuracy = next((row["eval/accuracy_sampled"] for row in reversed(run.metrics) if "eval/accuracy_sampled" in row), None)
    reward, cost, spent = finite(last.get("reward/mean")), finite(last.get("cost/total_full_slot_s")), total(run.ledger, "money")
    return [
        name,
        str(run.status.get("status", "unknown")),
        str(len(steps)),
        "" if reward is None else f"{reward:.3f}",
        "" if finite(accuracy) is None else f"{accuracy:.1%}",
        duration(max((row["to_s"] for row in run.ledger), default=0.0)),
        "" if cost is None else f"{cost:,.0f}",
        "" if spent is None else money(spent),
    ]
