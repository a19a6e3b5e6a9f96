"""Time and cost of one rollout under every policy: `python -m benchmarks.rollout_policies [--lengths FILE | --traces FOLDER] [--quick]`.

Each policy sweeps its own knob; all run in the same simulator and are charged alike. The forecast of a recorded response is
the mean of the other responses to the same prompt, spread log-normally (median -6 %, 0.35); a recorded list without prompts is
forecast weakly: 30 % of the way, on the log scale, from the median to the truth, with noise. Synthetic lengths are log-normal,
65 % of the variance between prompts, which the forecast knows. What is compared is the frontier: time at equal cost, cost at equal
time, everywhere both reach. Where ours is behind, the table says so and why.

One rollout hangs on its longest response, and whoever has put that one in good company wins it. So each kind of case is drawn
several times more (other seeds, other problems, other parts of the trace), and the frontiers of the means are compared too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.simulated.rollout_cases import GSM8K, TRACES, RolloutCase, cases
from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement import Speed
from placement.simulate.rollout import NAMES

SPEED = Speed(8.5e-3, 3e-5)  # Qwen2.5-3B on an L40S by its roofline: 7 ms of weights a step, tens of µs of KV a sequence
PREFER = np.round(np.r_[0.0, np.linspace(0.06, 0.6, 10), 0.72, 0.86, 1.0], 3)
FEW = PREFER[[0, 1, 3, 5, 7, 9, 11, 13]]  # where each draw is one of many
DRAWS = 8
BEATEN = ("consolidate", "crude-mix", "rlhfless-paper")  # that ours is to be ahead of everywhere
RIVALS = ("consolidate", "crude-mix", "rlhfless-paper", "global-cut", "random", "fixed")
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "rollout_policies.png"


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


def play(case: RolloutCase, policies: Sequence[str] = NAMES, knobs: np.ndarray = PREFER) -> dict[str, np.ndarray]:
    """(knobs, 2) of (time, cost) for every policy."""
    found = {}
    for policy in policies:
        found[policy] = np.array(
            [
                (result.time_s, result.cost)
                for result in (
                    simulate_rollout(
                        case.truth,
                        case.scenarios,
                        SPEED,
                        policy=policy,
                        max_actors=case.actors,
                        prefer=float(knob),
                        migrate_s=case.migrate_s,
                        start_s=case.start_s,
                    )
                    for knob in (knobs[-1:] if policy == "fixed" else knobs)
                )
            ]
        )
    return found


def on_average(case: RolloutCase) -> dict[str, Any]:
    """Ours against those it is to beat, by the frontiers of mean time and mean cost over DRAWS other draws."""
    assert case.again is not None
    drawn = [replace(case, truth=truth, scenarios=scenarios) for truth, scenarios in map(case.again, range(DRAWS))]
    played = [play(each, ("ours", *BEATEN), FEW) for each in drawn]
    means = {policy: np.mean([points[policy] for points in played], axis=0) for policy in played[0]}
    single = {rival: [float(ratios(points["ours"], points[rival], 0).max()) for points in played] for rival in BEATEN}
    return {"points": means, "ours_over": compare(means, BEATEN), "worst_of_each_draw": single}


def compare(points: dict[str, np.ndarray], rivals: Sequence[str]) -> dict[str, dict[str, float]]:
    rows = {}
    for rival in rivals:
        at_cost, at_time = ratios(points["ours"], points[rival], 0), ratios(points["ours"], points[rival], 1)
        rows[rival] = {
            "time_median": float(np.median(at_cost)),
            "time_worst": float(at_cost.max()),
            "cost_median": float(np.median(at_time)),
            "cost_worst": float(at_time.max()),
            "behind_share": float(np.mean(at_cost > 1.0)),
        }
    return rows


def facts(case: RolloutCase) -> dict[str, float]:
    """What the forecast knew: share of the variance of log length that its means explain, what it claims that share to be,
    and of the longest response its place in the forecast's order (1: forecast the longest)."""
    said, came = np.log(case.scenarios).mean(1), np.log(case.truth)
    return {
        "claimed": float(said.var() / (said.var() + np.log(case.scenarios).var(1).mean())),
        "explained": float(np.corrcoef(said, came)[0, 1] ** 2),
        "place_of_longest": 1 + int((said > said[int(np.argmax(case.truth))]).sum()),
    }


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """Of every case, and of the means over further draws; with the reason of each miss."""
    found = []
    for rival in BEATEN:
        for row in rows:
            worst = row["ours_over"][rival]["time_worst"]
            why = _why(row, rival) if worst > 1 else ""
            found.append(Target(f"{row['case']}: time over {rival}, worst place", worst, most=1.0, why=why))
    for row in rows:
        cut, shown = row["ours_over"]["global-cut"], 1 / row["ours_over"]["oracle"]["time_worst"]
        found.append(
            Target(
                f"{row['case']}: cost over global-cut, median",
                cut["cost_median"],
                most=0.872,
                why=f"at its worst place {cut['cost_worst']:.2f}" if cut["cost_median"] > 0.872 else "",
            )
        )
        why = f"{_known(row)}; of the policies that do not know the lengths the best reaches {row['best_share_of_oracle']:.2f}"
        found.append(Target(f"{row['case']}: speed over oracle, worst place", shown, least=0.92, why=why if shown < 0.92 else ""))
    for rival in BEATEN:
        for row in rows:
            if mean := row.get("on_average"):
                over = mean["ours_over"][rival]
                why = f"at its median place {over['time_median']:.3f}, behind at {over['behind_share']:.0%} of the places"
                found.append(
                    Target(
                        f"{row['case']}, means of {DRAWS} draws: time over {rival}, worst place",
                        over["time_worst"],
                        most=1.0,
                        why=why if over["time_worst"] > 1 else "",
                    )
                )
    return found


def _known(row: dict[str, Any]) -> str:
    return (
        f"the forecast claims to explain {row['claimed']:.0%} of the variance of log length, explains {row['explained']:.0%}, and has "
        f"the longest response at place {row['place_of_longest']} of {row['responses']}"
    )


def _why(row: dict[str, Any], rival: str) -> str:
    over = row["ours_over"][rival]
    text = f"at its median place {over['time_median']:.3f}; {_known(row)}"
    if mean := row.get("on_average"):
        single = mean["worst_of_each_draw"][rival]
        text += (
            f"; {DRAWS} other draws have {min(single):.3f} to {max(single):.3f} there, the frontiers of their means "
            f"{mean['ours_over'][rival]['time_worst']:.3f}"
        )
    return text


def draw(results: list[tuple[RolloutCase, dict[str, np.ndarray]]]) -> None:
    """Draw one panel a case, cost across, time up."""
    from matplotlib import pyplot

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 3.9 * rows), squeeze=False)
    for panel in panels.flat[len(results) :]:
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


def table_of(name: str, what: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table(
        "ours against",
        "time at equal cost: median",
        "worst",
        "cost at equal time: median",
        "worst",
        "behind at",
        title=f"{name} ({what})",
        title_justify="left",
    )
    for rival, row in rows.items():
        table.add_row(
            rival,
            *(f"{row[key]:.3f}" for key in ("time_median", "time_worst", "cost_median", "cost_worst")),
            f"{row['behind_share']:.0%}" if rival != "oracle" else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=Path, help="recorded lengths: JSON or CSV")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of gsm8k_response_lengths.json and conversation_lengths.csv")
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    arguments = parser.parse_args()
    console = make_console()
    results, content, began = [], [], time.process_time()
    chosen = cases(arguments.lengths, arguments.quick, arguments.traces)
    for name in (GSM8K, "conversation_lengths.csv"):
        if not (arguments.traces / name).exists() and not (arguments.lengths or arguments.quick):
            console.print(f"[yellow]{arguments.traces / name} is not there: its cases are left out (--traces FOLDER)[/yellow]")
    for case in chosen:
        points = play(case)
        rows = compare(points, (*RIVALS, "oracle"))
        results.append((case, points))
        blind = [float(ratios(points["oracle"], points[policy], 0).min()) for policy in ("ours", *RIVALS)]
        content.append(
            {
                "case": case.name,
                "responses": len(case.truth),
                "actors": case.actors,
                "migrate_s": case.migrate_s,
                "start_s": case.start_s,
                "bound_s": case.start_s + SPEED.step_s(1) * float(case.truth.max()),
                "alone_cost": SPEED.rollout_s(case.truth),
                **facts(case),
                "best_share_of_oracle": max(blind),
                "points": points,
                "ours_over": rows,
                "on_average": on_average(case) if case.again else None,
            }
        )
        console.print(table_of(case.name, f"{len(case.truth)} responses, {case.actors} actors", rows))
        if mean := content[-1]["on_average"]:
            console.print(table_of(case.name, f"frontiers of the means over {DRAWS} other draws", mean["ours_over"]))
    targets = targets_of(content)
    show_targets(console, targets)
    save(
        "rollout_policies",
        {"speed": asdict(SPEED), "prefer": PREFER, "cpu_s": time.process_time() - began, "cases": content},
        targets,
        console=console,
        quick=arguments.quick,
    )
    if not arguments.quick and not arguments.lengths:
        draw(results)
        console.print(f"written: {PICTURE.relative_to(PICTURE.parents[1])}", highlight=False)


if __name__ == "__main__":
    main()
