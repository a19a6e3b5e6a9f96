"""Time to recover from each kind of fault, and the work it costs: `python -m benchmarks.faults [--quick] [--times N]`.

Replayed engines and learner on a local cluster of several nodes: a run is struck once in its middle, next to one that is not.
What a real engine's or learner's start takes is not in these times; it is what `benchmarks.anatomy` measures.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.chaos import Chaos, compare, on_cluster, recipe, small_world
from benchmarks.results import Spread, Target, make_console, save, show_targets
from benchmarks.strikes import KINDS, Nodes, Strikes, Struck, quick_to_see_hangs, step_rows

STEPS = 8


class Once(Chaos):
    """Strikes in the middle of the run only."""

    def __call__(self, run: Strikes, moment: str) -> None:
        if run.step.number >= STEPS // 2 or self.done:
            super().__call__(run, moment)


def measure(folder: Path, nodes: Nodes, kind: str, times: int) -> dict[str, Any]:
    """Of the step that was struck and the ones after it, beyond what such a step takes in the run without."""
    world = small_world(folder)
    quiet = Struck(recipe(world, folder / "clean", STEPS), lambda run, moment: None)
    clean = on_cluster(nodes, quiet)
    usual_s = float(np.median([row["step_s"] for row in step_rows(quiet.folder.path)[2:]]))
    longer_s, lost_s, redone, wrong = [], [], [], 0
    for k in range(times):
        chaos = Once([kind], nodes, seed=k)
        run = Struck(recipe(world, folder / f"struck-{k}", STEPS), chaos)
        with quick_to_see_hangs():
            struck = on_cluster(nodes, run)
        rows = step_rows(run.folder.path)[STEPS // 2 - 1 :]
        wrong += sum(compare(struck, clean).values()) + len(chaos.kinds)
        longer_s.append(sum(row["step_s"] for row in rows) - usual_s * len(rows))
        lost_s.append(sum(row["rollout/lost_s"] for row in rows))
        redone.append(sum(row["faults/updates_redone"] for row in rows))
    return {
        "longer_s": Spread.of(longer_s), "generated_again_s": Spread.of(lost_s), "updates_redone": float(np.mean(redone)),
        "step_s": usual_s, "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="once, two kinds: shows that it runs, measures nothing")
    options = parser.parse_args()
    kinds = ["engine killed at work", "learner killed"] if options.quick else list(KINDS)
    console, found = make_console(), {}
    columns = ("fault", "longer, s", "generated again, engine-s", "updates again", "a step, s")
    table = Table(*columns, title="one fault each", title_justify="left")
    for kind in kinds:
        nodes = Nodes(3)
        try:
            with tempfile.TemporaryDirectory(prefix="rlhfless-faults-") as name:
                one = found[kind] = measure(Path(name), nodes, kind, 1 if options.quick else options.times)
        finally:
            nodes.close()
        times = (one["longer_s"].show(), one["generated_again_s"].show())
        table.add_row(kind, *times, f"{one['updates_redone']:.1f}", f"{one['step_s']:.2f}")
    console.print(table)
    wrong = sum(one["wrong"] for one in found.values())
    targets = [Target("samples, versions and strikes that were not as they should be", wrong, most=0)]
    show_targets(console, targets)
    save("faults", {"options": vars(options), "kinds": found}, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
