"""How long one decision of the planner takes: the cost/speed frontier and the choice on it, with the forecast given.

python -m benchmarks.planner [--quick] [--repeats N]
"""

from __future__ import annotations

import argparse
import tracemalloc
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, processor_ms, save, show_targets
from placement import Objective, Plan, Speed, choose, frontier, rollout_bounds

THIN = 0.005
COLUMNS = 64
SAMPLES = 8  # of a prompt
SIZES = (1_024, 4_096, 16_384, 65_536, 262_144)
SIZE, ACTORS = 4_096, 256
# seconds of a decode step: a 3B model on an L40S by its memory bandwidth; a device four times as fast at reading weights;
# and one whose steps are mostly sequences, so that many actors pay
SPEEDS = {"8.5 ms + 30 µs": Speed(8.5e-3, 3e-5), "2 ms + 30 µs": Speed(2e-3, 3e-5), "1 ms + 100 µs": Speed(1e-3, 1e-4)}


@dataclass(frozen=True)
class TimedDecision:
    """One setting, measured: milliseconds of processor time, peak memory in 10⁶ bytes, and what came out."""

    samples: int
    actors: int
    columns: int
    speed: str
    cpu_ms: Spread
    peak_mb: float
    plans: int
    most_actors: int
    search_columns: int
    over_bound: float

    def row(self) -> tuple[str, ...]:
        kind = f"{self.columns} scenarios" if self.columns > 1 else "known"
        looked = f"{self.search_columns} of {self.columns}" if self.columns > 1 else ""
        return (
            f"{self.samples:,}",
            f"{self.actors:,}",
            kind,
            self.speed,
            self.cpu_ms.show(),
            f"{self.peak_mb:.1f}",
            str(self.plans),
            str(self.most_actors),
            looked,
            f"{100 * (self.over_bound - 1):.1f} %",
        )


def lengths_of(samples: int, columns: int, seed: int = 0) -> np.ndarray:
    """(samples, columns) response tokens: log-normal around 200, 65 % of the variance of log length between prompts (the
    share that TailSieve reports), 8 samples a prompt; at most 2,048."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.normal(0, 0.5 * 0.65**0.5, -(-samples // SAMPLES)), SAMPLES)[:samples]
    own = rng.normal(0, 0.5 * 0.35**0.5, (samples, columns))
    return np.clip(np.round(200 * np.exp(prompt[:, None] + own)), 2, 2048)


def decide(lengths: np.ndarray, speed: Speed, actors: int) -> list[Plan]:
    plans = frontier(lengths, speed, max_actors=actors, thin=THIN)
    choose(plans, Objective(prefer=0.5))
    return plans


def measure(samples: int, actors: int, columns: int, name: str, repeats: int) -> TimedDecision:
    lengths, speed = lengths_of(samples, columns), SPEEDS[name]
    known = lengths[:, 0] if columns == 1 else lengths
    plans = decide(known, speed, actors)  # the first call also pays for page faults and caches
    times = []
    for _ in range(repeats):
        times.append(processor_ms(lambda: decide(known, speed, actors)))
    tracemalloc.start()
    decide(known, speed, actors)
    peak_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    bound = rollout_bounds(known, speed, actors)
    return TimedDecision(
        samples,
        actors,
        columns,
        name,
        Spread.of(times),
        peak_mb,
        len(plans),
        plans[0].actors,
        plans[0].search_scenarios,
        plans[0].time_s / bound.time_s,
    )


def per_n_log_n(small: TimedDecision, large: TimedDecision) -> float:
    """How much more than n log n a decision grows between two sizes (1: just so)."""
    share = (large.samples * np.log(large.samples)) / (small.samples * np.log(small.samples))
    return float(large.cpu_ms.median / small.cpu_ms.median / share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, two repeats: does it run?")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    console = make_console()
    sizes, repeats = (SIZES[:2], 2) if arguments.quick else (SIZES, arguments.repeats)
    first, *others = SPEEDS
    settings = [(n, ACTORS * max(1, n // SIZE), columns, first) for columns in (1, COLUMNS) for n in sizes]
    settings += [(SIZE, ACTORS, columns, name) for columns in (1, COLUMNS) for name in others]
    table = Table(
        "samples",
        "actors",
        "lengths",
        "decode step",
        "processor ms",
        "peak MB",
        "plans",
        "actors used",
        "searched",
        "fastest over bound",
        title=f"One decision: frontier thinned to {100 * THIN:g} %, and a choice",
        title_justify="left",
    )
    decisions = []
    with console.status("measuring"):
        for setting in settings:
            decisions.append(measure(*setting, repeats=repeats if setting[0] <= 65_536 else max(3, repeats // 3)))
            table.add_row(*decisions[-1].row())
    console.print(table)
    console.print(
        "median (quartiles) of processor time, one thread, after one call that is not counted; peak: Python and numpy allocations "
        "during one call (tracemalloc); actors used: in the fastest plan; searched: scenarios that the search looked at, the figures "
        "are always over all; over bound: no partition whatever is faster than the bound",
        highlight=False,
    )
    by = {(d.samples, d.columns, d.speed): d for d in decisions}
    known, drawn = by[SIZE, 1, first], by[SIZE, COLUMNS, first]
    targets = [
        Target(f"known lengths, {SIZE:,} samples, {ACTORS} actors", known.cpu_ms.median, most=10, unit=" ms"),
        Target(f"{COLUMNS} scenarios, {SIZE:,} samples, {ACTORS} actors", drawn.cpu_ms.median, most=50, unit=" ms"),
    ]
    for name in others:
        for columns, most in ((1, 10), (COLUMNS, 50)):
            kind = f"{columns} scenarios" if columns > 1 else "known lengths"
            targets.append(Target(f"{kind}, the same at {name}", by[SIZE, columns, name].cpu_ms.median, most=most, unit=" ms"))
    if not arguments.quick:
        for columns, small in ((1, known), (COLUMNS, drawn)):
            kind = f"{columns} scenarios" if columns > 1 else "known lengths"
            growth = per_n_log_n(small, by[SIZES[-1], columns, first])
            targets.append(Target(f"{kind}: growth to {SIZES[-1]:,} over n log n", growth, most=1))
    show_targets(console, targets)
    save(
        "planner",
        {"clock": "process_time", "thin": THIN, "decisions": [vars(d) for d in decisions]},
        targets,
        console=console,
        quick=arguments.quick,
    )


if __name__ == "__main__":
    main()
