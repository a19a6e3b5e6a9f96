"""How many streams one driver carries: `python -m benchmarks.driver [--quick]`. Replayed engines, the real driver.

4,096 responses are decoded at once on replayed engines, and their tokens, log-probabilities and step records stream through
the driver. The clock is sped up until the driver is what the rollout waits for.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Self

import numpy as np
import psutil
from rich.table import Table

from benchmarks.common.replay import Script, finish_times
from benchmarks.common.replay_setup import build, logical_gpus, recipe_for, synthetic_lengths
from benchmarks.common.replayed_runtime import ReplayedRuntime
from benchmarks.common.results import make_console, save
from placement.speed.decode_speed import Speed
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.rollout_result import RolloutResult

BASE_S, PER_SEQ_S = 8.5e-3, 3e-5
LATE = 0.10  # a rollout this much longer than its model is one that waits for the driver


class Watched(ReplayedRuntime):
    """Measures the rollout alone: wall time, the driver's processor time, and what the model says it should take."""

    def __init__(self, recipe: Recipe, script: Script) -> None:
        super().__init__(recipe)
        self.script = script
        self.measured: list[dict[str, float]] = []

    def __enter__(self) -> Self:
        run = super().__enter__()
        stage = self.parts.stages.rollout
        self.unwatched, stage._run = stage._run, self.watched  # type: ignore[method-assign]
        return run

    def watched(self, driver: RolloutDriver, shares: list[np.ndarray]) -> RolloutResult:
        process, start = psutil.Process(), time.perf_counter()
        before = process.cpu_times()
        done = self.unwatched(driver, shares)
        wall_s = time.perf_counter() - start
        now = process.cpu_times()
        lengths = np.array([self.script.length(request) for request in driver.token_log.requests])
        self.measured.append(
            {
                "wall_s": wall_s,
                "driver_cpu_s": now.user + now.system - before.user - before.system,
                "tokens": int(lengths.sum()),
                "tokens_per_s": float(lengths.sum() / wall_s),
                "longest_alone_s": float(finish_times(np.array([lengths.max()]), Speed(BASE_S, PER_SEQ_S))[0] / self.script.clock),
            }
        )
        return done


def measure(folder: Path, clock: float, streams: int, engines: int, steps: int) -> list[dict[str, float]]:
    samples, max_tokens = 16, 2048
    lengths = synthetic_lengths(streams // samples, samples, max_tokens, seed=0)
    world = build(folder, lengths, base_s=BASE_S, per_seq_s=PER_SEQ_S, start_s=0.0, learn_s=0.0, clock=clock)
    recipe = recipe_for(
        world,
        folder,
        steps=steps,
        prompts=streams // samples,
        samples=samples,
        actors=engines,
        max_tokens=max_tokens,
        objective={"prefer": 1.0},
        functions={"slot": "gpu"},
    )
    script = Script.read({"replay.json": (world.policy / "replay.json").read_bytes()})
    with logical_gpus(engines), Watched(recipe, script) as run:
        for _ in run:
            pass
        return run.measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--clocks", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--quick", action="store_true", help="256 streams, one clock: shows that it runs, measures nothing")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.engines, options.clocks = 256, 2, [16]
    console = make_console()
    table = Table(
        "clock",
        "rollout, s",
        "at normal speed, s",
        "tokens/s",
        "driver, s of a core",
        "share of a core",
        title=f"{options.streams} streams on {options.engines} replayed engines through one driver",
        title_justify="left",
    )
    found: dict[float, dict[str, float]] = {}
    for clock in options.clocks:
        with tempfile.TemporaryDirectory(prefix="rlhfless-driver-") as name:
            rounds = measure(Path(name), clock, options.streams, options.engines, steps=3)[1:]  # the first starts processes
        one = {key: float(np.median([r[key] for r in rounds])) for key in rounds[0]}
        one["script_s"] = one["wall_s"] * clock
        one["core_share"] = one["driver_cpu_s"] / one["wall_s"]
        found[clock] = one
        table.add_row(
            f"{clock:g}×",
            f"{one['wall_s']:.2f}",
            f"{one['script_s']:.1f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['driver_cpu_s']:.2f}",
            f"{one['core_share']:.0%}",
        )
    console.print(table)
    real = found[min(found)]["script_s"]
    most = max(clock for clock, one in found.items() if one["script_s"] <= (1 + LATE) * real)
    late = [clock for clock in found if clock > most]  # beyond it; below, a round may have been held up
    enough = found[most]["tokens_per_s"]
    told = (
        f"one driver carries {enough:,.0f} tokens/s ({most:g}×); at {min(late):g}× the rollout is more than {LATE:.0%} late"
        if late
        else f"one driver carries {enough:,.0f} tokens/s, the most that was tried"
    )
    console.print(told, highlight=False)
    content = {"replayed": True, "options": vars(options), "clocks": found, "verdict": told}
    save("driver", content, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
