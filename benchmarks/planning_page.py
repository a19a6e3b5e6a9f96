"""The table of docs/planning.md, what each part of the planner is worth: `python -m benchmarks.planning_page`.

It is written from benchmarks/results/, between its markers. A part without a result says so, so page and results cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common.results import FOLDER
from benchmarks.common.run_metadata import ROOT

PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- planning worth -->", "<!-- end -->"
NOT_MEASURED = "not measured"
SETTING = "qwen3b-gsm8k-grpo"  # the simulated one


def read(name: str) -> dict[str, Any]:
    """Return a benchmark's results, empty if there are none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def words(time: float, cost: float) -> str:
    """Return what a part saves of a step's time and cost, given as shares."""
    return ", ".join(
        f"{'saves' if share >= 0 else 'adds'} {abs(share):.0%} of the {what}" for share, what in ((time, "time"), (cost, "cost"))
    )


def simulated(without: str) -> str:
    """Return what a part saves in the simulator: all parts, over all but this one."""
    rows = read("cluster").get("parts", {}).get("ablation", {}).get(SETTING, {}).get("rows", {}).get("as it is", {})
    if without not in rows or "all parts" not in rows:
        return NOT_MEASURED
    every, less = rows["all parts"]["same"], rows[without]["same"]
    return words(1 - less["speedup"] / every["speedup"], 1 - (1 - every["saving"]) / (1 - less["saving"]))


def early(kind: str) -> str:
    """Return what runs of the real runtime save by one kind of early work, see `benchmarks/early_work.py`."""
    saved = read("early_work").get("saved", {}).get(kind)
    return words(saved["step_s"]["saving"], saved["cost/full_slot_s"]["saving"]) if saved else NOT_MEASURED


def moves() -> str:
    """Return the targets of moves in the real runtime that its benchmark has written."""
    targets = read("moves").get("targets", [])
    return "; ".join(f"{target['name']}: {target['value']:.3g}{target['unit']}" for target in targets) or NOT_MEASURED


def elastic() -> str:
    """Return what elastic pools save in the real runtime over fixed ones, sizing and release together."""
    ratios = read("elastic").get("ratios", {}).get("elastic, prefer 0.5")
    return words(1 - ratios["step_s"], 1 - ratios["full_slot_s"]) + ", together with release" if ratios else NOT_MEASURED


def drafts() -> str:
    values = {target["name"]: target["value"] for target in read("speculation").get("targets", [])}
    worst, best = values.get("auto over off, anywhere"), values.get("auto over off, chain, the last four responses at temperature 1")
    return f"{worst:.2f} to {best:.2f} times the speed of decoding" if worst and best else NOT_MEASURED


def market() -> str:
    values = [t["value"] for t in read("shared_pool_simulated").get("targets", []) if t["name"].endswith("paid for, over colocated")]
    return f"{min(values):.2f} to {max(values):.2f} times the work per paid slot-second of runs in turn" if values else NOT_MEASURED


@dataclass(frozen=True)
class PlannerPart:
    """A part of the planner. decides: in a few words. real, simulated: return what it is worth there."""

    name: str
    decides: str
    real: Callable[[], str] = lambda: NOT_MEASURED
    simulated: Callable[[], str] = lambda: NOT_MEASURED


PARTS = (
    PlannerPart("Pool size", "how many engines a step has", elastic, lambda: simulated("- pool size (all engines)")),
    PlannerPart("Width", "how many slots an engine has (`rollout.tensor_parallel: auto`)"),
    PlannerPart("Release", "which idle slots go back", simulated=lambda: simulated("- release (all devices billed)")),
    PlannerPart("Groups", "which responses share an engine", simulated=lambda: simulated("- consolidation and grouping (random split)")),
    PlannerPart("Moves", "which responses change their engine during the rollout", moves),
    PlannerPart("Learner's begin", "which slots the learner takes in the tail", simulated=lambda: simulated("- overlap")),
    PlannerPart(
        "Early wake",
        "when engines wake beside the update",
        lambda: early("wake"),
        lambda: simulated("- engines kept awake or woken beforehand"),
    ),
    PlannerPart("Bids", "what a run offers for slots of a shared pool", simulated=market),
    PlannerPart("Drafts", "how many tokens are drafted", drafts),
)


def table() -> str:
    lines = ["| part | decides | in the real runtime | simulated |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {p.name} | {p.decides} | {p.real()} | {p.simulated()} |" for p in PARTS)])


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    if not rest:
        raise SystemExit(f"{PAGE}: the marker {BEGIN} is missing")
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
