"""Time to recover from each kind of fault, and the work it costs: `python -m benchmarks.faults [--quick] [--times N]`.

Replayed engines and learner on a local cluster of several nodes: a run is struck once in its middle, next to one that is not. The
cluster and the run without are the same for all kinds.
What a real engine's or learner's start takes is not in these times; it is what `benchmarks.common.ledger_anatomy` measures.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.chaos import compare, on_cluster, quiet_ray, recipe, small_world, told_now
from benchmarks.common.fault_injection import KINDS, Chaos, FaultInjector, InjectedFault, Nodes, quick_to_see_hangs, step_rows
from benchmarks.common.replay_setup import ReplaySetup
from benchmarks.common.results import Spread, Target, make_console, save, show_targets

STEPS = 6


class Once(Chaos):
    """Strikes in the middle of the run only."""

    def __call__(self, run: FaultInjector, moment: str) -> None:
        if run.parts.session.step.number >= STEPS // 2 or self.done:
            super().__call__(run, moment)


def runs(folder: Path, nodes: Nodes, kinds: list[str], times: int, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Return by kind how much longer the struck step and those after it take than steps without a fault.

    A kind that ends the run has the reason.
    """
    world, found = small_world(folder), {}
    quiet = InjectedFault(recipe(world, folder / "clean", STEPS), lambda run, moment: None)
    clean = on_cluster(nodes, quiet)
    usual_s = float(np.median([row["step_s"] for row in step_rows(quiet.folder.path)[1:]]))
    for kind in kinds:
        try:
            found[kind] = measure(world, folder / kind.replace(" ", "-"), nodes, kind, times, clean) | {"step_s": usual_s}
        except Exception as error:
            found[kind] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc().splitlines()}
        say(f"{kind}: {found[kind].get('failed', 'done')}")
    for one in found.values():
        if "longer_s" in one:
            one["longer_s"] = Spread.of(seconds - usual_s * steps for seconds, steps in one["longer_s"])
    return found


def measure(world: ReplaySetup, folder: Path, nodes: Nodes, kind: str, times: int, clean: dict[str, Any]) -> dict[str, Any]:
    """`longer_s`: seconds from the struck step on, and for how many steps."""
    longer_s, lost_s, redone, wrong = [], [], [], 0
    for k in range(times):
        nodes.settle()
        chaos = Once([kind], nodes, seed=k)
        run = InjectedFault(recipe(world, folder / str(k), STEPS), chaos)
        with quick_to_see_hangs():
            struck = on_cluster(nodes, run)
        rows = step_rows(run.folder.path)[STEPS // 2 - 1 :]
        wrong += sum(compare(struck, clean).values()) + len(chaos.kinds)
        longer_s.append((sum(row["step_s"] for row in rows), len(rows)))
        lost_s.append(sum(row["rollout/lost_s"] for row in rows))
        redone.append(sum(row["faults/updates_redone"] for row in rows))
    return {"longer_s": longer_s, "generated_again_s": Spread.of(lost_s), "updates_redone": float(np.mean(redone)), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="once, two kinds: shows that it runs, measures nothing")
    options = parser.parse_args()
    kinds = ["engine killed at work", "learner killed"] if options.quick else list(KINDS)
    quiet_ray()
    console = make_console()
    nodes = Nodes(3)
    try:
        with tempfile.TemporaryDirectory(prefix="rlhfless-faults-") as name:
            found = runs(Path(name), nodes, kinds, 1 if options.quick else options.times, partial(told_now, console, "faults"))
    finally:
        nodes.close()
    columns = ("fault", "longer, s", "generated again, engine-s", "updates again", "a step, s")
    table = Table(*columns, title="one fault each", title_justify="left")
    for kind, one in found.items():
        if "failed" in one:
            table.add_row(kind, "failed", one["failed"][:80], "", "")
            continue
        times = (one["longer_s"].show(), one["generated_again_s"].show())
        table.add_row(kind, *times, f"{one['updates_redone']:.1f}", f"{one['step_s']:.2f}")
    console.print(table)
    targets = [
        Target("kinds of faults that ended a run", sum("failed" in one for one in found.values()), most=0),
        Target("samples, versions and strikes that were not as they should be", sum(o.get("wrong", 0) for o in found.values()), most=0),
    ]
    show_targets(console, targets)
    save("faults", {"options": vars(options), "kinds": found}, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
