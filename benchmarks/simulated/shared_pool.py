"""Many runs on one pool (simulated): a market against static partitions, a queue, and interleaving in RollMux's manner.

python -m benchmarks.simulated.shared_pool [--quick] [--only CASE …] [--seeds N]

Every baseline has the best partition, split and bound on slowdowns for each seed, chosen with hindsight; the market has one `prefer`
throughout. Seeds 0 and 1 were looked at while it was made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import Target, make_console, result_folder, save, show_targets
from benchmarks.common.run_metadata import provenance
from benchmarks.simulated.pool_policies import Interleaved, Market, Partitions
from benchmarks.simulated.pool_work import ArrivingRun, pool_run
from benchmarks.simulated.simulate_pool import PoolOutcome, PoolPolicy, simulate_pool
from placement.simulate import named, names

TUNED, PREFER = 2, 0.5
ROLLMUX = {"disaggregated": 1.84, "colocated": 1.38}  # what RollMux (arXiv 2512.11306) reports over each
GRPO = [name for name in names() if name.startswith("qwen") and name.endswith("grpo")]
ALL = [name for name in names() if name.startswith("qwen")]
LARGE = [name for name in names() if name.startswith("llama")]


@dataclass(frozen=True)
class Case:
    """Runs of these settings with so many steps, which arrive at random.

    parts, slowdowns: what baselines try. sizes: numbers of devices that a stage may use.
    """

    devices: int
    settings: list[str]
    runs: int
    steps: int
    between_s: float
    parts: tuple[int, ...] = (1, 2, 3, 4, 5)
    slowdowns: tuple[float, ...] = (2.0, 3.0, 5.0)
    sizes: tuple[int, ...] = (*range(1, 17), 20, 24, 32, 48, 64)
    seeds: int = 3  # most that are run


CASES = {
    "16 L40S, GRPO": Case(16, GRPO, 24, 10, 30.0),
    "16 L40S, GRPO and PPO": Case(16, ALL, 24, 10, 30.0),
    "16 L40S, few arrivals": Case(16, GRPO, 24, 10, 240.0),
    "300 L40S, GRPO and PPO": Case(300, ALL, 60, 4, 3.0, parts=(18, 25, 37), slowdowns=(3.0, 5.0), seeds=1),
    "160 H100, 70B": Case(160, LARGE, 12, 4, 60.0, sizes=tuple(range(20, 161, 4))),
}


def runs_of(case: Case, seed: int) -> list[ArrivingRun]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(case.between_s, case.runs))
    chosen = [case.settings[k] for k in rng.permutation(np.resize(np.arange(len(case.settings)), case.runs))]
    sizes = [n for n in case.sizes if n <= case.devices]
    return [
        pool_run(f"{i}: {name}", named(name), case.steps, sizes, float(at), seed * 1000 + i)
        for i, (name, at) in enumerate(zip(chosen, arrivals, strict=True))
    ]


def policies(case: Case) -> dict[str, Iterable[PoolPolicy]]:
    """Every policy with each of its settings."""
    n = case.devices
    splits = [
        (parts, m) for parts in case.parts for m in sorted({n // parts // 3, n // parts // 2, 2 * n // parts // 3}) if 1 <= m < n // parts
    ]
    return {
        "disaggregated": [Partitions(n, parts, m) for parts, m in splits],
        "colocated": [Partitions(n, parts) for parts in case.parts],
        "queue": [Partitions(n, 1)],
        "interleaved": [Interleaved(n, parts, m, slowdown) for parts, m in splits for slowdown in case.slowdowns],
        "market": [Market(n, PREFER)],
    }


def best(runs: list[ArrivingRun], devices: int, tried: Iterable[PoolPolicy]) -> tuple[PoolOutcome, str]:
    """Return the outcome with the most work per slot-second, and its settings. Partitions that cannot hold a run drop out."""
    found: list[tuple[PoolOutcome, str]] = []
    for policy in tried:
        said = ", ".join(
            f"{key} {value}" for key, value in vars(policy).items() if key in ("parts", "groups", "trainers", "slowdown", "prefer")
        )
        try:
            found.append((simulate_pool(runs, devices, policy), said))
        except ValueError:  # too small for a run
            continue
    return max(found, key=lambda one: one[0].work_per_slot_s)


def measure(case: Case, seeds: range) -> dict[str, Any]:
    """Return every policy's figures, means over seeds; ratios are paired by seed."""
    rows: dict[str, list[dict[str, Any]]] = {}
    most = []
    for seed in seeds:
        runs = runs_of(case, seed)
        most.append(most_per_slot_s(runs, case.devices))
        for name, tried in policies(case).items():
            outcome, said = best(runs, case.devices, tried)
            times = np.array(outcome.times_s)
            rows.setdefault(name, []).append(
                {
                    "work_per_slot_s": outcome.work_per_slot_s,
                    "work_per_paid_s": outcome.work_per_paid_s,
                    "makespan_s": outcome.makespan_s,
                    "cost_per_run": sum(outcome.cost.values()) / len(runs),
                    **{f"time_p{p}_s": float(np.quantile(times, p / 100)) for p in (50, 90, 100)},
                    "settings": said,
                }
            )
    found = {
        name: {key: float(np.mean([row[key] for row in some])) for key in some[0] if key != "settings"} | {"settings": some[-1]["settings"]}
        for name, some in rows.items()
    }
    over = {
        name: {
            base: {
                key: float(np.mean([a[key] / b[key] for a, b in zip(rows[name], rows[base], strict=True)]))
                for key in ("work_per_slot_s", "work_per_paid_s", "makespan_s", "time_p50_s", "time_p100_s")
            }
            for base in ("disaggregated", "colocated", "queue", "interleaved")
        }
        for name in rows
    }
    return {**asdict(case), "seeds": len(seeds), "most_per_slot_s": float(np.mean(most)), "policies": found, "over": over}


def most_per_slot_s(runs: list[ArrivingRun], devices: int) -> float:
    """Return a bound on the work per slot-second: no run ends before its stages can, one after another, each at its fastest."""
    ends = [run.arrival_s + sum(stage.seconds[-1] for step in run.steps for stage in step) for run in runs]
    work = sum(run.work for run in runs)
    return work / max(work, devices * (max(ends) - min(run.arrival_s for run in runs)))


def targets(cases: dict[str, Any]) -> list[Target]:
    """What RollMux reports, as targets for the market: of the slot-seconds that were paid for, and of all of the pool."""
    found = []
    for case, entry in cases.items():
        for base, least in ROLLMUX.items():
            for key, said, most in (
                ("work_per_paid_s", "that are paid for", 1.0),
                ("work_per_slot_s", "of the pool", entry["most_per_slot_s"]),
            ):
                over, own = (entry["over"][name][base][key] for name in ("market", "interleaved"))
                room = most / entry["policies"][base][key]
                why = "" if over >= least else f"no schedule can exceed {room:.2f}×; `interleaved` reaches {own:.2f}×"
                found.append(Target(f"{case}: work per slot-second {said}, over {base}", over, least=least, unit="×", why=why))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.simulated.shared_pool")
    parser.add_argument("--quick", action="store_true", help="one seed, one case: shows that it runs")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES), help="some cases: the others' results stay")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console = make_console()
    path, cases = result_folder(options.quick) / "shared_pool_simulated.json", {}
    for case in options.only[: 1 if options.quick else None]:
        seeds = 1 if options.quick else min(options.seeds, CASES[case].seeds)
        found = {**measure(CASES[case], range(TUNED, TUNED + seeds)), "commit": provenance()["git"].get("commit", "")}
        cases = {**(json.loads(path.read_text())["cases"] if path.exists() else {}), case: found}
        heads = ("policy", "work per slot-s", "of those paid for", "makespan, s", "cost a run", "run time p50, p90, max, s", "settings")
        table = Table(*heads, title=case, title_justify="left")
        for name, row in cases[case]["policies"].items():
            times = ", ".join(f"{row[f'time_p{p}_s']:.0f}" for p in (50, 90, 100))
            shares = (f"{row['work_per_slot_s']:.1%}", f"{row['work_per_paid_s']:.1%}")
            table.add_row(name, *shares, f"{row['makespan_s']:.0f}", f"{row['cost_per_run']:.0f}", times, row["settings"])
        console.print(table)
        cases = {name: cases[name] for name in CASES if name in cases}
        reached = targets(cases)  # written after each case: what is finished outlives a cut
        save("shared_pool_simulated", {"cases": cases, "prefer": PREFER}, reached, console=console, quick=options.quick)
    show_targets(console, reached)


if __name__ == "__main__":
    main()
