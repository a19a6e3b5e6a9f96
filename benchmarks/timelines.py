"""The README's pictures, from real runs of this checkout: `python -m benchmarks.timelines [--quick] [--draw] [--report]`.

Runs one recipe twice with the same seed, so that both runs generate the same tokens:

fixed    both cores are leased from the first step to the last (`functions.elastic=false`)
elastic  the plan of each step decides how many cores each phase leases

Draws who held which core during the same steps of both runs (docs/images/timelines.svg) and writes results/timelines.json.
`--draw` draws the picture again from that file. `--report` also takes a picture of the elastic run's report
(docs/images/report.png), for which chromium must be on PATH. `--lag` draws synchronous steps beside partial rollouts instead
(docs/images/timelines_lag.svg), and `--ppo` steps of recipes/ppo.yaml whose calls take turns or run side by side
(docs/images/timelines_ppo.svg).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.charts import save_svg, svg_pyplot
from benchmarks.common.results import BUSY, FOLDER, Spread, make_console, result_folder, save
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import train

IMAGES = ROOT / "docs" / "images"
COLOURS = {"rollout": "#2f6fd0", "learn": "#dc7f14", "score": "#23946a", "critic": "#b8433f", "reference": "#8459c9"}
WORDS = {"rollout": "generating", "learn": "policy learning", "score": "scoring", "critic": "critic", "reference": "reference"}
MIN_VISIBLE_S = 0.012  # scoring takes 2 ms: drawn this wide so that it can be seen
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def modes(cores: int, prefer: float) -> dict[str, list[str]]:
    fixed = [f"rollout.min_actors={cores}", f"rollout.max_actors={cores}", f"learner.max_slots_per_rank={cores}"]
    most = [f"rollout.max_actors={cores}", f"learner.max_slots_per_rank={cores}"]
    return {"fixed pools": ["functions.elastic=false", *fixed], "elastic pools": [f"objective.prefer={prefer:g}", *most]}


def lags(prefer: float) -> dict[str, list[str]]:
    """One core each for an engine and the learner at once, or both cores for either in turn."""
    beside = ["rollout.partial=continue", "rollout.ahead=true", "rollout.max_lag_steps=2", "learner.max_slots_per_rank=1"]
    in_turn = ["rollout.partial=continue", "rollout.max_lag_steps=1"]
    of = {"synchronous steps": [], "partial rollouts in turn, bound 1": in_turn, "partial rollouts beside the update, bound 2": beside}
    return {name: [f"objective.prefer={prefer:g}", *overrides] for name, overrides in of.items()}


ORDERS = {"calls take turns": ["plan.search=fixed"], "calls side by side": ["plan.search=auto"]}


def run(overrides: list[str], recipe: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the medians of the steady steps and the leases of the steps to draw."""
    own = [f"run.steps={options.steps}", "watch.wandb='off'"]
    _, metrics = train(recipe, [*own, *overrides], root, name="quickstart", timeout_s=options.timeout_s)
    steps = [row for row in metrics if row["step"] > 0]  # row 0 is the first evaluation
    steady = [row for row in steps if options.drop < row["step"]]
    with (root / "quickstart" / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "step_s": Spread.of(row["step_s"] for row in steady),
        "full_slot_s": Spread.of(row["cost/full_slot_s"] for row in steady),
        "tokens": [row["tokens/generated"] for row in steps],
        "leases": leases(rows, options.first, options.first + options.shown),
    }


def leases(rows: list[dict[str, str]], first: int, end: int) -> list[dict[str, Any]]:
    """What each slot was leased for in steps first … end - 1, in seconds since the first of them began."""
    chosen = [row for row in rows if first <= int(row["step"]) < end and row["activity"] not in ("parked", "unleased")]
    begin = min(float(row["from_s"]) for row in chosen)
    return [
        {
            "slot": row["device"],
            "kind": row["kind"],
            "activity": row["activity"],
            "from_s": float(row["from_s"]) - begin,
            "to_s": float(row["to_s"]) - begin,
        }
        for row in chosen
    ]


def draw(content: dict[str, Any], path: Path) -> None:
    pyplot = svg_pyplot()
    from matplotlib.patches import Patch

    is_busy = content["load_before"] > BUSY * content["cores"]
    count = len(content["modes"])
    figure, axes = pyplot.subplots(count, 1, figsize=(9.2, 0.6 + 1.4 * count), sharex=True, layout="constrained")
    for axis, (name, mode) in zip(axes, content["modes"].items(), strict=True):
        slots = sorted({row["slot"] for row in mode["leases"]})
        for row in mode["leases"]:
            lane, seconds = slots.index(row["slot"]), row["to_s"] - row["from_s"]
            axis.barh(lane, seconds, left=row["from_s"], height=0.7, color="#e3e6ea", edgecolor="#b4bac2", hatch="////", linewidth=0)
            if row["activity"] in ("work", "transfer"):
                shown = max(seconds, MIN_VISIBLE_S)
                axis.barh(lane, shown, left=row["from_s"], height=0.7, color=COLOURS.get(row["kind"], "#8459c9"), linewidth=0)
        axis.set_yticks(range(len(slots)), [f"core {number}" for number in range(len(slots))])
        axis.set_ylim(len(slots) - 0.4, -0.6)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
        figures = f": {mode['step_s']['median']:.2f} s a step, {mode['full_slot_s']['median']:.2f} core-seconds leased"
        axis.set_title(f"{name}{'' if is_busy else figures}", loc="left", fontsize=10, fontweight="bold")
    label = f"seconds since step {content['first']} began ({content['shown']} steps)"
    if is_busy:
        label += "; other programs ran beside it: compare the leases, not the times"
    axes[-1].set_xlabel(label)
    kinds = {row["kind"] for mode in content["modes"].values() for row in mode["leases"]}
    handles = [Patch(color=COLOURS[kind], label=label) for kind, label in WORDS.items() if kind in kinds]
    handles.append(Patch(facecolor="#e3e6ea", edgecolor="#b4bac2", hatch="////", label="leased, no work"))
    handles.append(Patch(facecolor="white", edgecolor="#b4bac2", label="not leased"))
    figure.legend(handles=handles, loc="outside upper center", ncols=7, frameon=False, fontsize=9)
    save_svg(figure, path)


def picture_of(report: Path, path: Path) -> None:
    """Take a picture of a report. Raises RuntimeError without a browser."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        raise RuntimeError(f"--report: none of {', '.join(CHROMIUM)} is on PATH; install one, or leave --report out")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                "--virtual-time-budget=5000", "--window-size=1280,1180", f"--screenshot={path}", report.resolve().as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--cores", type=int, default=2, help="slots of the pool; above the machine's cores they share these")
    parser.add_argument("--name", default="timelines", help="of the result and of the picture")
    parser.add_argument("--prefer", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--drop", type=int, default=4, help="first steps of a run that are not steady state")
    parser.add_argument("--first", type=int, default=24, help="first step to draw")
    parser.add_argument("--shown", type=int, default=4, help="number of steps to draw")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="longest time for one run")
    parser.add_argument("--lag", action="store_true", help="draw synchronous steps and partial rollouts")
    parser.add_argument("--ppo", action="store_true", help="draw steps of PPO whose calls take turns, and side by side")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw results/<name>.json again")
    parser.add_argument("--report", action="store_true", help="also take a picture of the elastic run's report")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs; the picture goes to results/quick/")
    options = parser.parse_args()
    if options.lag:
        options.name = "timelines_lag"
    if options.ppo:
        options.name, options.recipe, options.shown = "timelines_ppo", ROOT / "recipes" / "ppo.yaml", 2
    if options.draw:
        draw(json.loads((FOLDER / f"{options.name}.json").read_text()), IMAGES / f"{options.name}.svg")
        return
    if options.quick:
        options.steps, options.drop, options.first, options.shown = 4, 1, 2, 2
    console = make_console()
    images = result_folder(True) if options.quick else IMAGES
    images.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "recipe": options.recipe.name,
        "cores": options.cores,
        "steps": options.steps,
        "drop": options.drop,
        "first": options.first,
        "shown": options.shown,
        "prefer": options.prefer,
        "load_before": os.getloadavg()[0],
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlhfless-timelines-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        chosen = ORDERS if options.ppo else lags(options.prefer) if options.lag else modes(options.cores, options.prefer)
        for place, (name, overrides) in enumerate(chosen.items()):
            console.print(f"{name}: {options.steps} steps", highlight=False)
            found[name] = run(overrides, options.recipe, scratch / f"{place}", options)
        tokens = {name: mode.pop("tokens") for name, mode in found.items()}
        if not (options.lag or options.ppo) and len({tuple(of_run) for of_run in tokens.values()}) > 1:  # orders of calls round differently
            raise RuntimeError("the two runs generated different numbers of tokens, so they cannot be compared")
        path = save(options.name, {**content, "modes": found}, console=console, quick=options.quick)  # before any picture changes
        if options.report:
            picture_of(scratch / "1" / "quickstart" / "report.html", images / "report.png")
    draw(json.loads(path.read_text()), images / f"{options.name}.svg")
    console.print(f"drawn: {(images / f'{options.name}.svg').relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
