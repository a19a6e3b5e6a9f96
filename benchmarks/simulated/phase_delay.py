"""What runs of a pool gain by putting off updates (simulated): `python -m benchmarks.simulated.phase_delay [--quick]`.

Runs alternate between a rollout, which grows and shrinks, and an update, which keeps the slots with which it begins. A rollout gives back
slots above its run's share once another run has waited for them for GIVE_S. Three rules for the beginning of an update:

- `at once`: on the slots that there are
- `own`: as `placement.scaling.phase_delay`, for slots of the run's share that others hold
- `any`: also for slots beyond its share; it knows exactly when others end, and waits without a limit
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import make_console, save
from placement.scaling.phase_delay import delay
from rlhfless_ray.autoscaler.market_bids import GIVE_S

RULES = ("at once", "own", "any")
TICK_S = 0.05
RESPONSES, MEDIAN, SIGMA, MOST = 64, 300, 0.6, 1200  # of a rollout; lengths in tokens
BASE_S, PER_SEQ_S = 0.02, 0.064  # of a decode step: for an engine, and for each of its sequences, over the slots of the pool
STEPS = 12


@dataclass(frozen=True)
class DelayCase:
    """Runs on a pool. `update_s`: of an update on one slot. `serial`: share of it that more slots do not shorten. `value`: of a second."""

    runs: int
    slots: int
    update_s: float
    serial: float
    value: float

    @property
    def share(self) -> int:
        return self.slots // self.runs

    def seconds(self, slots: int) -> float:
        return self.update_s * (self.serial + (1 - self.serial) / slots)

    @property
    def points(self) -> list[tuple[int, float]]:
        """Slots and seconds of an update, up to the number that costs least."""
        best = min(range(1, self.slots + 1), key=lambda n: ((n + self.value) * self.seconds(n), n))
        return [(n, self.seconds(n)) for n in range(1, best + 1)]


@dataclass
class Run:
    case: DelayCase
    rng: np.random.Generator
    kind: str = ""
    held: int = 0
    token: float = 0.0
    aim: int = 0  # slots that its update waits for
    until_s: float = 0.0  # when it begins with fewer
    left_s: float = 0.0  # of its update
    asked_s: float = 0.0  # since when others wait for its slots
    waits: int = 0
    slot_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)

    def begin_rollout(self) -> None:
        lengths = self.rng.lognormal(np.log(MEDIAN), SIGMA, RESPONSES).astype(int).clip(1, MOST)
        self.kind, self.lengths, self.token = "rollout", np.sort(lengths), 0.0

    def live(self, token: float) -> int:
        return RESPONSES - int(np.searchsorted(self.lengths, token, side="right"))

    def step_s(self, live: int, slots: int) -> float:
        return BASE_S + PER_SEQ_S / self.case.slots * np.ceil(live / slots)

    def wanted(self, token: float) -> int:
        """The slots with which a decode step costs least."""
        best = (self.case.value * PER_SEQ_S / self.case.slots * self.live(token) / BASE_S) ** 0.5
        return int(np.clip(round(best), 1, self.case.slots))

    @property
    def wants(self) -> int:
        return {"rollout": self.wanted(self.token), "wait": self.aim}.get(self.kind, self.held)

    def releases(self, to_share: bool) -> list[tuple[float, int]]:
        """When it gives back how many slots, if it gets no more. `to_share`: another run waits for those above its share."""
        if self.kind == "update":
            return [(self.left_s, self.held - 1)]
        found, token, seconds, held = [], self.token, 0.0, self.held
        while self.kind == "rollout" and held and (live := self.live(token)):
            wanted = min(held, self.wanted(token), self.case.share if to_share and seconds >= GIVE_S else held)
            if wanted < held:
                found.append((seconds, held - wanted))
                held = wanted
            token, seconds = token + TICK_S / self.step_s(live, held), seconds + TICK_S
        return found


def divide(runs: Sequence[Run], case: DelayCase, now_s: float) -> None:
    """Hand slots from rollouts to runs below their share, and free slots to all who want some."""
    for run in runs:
        if run.kind == "rollout":
            run.held = min(run.held, run.wants)
    free = case.slots - sum(run.held for run in runs)
    missing = sum(max(0, min(run.wants, case.share) - run.held) for run in runs) - free
    for run in sorted(runs, key=lambda run: -run.held):
        if missing <= 0 or run.kind != "rollout" or run.held <= case.share:
            run.asked_s = now_s
        elif now_s - run.asked_s >= GIVE_S:
            given = min(run.held - case.share, missing)
            run.held, missing, free = run.held - given, missing - given, free + given
    for run in sorted(runs, key=lambda run: (run.held >= min(run.wants, case.share), run.held)):
        got = min(free, max(0, run.wants - run.held)) if run.kind != "update" else 0
        run.held, free = run.held + got, free - got


def begin_update(run: Run, runs: Sequence[Run], rule: str, now_s: float) -> None:
    """Decide how many slots an update waits for, and how long."""
    case, others = run.case, [other for other in runs if other is not run]
    points, have = run.case.points, max(1, case.slots - sum(other.held for other in others))
    have = min(have, points[-1][0])
    run.kind, run.aim, run.until_s = "wait", have, now_s
    if rule == "own" and have < min(case.share, points[-1][0]):
        above = [other for other in others if other.held > case.share]
        due = [(GIVE_S if other.kind == "rollout" else other.left_s, other.held - case.share) for other in above]
        found = delay([point for point in points if point[0] <= case.share], have, due, case.value)
        run.aim, run.until_s = found.slots, now_s + found.seconds
    elif rule == "any":
        lacks = have < min(case.share, points[-1][0])
        due = sorted(one for other in others for one in other.releases(lacks))
        best = (have + case.value) * case.seconds(have)
        there = have
        for in_s, slots in due:
            there = min(there + slots, points[-1][0])
            cost = have * in_s + there * case.seconds(there) + case.value * (in_s + case.seconds(there))
            if cost < best and in_s + case.seconds(there) < case.seconds(have):
                best, run.aim, run.until_s = cost, there, now_s + in_s
    run.waits += run.until_s > now_s
    run.held = min(run.held, run.aim)


def simulate(case: DelayCase, rule: str, seed: int) -> dict[str, float]:
    """Return seconds and slot-seconds of a step, and the share of updates that were put off."""
    runs = [Run(case, np.random.default_rng([seed, number])) for number in range(case.runs)]
    for number, run in enumerate(runs):
        run.begin_rollout()
        run.token = number * MEDIAN / 2  # out of step
    now_s = 0.0
    while min(len(run.ends_s) for run in runs) < STEPS:
        divide(runs, case, now_s)
        for run in runs:
            if run.kind == "wait" and run.held and (run.held >= run.aim or now_s >= run.until_s):
                run.kind, run.left_s = "update", case.seconds(run.held)
            run.slot_s += run.held * TICK_S
            if run.kind == "update":
                run.left_s -= TICK_S
                if run.left_s <= 0:
                    run.ends_s.append(now_s)
                    run.begin_rollout()
            elif run.kind == "rollout" and run.held:
                run.token += TICK_S / run.step_s(run.live(run.token), run.held)
                if not run.live(run.token):
                    begin_update(run, runs, rule, now_s)
        now_s += TICK_S
    steps = sum(len(run.ends_s) for run in runs)
    return {
        "step_s": float(np.mean([(run.ends_s[STEPS - 1] - run.ends_s[0]) / (STEPS - 1) for run in runs])),
        "slot_s": sum(run.slot_s for run in runs) / steps,
        "put_off": sum(run.waits for run in runs) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case: shows that it runs")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console, rows = make_console(), []
    heads = ("runs", "slots", "update on one slot, s", "serial", "value", "step at once, s")
    table = Table(*heads, *(f"{rule}: step, put off" for rule in RULES[1:]))
    cases = [DelayCase(*one) for one in itertools.product((2, 4), (8, 16), (20.0, 80.0), (0.05, 0.2), (1.0, 9.0))]
    for case in cases[:1] if options.quick else cases:
        found: dict[str, Any] = {}
        for rule in RULES:
            each = [simulate(case, rule, seed) for seed in range(1 if options.quick else options.seeds)]
            found[rule] = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
        rows.append({**vars(case), "rules": found})
        usual = found["at once"]["step_s"]
        more = (f"{found[rule]['step_s'] / usual - 1:+.1%}, {found[rule]['put_off']:.0%}" for rule in RULES[1:])
        table.add_row(*(f"{value:g}" for value in vars(case).values()), f"{usual:.1f}", *more)
    console.print(table)
    save("phase_delay", {"cases": rows, "seeds": options.seeds, "give_s": GIVE_S}, [], console=console, quick=options.quick)


if __name__ == "__main__":
    main()
