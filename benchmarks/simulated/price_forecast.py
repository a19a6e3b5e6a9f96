"""What a forecast of the market gains (simulated): `python -m benchmarks.simulated.price_forecast [--quick]`.

Each run tells the pool when its stage ends and what it will bid in its next one, so every run can see the slots that it will have then.
Devices that will soon go to another run are worth less to it: they need their set-up, and work for a shorter time than the stage lasts.
`forecast`: runs expect of a stage what it was in the step before. `known`: they know all stages exactly, which no forecast can exceed.
"""

from __future__ import annotations

import argparse
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from benchmarks.common.results import make_console, save
from benchmarks.simulated.pool_policies import Market, _expected
from benchmarks.simulated.shared_pool import CASES, PREFER, runs_of
from benchmarks.simulated.simulate_pool import PoolOutcome, Progress, simulate_pool
from placement.market import Bid

USED = ("16 L40S, GRPO", "16 L40S, few arrivals")
AHEAD = 4  # ends of stages that are looked ahead
FIGURES = ("work_per_slot_s", "work_per_paid_s", "makespan_s", "time_p50_s")


@dataclass
class Forecasting(Market):
    """A market whose bids count only the time until another run is expected to take the devices."""

    known: bool = False

    def bids(self, runs: Sequence[Progress]) -> list[Bid]:
        points = {progress.run.name: self._points(progress) for progress in runs}
        bids = {name: self.bid(name, of_run) for name, of_run in points.items()}
        held = self.clear(list(bids.values()), {progress.run.name: progress.slots for progress in runs}).slots
        ends = sorted((seconds_on(points[progress.run.name], held[progress.run.name]), progress.run.name) for progress in runs)
        later, by_name, path = dict(bids), {progress.run.name: progress for progress in runs}, []
        for end_s, name in ends[:AHEAD]:
            later.pop(name)
            if next_points := self._next(by_name[name]):
                later[name] = self.bid(name, next_points)
            if not later:
                break
            held = self.clear(list(later.values()), {run: slots for run, slots in held.items() if run in later and run != name}).slots
            path.append((end_s, held))
        return [self._for_a_while(bid, points[name], path) for name, bid in bids.items()]

    def _points(self, progress: Progress) -> list[tuple[int, float]]:
        stage = progress.stage
        points = list(zip(stage.slots, stage.seconds, strict=True)) if self.known else _expected(progress)
        return [(slots, seconds * progress.left) for slots, seconds in points]

    def _next(self, progress: Progress) -> list[tuple[int, float]]:
        """Return the devices and seconds of a run's next stage, as far as it knows them; none after its last."""
        step, part = progress.step, progress.part + 1
        if part == len(progress.run.steps[step]):
            step, part = step + 1, 0
        if step == len(progress.run.steps):
            return []
        return self._points(replace(progress, step=step, part=part, left=1.0))

    def _for_a_while(self, bid: Bid, points: Sequence[tuple[int, float]], path: Sequence[tuple[float, dict[str, int]]]) -> Bid:
        """Return the bid with each number of devices worth its share of the time until the run is expected to have fewer."""
        worth = [0.0]
        for (_, before), (slots, now) in itertools.pairwise(zip(bid.slots, bid.worth, strict=True)):
            seconds = seconds_on(points, slots)
            until_s = next((end_s for end_s, held in path if end_s < seconds and held.get(bid.run, slots) < slots), seconds)
            worth.append(worth[-1] + (now - before) * max(0.05, until_s / seconds))
        return replace(bid, worth=tuple(worth))


def seconds_on(points: Sequence[tuple[int, float]], slots: int) -> float:
    return points[max(0, bisect_right([count for count, _ in points], slots) - 1)][1]


def figures(outcome: PoolOutcome) -> list[float]:
    return [outcome.work_per_slot_s, outcome.work_per_paid_s, outcome.makespan_s, float(np.median(outcome.times_s))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case: shows that it runs")
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    console, found = make_console(), {}
    table = Table("pool", "bids", *FIGURES, title="over today's bids: mean, and range over seeds")
    for name in USED[:1] if options.quick else USED:
        case = replace(CASES[name], runs=4, steps=2) if options.quick else CASES[name]
        each: dict[str, list[list[float]]] = {"today": [], "forecast": [], "known": []}
        for seed in range(2, 3 if options.quick else 2 + options.seeds):
            runs, n = runs_of(case, seed), case.devices
            policies = {"today": Market(n, PREFER), "forecast": Forecasting(n, PREFER), "known": Forecasting(n, PREFER, known=True)}
            for bids, policy in policies.items():
                each[bids].append(figures(simulate_pool(runs, n, policy)))
        found[name] = {bids: dict(zip(FIGURES, np.transpose(rows).tolist(), strict=True)) for bids, rows in each.items()}
        for bids in ("forecast", "known"):
            over = np.array(each[bids]) / np.array(each["today"]) - 1
            cells = (f"{one.mean():+.2%} ({one.min():+.2%} to {one.max():+.2%})" for one in over.T)
            table.add_row(name, bids, *cells)
    console.print(table)
    save("price_forecast", {"cases": found, "seeds": options.seeds}, [], console=console, quick=options.quick)


if __name__ == "__main__":
    main()
