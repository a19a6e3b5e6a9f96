"""Time and cost of one rollout under every policy: `python -m benchmarks.rollout_policies [--lengths FILE | --traces FOLDER] [--quick]`.

Each policy sweeps its own knob; all run in the same simulator and are charged alike. The forecast of a recorded response is
the mean of the other responses to the same prompt, spread log-normally (median -6 %, 0.35); a recorded list without prompts is
forecast weakly: 30 % of the way, on the log scale, from the median to the truth, with noise. Synthetic lengths are log-normal,
65 % of the variance between prompts, which the forecast knows. What is compared is the frontier: time at equal cost, cost at equal
time, everywhere both reach. Where ours is behind, the table says so.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.results import Target, make_console, save, show_targets
from placement import Speed, simulate_rollout
from placement.rollout_policies import NAMES

SPEED = Speed(8.5e-3, 3e-5)  # Qwen2.5-3B on an L40S by its roofline: 7 ms of weights a step, tens of µs of KV a sequence
PREFER = np.round(np.r_[0.0, np.linspace(0.06, 0.6, 10), 0.72, 0.86, 1.0], 3)
RIVALS = ("consolidate", "crude-mix", "rlhfless-paper", "global-cut", "random", "fixed")
TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "rollout_policies.png"


@dataclass(frozen=True)
class Case:
    """One rollout to play: true lengths (n,), scenarios (n, S), and what is charged."""

    name: str
    truth: np.ndarray
    scenarios: np.ndarray
    actors: int = 16
    migrate_s: float = 0.0
    start_s: float = 0.0


def siblings(table: np.ndarray, seed: int = 0, draws: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """True lengths and scenarios of recorded answers, table (prompts, answers): each is forecast by the others' mean."""
    table = np.maximum(table, 2).round()
    forecast = ((table.sum(1, keepdims=True) - table) / (table.shape[1] - 1)).ravel()
    noise = np.random.default_rng(seed).normal(-0.06, 0.35, (table.size, draws))
    return table.ravel(), np.maximum(2, forecast[:, None] * np.exp(noise))


def weakly(truth: np.ndarray, seed: int = 0, draws: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Scenarios that know little: their centre is 30 % of the way from the median to the truth, and they are wide."""
    rng = np.random.default_rng(seed)
    centre = 0.3 * np.log(truth) + 0.7 * np.log(np.median(truth)) + rng.normal(0, 0.5, len(truth))
    return truth, np.maximum(2, np.exp(centre[:, None] + rng.normal(0, 0.9, (len(truth), draws))))


def lognormal(n: int, seed: int = 0, *, known: bool = True, median: float = 226.0, sigma: float = 0.6, draws: int = 64) -> Any:
    """n responses, eight to a prompt. known: the forecast has the prompt's own mean; otherwise another prompt's (useless)."""
    rng = np.random.default_rng(seed)
    prompt = rng.normal(0, np.sqrt(0.65) * sigma, -(-n // 8))
    said = prompt if known else rng.permutation(prompt)
    spread = np.sqrt(0.35) * sigma
    truth = np.maximum(1, np.round(median * np.exp(np.repeat(prompt, 8)[:n] + rng.normal(0, spread, n))))
    return truth, np.maximum(1, median * np.exp(np.repeat(said, 8)[:n, None] + rng.normal(0, spread, (n, draws))))


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A JSON list of lists (answers of each prompt), the recorded GSM8K file (characters, 3.5 to a token), or a CSV with
    a column `response_tokens`. Raises ValueError naming the file if it is none of these."""
    if path.suffix == ".csv":
        with path.open() as lines:
            rows = [row.get("response_tokens") for row in csv.DictReader(lines)]
        if not rows or any(value is None for value in rows):
            raise ValueError(f"{path}: no column response_tokens")
        return weakly(np.maximum(1.0, np.array(rows, float))[:512])
    content = json.loads(path.read_text())
    if content and isinstance(content[0], dict):
        return siblings(np.array([list(row["response_chars"].values()) for row in content], float) / 3.5)
    if not content or len({len(row) for row in content}) != 1 or len(content[0]) < 2:
        raise ValueError(f"{path}: wants [[lengths of the answers to one prompt], …], as many for each, at least two")
    return siblings(np.array(content, float))


def cases(lengths: Path | None, quick: bool, traces: Path = TRACES) -> list[Case]:
    if lengths:
        return [Case(lengths.stem, *read(lengths))]
    found = [] if quick else [
        Case("log-normal 512", *lognormal(512)),
        Case("log-normal 512, useless forecast", *lognormal(512, 1, known=False)),
        Case("log-normal 512, moves 0.1 s, starts 0.3 s", *lognormal(512), migrate_s=0.1, start_s=0.3),
    ]
    found.append(Case("log-normal 128, 8 actors", *lognormal(128, 3), actors=8))
    recorded = traces / "gsm8k_response_lengths.json"
    if recorded.exists() and not quick:
        table = np.array([list(row["response_chars"].values()) for row in json.loads(recorded.read_text())], float) / 3.5
        found += [
            Case("GSM8K, four models, all 660 problems", *siblings(table)),
            Case("GSM8K, even problems", *siblings(table[::2])),
            Case("GSM8K, odd problems", *siblings(table[1::2])),
            Case("GSM8K, moves 0.1 s, starts 0.3 s", *siblings(table), migrate_s=0.1, start_s=0.3),
        ]
    if (traces / "conversation_lengths.csv").exists() and not quick:
        found.append(Case("conversation trace, 512", *read(traces / "conversation_lengths.csv")))
    return found


def front(points: np.ndarray) -> np.ndarray:
    """The points (k, 2) of (time, cost) that no other beats on both, by cost ascending."""
    points = points[np.lexsort((points[:, 0], points[:, 1]))]
    keep = points[:, 0] < np.r_[np.inf, np.minimum.accumulate(points[:, 0])[:-1]]
    return points[keep]


def ratios(ours: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
    """Ours over the other's at 25 places between the ends that both reach (one place where one is a point): time at equal
    cost (axis 0) or cost at equal time (axis 1). Between points the frontiers are interpolated on log scales."""
    a, b = (np.log(front(points)) for points in (ours, other))
    a, b = (p[np.argsort(p[:, 1 - axis])] for p in (a, b))
    low, high = max(a[0, 1 - axis], b[0, 1 - axis]), min(a[-1, 1 - axis], b[-1, 1 - axis])
    if low > high:  # the other is dearer (or slower) than all of ours: ours at its nearest end
        low = high = b[0, 1 - axis]
    at = np.linspace(low, high, 25)
    values = [np.interp(at, p[:, 1 - axis], p[:, axis]) for p in (a, b)]
    return np.exp(values[0] - values[1])


def play(case: Case) -> dict[str, np.ndarray]:
    """(knobs, 2) of (time, cost) for every policy."""
    found = {}
    for policy in NAMES:
        knobs = PREFER[-1:] if policy == "fixed" else PREFER
        found[policy] = np.array([
            (result.time_s, result.cost)
            for result in (
                simulate_rollout(
                    case.truth, case.scenarios, SPEED, policy=policy, max_actors=case.actors, prefer=float(knob),
                    migrate_s=case.migrate_s, start_s=case.start_s,
                )
                for knob in knobs
            )
        ])
    return found


def compare(points: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    rows = {}
    for rival in (*RIVALS, "oracle"):
        at_cost, at_time = ratios(points["ours"], points[rival], 0), ratios(points["ours"], points[rival], 1)
        rows[rival] = {
            "time_median": float(np.median(at_cost)), "time_worst": float(at_cost.max()),
            "cost_median": float(np.median(at_time)), "cost_worst": float(at_time.max()),
            "behind_share": float(np.mean(at_cost > 1.0)),
        }
    return rows


def draw(results: list[tuple[Case, dict[str, np.ndarray]]]) -> str:
    """One panel a case, cost across, time up. Returns what became of it: without matplotlib there is no picture."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        return "no picture: it needs matplotlib (pip install matplotlib)"

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.9 * rows), squeeze=False)
    for panel in panels.flat[len(results):]:
        panel.set_visible(False)
    for panel, (case, points) in zip(panels.flat, results, strict=False):
        for policy, found in points.items():
            line = front(found)
            style = {"ours": {"color": "black", "linewidth": 2.2}, "oracle": {"color": "grey", "linestyle": ":"}}.get(policy, {})
            panel.plot(line[:, 1], line[:, 0], marker=".", markersize=4, label=policy, **style)
        panel.set(xscale="log", title=case.name, xlabel="cost (actor-seconds)", ylabel="time (s)")
        panel.grid(alpha=0.3)
        panel.axhline(case.start_s + SPEED.step_s(1) * case.truth.max(), color="grey", linewidth=0.7)
    panels.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=90)
    return f"written: {PICTURE.relative_to(PICTURE.parents[1])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=Path, help="recorded lengths: JSON or CSV")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of gsm8k_response_lengths.json and conversation_lengths.csv")
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    arguments = parser.parse_args()
    console = make_console()
    results, content, began = [], [], time.process_time()
    chosen = cases(arguments.lengths, arguments.quick, arguments.traces)
    for name in ("gsm8k_response_lengths.json", "conversation_lengths.csv"):
        if not (arguments.traces / name).exists() and not (arguments.lengths or arguments.quick):
            console.print(f"[yellow]{arguments.traces / name} is not there: its cases are left out (--traces FOLDER)[/yellow]")
    for case in chosen:
        points = play(case)
        rows = compare(points)
        results.append((case, points))
        content.append({
            "case": case.name, "responses": len(case.truth), "actors": case.actors, "migrate_s": case.migrate_s,
            "start_s": case.start_s, "bound_s": case.start_s + SPEED.step_s(1) * float(case.truth.max()),
            "alone_cost": SPEED.rollout_s(case.truth), "points": points, "ours_over": rows,
        })
        table = Table("ours against", "time at equal cost: median", "worst", "cost at equal time: median", "worst", "behind at",
                      title=f"{case.name} ({len(case.truth)} responses, {case.actors} actors)", title_justify="left")
        for rival, row in rows.items():
            table.add_row(rival, *(f"{row[key]:.3f}" for key in ("time_median", "time_worst", "cost_median", "cost_worst")),
                          f"{row['behind_share']:.0%}" if rival != "oracle" else "")
        console.print(table)
    targets = []
    for rival in ("consolidate", "crude-mix", "rlhfless-paper"):
        for row in content:
            targets.append(Target(f"{row['case']}: time over {rival}, worst place", row["ours_over"][rival]["time_worst"], most=1.0))
    for row in content:
        targets.append(Target(f"{row['case']}: cost over global-cut, median", row["ours_over"]["global-cut"]["cost_median"], most=0.872))
        targets.append(Target(f"{row['case']}: speed over oracle, worst place", 1 / row["ours_over"]["oracle"]["time_worst"], least=0.92))
    show_targets(console, targets)
    save(
        "rollout_policies", {"speed": asdict(SPEED), "prefer": PREFER, "cpu_s": time.process_time() - began, "cases": content},
        targets, console=console, quick=arguments.quick,
    )
    if not arguments.quick and not arguments.lengths:
        console.print(draw(results), highlight=False)


if __name__ == "__main__":
    main()
