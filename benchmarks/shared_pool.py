"""What runs gain by one pool: `python -m benchmarks.shared_pool [--runs N] [--replayed] [--day] [--draw] [--quick]`.

The same runs in four ways: one after the other, each with its part of the machine, side by side in Ray's queue (`cluster.pool: false`), and
sharing the pool. By default runs of the built-in tasks with real engines on this machine's cores. `--replayed`: replayed engines and
learners (made-up lengths, modelled speed, real time) on logical GPUs. `--slowdown 4` replays a model that takes four times as long for each
step and update: with a quick one, few cores measure themselves instead of the pool. `--day`: runs arrive, stop and are killed at random.
`--draw` draws docs/images/shared_pool.svg again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.charts import save_svg, svg_pyplot
from benchmarks.common.replay_setup import build, logical_gpus, recipe_for, synthetic_lengths
from benchmarks.common.results import FOLDER, Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import end_process, end_with_parent, read_metrics
from rlhfless_ray.functions.ledger import Row, read_ledger
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.slot_pool import find_pools
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.recipe import Recipe

WAYS = {"queue": "one after the other", "parts": "each its part", "unshared": "Ray's queue", "shared": "one pool"}
# task, hidden size, prompts, response tokens, steps; every second run is short
REAL = [("chain", 128, 32, 128, 30), ("sort", 64, 32, 64, 20), ("chain", 64, 32, 96, 20), ("sort", 128, 24, 64, 12)]
BASE_S, PER_SEQ_S = 8.5e-3, 3e-5  # a 3 B model's decode step on one L40S, as in `control`
LIMIT_S = 1800.0
STORE_MB = 512
EPS_S = 0.002  # of clocks
SHORT_S = 1.0  # a longer pause of a slot between two runs was no hand-over: nobody waited
RUN_FILE = "started.json"  # in a run's folder: when its ledger began
PICTURE = ROOT / "docs" / "images" / "shared_pool.svg"
COLOURS = [("#2f6fd0", "#9dbdf0"), ("#dc7f14", "#f3c48d")]  # of a run: engines, learner and others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replayed", action="store_true", help="replayed engines and learners on logical GPUs")
    parser.add_argument("--gpus", type=int, default=32, help="logical GPUs")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--slowdown", type=float, default=1.0, help="factor of the replayed model's times")
    parser.add_argument("--ways", default=",".join(WAYS), help="which, separated by commas")
    parser.add_argument("--day", action="store_true", help="runs that arrive, stop and are killed at random (replayed)")
    parser.add_argument("--seed", type=int, default=0, help="of the day")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw the picture again")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, measures nothing")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_one(options.run, options.replayed)
        return
    if options.draw:
        draw(json.loads((FOLDER / "shared_pool_2.json").read_text())["shown"], PICTURE)
        return
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="rlhfless-shared-") as name:
        if options.day:
            content, targets = day(Path(name), options)
            show_targets(console, targets)
            save("shared_pool_day", content, targets, console=console, quick=options.quick)
            return
        slots = (4 if options.quick else options.gpus) if options.replayed else len(os.sched_getaffinity(0))
        ways = [way for way in options.ways.split(",") if way != "parts" or slots >= options.runs]
        found = {way: measure(Path(name) / way, way, slots, options) for way in ways}
        shown = shown_leases(Path(name) / "shared", options.runs) if "shared" in found and not options.replayed else None
        learned = same_learned(Path(name), options.runs) if {"queue", "shared"} <= set(found) and not options.replayed else None
    columns = "last run ends, s", "each run, s", "held slot-s", "hand-overs", "waits for slots"
    table = Table("", *columns, title=f"{options.runs} runs on {slots} slots")
    for way, result in found.items():
        each = " ".join(f"{run['wall_s']:.1f}" for run in result["runs"])
        held = f"{sum(run['held_slot_s'] for run in result['runs']):.0f}"
        passed = f"{result['handovers']} ({1e3 * result['handover_s'].median:.0f} ms)" if result["handovers"] else ""
        waits = " ".join(str(run["waited"]) for run in result["runs"]) if way == "shared" else ""
        table.add_row(WAYS[way], f"{result['end_s']:.1f}", each, held, passed, waits)
    console.print(table)
    targets = targets_of(found, options.runs) if "shared" in found else []
    if learned is not None:
        targets.append(Target("difference of the learned weights, over what was learned", learned, most=1e-3))
    show_targets(console, targets)
    content = {"replayed": options.replayed, "slots": slots, "options": vars(options), "ways": found, "learned": learned, "shown": shown}
    slower = f"_slower_{options.slowdown:g}" if options.slowdown != 1.0 else ""
    name = f"shared_pool_{'replayed_' if options.replayed else ''}{options.runs}{slower}"
    save(name, content, targets, console=console, quick=options.quick)
    if shown and options.runs == 2 and not options.quick:
        draw(shown, PICTURE)


def targets_of(found: dict[str, Any], runs: int) -> list[Target]:
    """The work is the same in every way, and the slots are there until the last run ends, so work per slot-second follows from it."""
    shared, targets = found["shared"], []
    for way, least in (("parts", 1.3 if runs == 2 else 1.5), ("queue", 1.0), ("unshared", 1.0)):
        if way in found:
            targets.append(Target(f"work per slot-second, over {WAYS[way]}", found[way]["end_s"] / shared["end_s"], least=least, unit="×"))
    if "parts" in found:
        slowest = max(mine["wall_s"] / part["wall_s"] for mine, part in zip(shared["runs"], found["parts"]["runs"], strict=True))
        targets.append(Target("slowest run, over its part alone", slowest, most=1.0, unit="×"))
    handover = Target("a hand-over, median", 1e3 * shared["handover_s"].median, most=50.0, unit=" ms")
    return [*targets, handover, Target("slots with two holders", shared["overlaps"], most=0), _paid(shared)]


def _paid(shared: dict[str, Any]) -> Target:
    return Target("ledgers of the runs, beside the pool's: difference", shared["paid_off"], most=0.01)


# ---- running ------------------------------------------------------------------------------------------------------


def run_one(recipe: str, replayed: bool) -> None:
    """One run, as a process of its own. It writes down when its ledger began."""
    from benchmarks.common.replayed_runtime import ReplayedRuntime
    from rlhfless_ray import Runtime
    from rlhfless_ray.cli.guarded import guarded

    def train() -> None:
        with (ReplayedRuntime if replayed else Runtime)(Recipe.load(recipe)) as run:
            (run.folder.path / RUN_FILE).write_text(json.dumps(run.leases.ledger.started_s))
            for _ in run:
                pass

    guarded(train)


@dataclass
class Process:
    """A run's process, and what became of it. `wall_s` is 0 while it works."""

    folder: Path
    name: str
    replayed: bool
    began_s: float = field(default_factory=time.monotonic)
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"
        more = ["--replayed"] if self.replayed else []
        command = [sys.executable, "-m", "benchmarks.shared_pool", "--run", str(self.folder / f"{self.name}.yaml"), *more]
        with self.log.open("w") as file:
            how: dict[str, Any] = {"cwd": ROOT, "stdout": file, "stderr": subprocess.STDOUT, "preexec_fn": end_with_parent}
            self.process = subprocess.Popen(command, **how)

    def has_ended(self) -> bool:
        if self.process.poll() is not None and not self.wall_s:
            self.wall_s = time.monotonic() - self.began_s
        return bool(self.wall_s)


def together(processes: list[Process]) -> list[float]:
    """Wait for processes. Returns the seconds that each took. Raises RuntimeError if one fails."""
    try:
        ended = False
        while not ended:
            time.sleep(0.05)
            ended = all([one.has_ended() for one in processes])
            for one in processes:
                if one.process.returncode:
                    raise RuntimeError(f"{one.name}: exit code {one.process.returncode}: {one.log.read_text()[-1500:]}")
            if time.monotonic() - processes[0].began_s > LIMIT_S:
                raise RuntimeError(f"the runs took longer than {LIMIT_S:.0f} s")
    finally:
        for one in processes:
            end_process(one.process)
    return [one.wall_s for one in processes]


class Cluster:
    """A Ray of its own, and a pool that outlives its runs. On cores it is the Ray that a sweep starts for its runs."""

    def __init__(self, slots: int, replayed: bool, pool: bool) -> None:
        self.slots, self.replayed, self.pool = slots, replayed, pool
        self.resource = "gpu" if replayed else "cpu"
        self.ray = ExitStack()

    def __enter__(self) -> Cluster:
        import ray

        if self.replayed:
            self.ray.enter_context(logical_gpus(self.slots, STORE_MB))
        else:
            recipe = Recipe.load(ROOT / "recipes" / "quickstart.yaml", [f"cluster.cpus={self.slots}"])
            self.ray.enter_context(RayCluster(recipe, store_mb=STORE_MB, architectures=()).running())
        self.address = ray.get_runtime_context().gcs_address
        self.watch = PoolClient(self.resource, RunInfo("watch", share=0.0, least=0)) if self.pool else None
        return self

    def status(self) -> dict[str, Any]:
        import ray

        return ray.get(find_pools()[0].status.remote(), timeout=30.0) if self.pool else {"handovers": 0, "past": []}

    def __exit__(self, *error: Any) -> None:
        if self.watch is not None:
            self.watch.close()
        self.ray.close()


def measure(folder: Path, way: str, slots: int, options: Any) -> dict[str, Any]:
    """Run all runs in one way."""
    folder.mkdir()
    most = max(1, slots // options.runs) if way == "parts" else slots
    with Cluster(slots, options.replayed, way == "shared") as cluster:
        make = replayed if options.replayed else real
        names = [f"run{number}" for number in range(options.runs)]
        for number, name in enumerate(names):
            (folder / f"{name}.yaml").write_text(make(folder, number, cluster.address, most, way == "shared", options).to_yaml())
        began_s = time.monotonic()
        if way == "queue":
            walls_s = [wall_s for name in names for wall_s in together([Process(folder, name, options.replayed)])]
        else:
            walls_s = together([Process(folder, name, options.replayed) for name in names])
        end_s, status = time.monotonic() - began_s, cluster.status()
    runs = [{"wall_s": wall_s, **summary(folder / "runs" / name)} for name, wall_s in zip(names, walls_s, strict=True)]
    return {"end_s": end_s, "runs": runs, "handovers": status["handovers"], **audit([folder / "runs" / name for name in names], status)}


def real(folder: Path, number: int, address: str, most: int, pool: bool, options: Any) -> Recipe:
    """A run of a built-in task."""
    quick = options.quick
    task, width, prompts, tokens, steps = REAL[number % len(REAL)]
    return Recipe.parse(
        {
            "run": {"name": f"run{number}", "root": str(folder / "runs"), "steps": 2 if quick else steps, "seed": number},
            "policy": {"hidden_size": width, "layers": 2},
            "prompts": {"task": task, "batch_prompts": 8 if quick else prompts},
            "rollout": {"samples_per_prompt": 8, "max_tokens": 24 if quick else tokens, "max_actors": most, "kv_cache_mb": 128},
            "reward": {"function": "task"},
            "evaluate": {"prompts": 0},
            "learner": {"max_slots_per_rank": most},
            "objective": {"prefer": 0.8},
            "checkpoint": {"every_steps": 10**6},
            "cluster": {"address": address, "pool": pool},
            "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},
        }
    )


def replayed(folder: Path, number: int, address: str, most: int, pool: bool, options: Any, **sections: Any) -> Recipe:
    """Runs of different length: responses and updates of every second one take a third of the time."""
    quick, slowdown = options.quick, options.slowdown
    prompts, samples, tokens = (16, 4, 256) if quick else (64, 16, 1024 if number % 2 == 0 else 350)
    own = folder / f"world{number}"
    own.mkdir()
    lengths = synthetic_lengths(4 * prompts, samples, tokens, seed=number)
    learn_s = slowdown * (1.0 if quick else (8.0, 3.0)[number % 2])
    world = build(own, lengths, base_s=slowdown * BASE_S, per_seq_s=slowdown * PER_SEQ_S, start_s=1.0, learn_s=learn_s, clock=1.0)
    return recipe_for(
        world,
        folder,
        steps=3 if quick else (4, 8)[number % 2],
        prompts=prompts,
        samples=samples,
        actors=most,
        max_tokens=tokens,
        run={"name": f"run{number}", "seed": number},
        objective={"prefer": 0.9},
        functions={"slot": "gpu"},
        cluster={"address": address, "pool": pool},
        **sections,
    )


# ---- the day --------------------------------------------------------------------------------------------------------


def day(folder: Path, options: Any) -> tuple[dict[str, Any], list[Target]]:
    """Let runs arrive at random. Some are stopped, some killed. Returns what became of them, and the targets."""
    rng, slots = random.Random(options.seed), 8
    count, between_s = (4, 2.0) if options.quick else (16, 12.0)
    fates = [rng.choices(("ends", "stopped", "killed"), (0.5, 0.25, 0.25))[0] for _ in range(count)]
    arrivals = np.cumsum([rng.expovariate(1 / between_s) for _ in range(count)])
    hits_s = {number: rng.uniform(10.0, 40.0) for number in range(count) if fates[number] != "ends"}
    processes: list[Process] = []
    with Cluster(slots, True, True) as cluster:
        small = argparse.Namespace(**{**vars(options), "quick": True})
        recipes = [replayed(folder, number, cluster.address, 4, True, small) for number in range(count)]
        for number, recipe in enumerate(recipes):
            (folder / f"run{number}.yaml").write_text(
                recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 6})}).to_yaml()
            )
        began_s = time.monotonic()
        while len(processes) < count or not all([one.has_ended() for one in processes]):
            now = time.monotonic()
            if now - began_s > LIMIT_S:
                raise RuntimeError(f"the day took longer than {LIMIT_S:.0f} s")
            if len(processes) < count and now - began_s > arrivals[len(processes)]:
                processes.append(Process(folder, f"run{len(processes)}", True))
            for number, one in enumerate(processes):
                if now - one.began_s > hits_s.get(number, LIMIT_S) and not one.has_ended():
                    del hits_s[number]
                    one.process.send_signal(signal.SIGKILL if fates[number] == "killed" else signal.SIGINT)
            time.sleep(0.1)
        end_s = time.monotonic() - began_s
        eventually(lambda: [run["name"] for run in cluster.status()["runs"]] == ["watch"], 60.0)
        status = cluster.status()
    codes = {one.name: one.process.returncode for one in processes}
    bad = [one.name for one, fate in zip(processes, fates, strict=True) if fate == "ends" and codes[one.name] != 0]
    if bad:
        raise RuntimeError(f"{bad[0]}: {(folder / f'{bad[0]}.log').read_text()[-1500:]}")
    folders = [folder / "runs" / one.name for one in processes]  # a run that was ended at its start has no ledger
    whole = [one for one in folders if (one / RUN_FILE).exists() and (one / "ledger.csv").exists()]
    found = audit(whole, {**status, "past": [past for past in status["past"] if fates[int(past["name"][3:])] != "killed"]})
    content = {
        "runs": count,
        "slots": slots,
        "seed": options.seed,
        "end_s": end_s,
        "fates": fates,
        "handovers": status["handovers"],
        **found,
    }
    targets = [
        Target("slots held when all have ended", status["held"], most=0),
        Target("slots with two holders", found["overlaps"], most=0),
        _paid(found),
    ]
    return content, targets


def eventually(what: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise RuntimeError(f"runs are left on the pool after {seconds:.0f} s")
        time.sleep(0.2)


# ---- reading what came of it ------------------------------------------------------------------------------------------


def leases_of(run: Path) -> list[tuple[float, Row]]:
    """Return the leased rows of a run's ledger, each with the time of its begin, in seconds since the epoch."""
    began_s = float(json.loads((run / RUN_FILE).read_text()))
    return [
        (began_s + row.from_s, row) for row in read_ledger(run / "ledger.csv") if row.slots and row.activity not in ("parked", "unleased")
    ]


def audit(runs: list[Path], status: dict[str, Any]) -> dict[str, Any]:
    """Compare the ledgers of all runs: slots with two holders, times of hand-overs, and what the pool says they paid.

    Rows of a run that was killed may be missing; the pool's figure of it is not compared.
    """
    by_slot: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    paid: dict[str, float] = {}
    for run in runs:
        for from_s, row in leases_of(run):
            by_slot.setdefault((row.node, row.device), []).append((from_s, from_s + row.seconds, run.name))
            paid[run.name] = paid.get(run.name, 0.0) + row.seconds * row.slots
    gaps, overlaps = [], 0
    for intervals in by_slot.values():
        for (_, end_s, giver), (from_s, _, taker) in pairwise(sorted(intervals)):
            if giver != taker:
                overlaps += from_s < end_s - EPS_S
                gaps += [max(0.0, from_s - end_s)] if from_s - end_s < SHORT_S else []
    past = {one["name"]: one["slot_s"] for one in status["past"] if one["name"] in paid}
    counted, booked = sum(past.values()), sum(paid[name] for name in past)
    return {"handover_s": Spread.of(gaps), "overlaps": overlaps, "paid_off": abs(booked / counted - 1) if counted else 0.0}


def _reasons(row: dict[str, Any]) -> list[str]:
    """Return what a step's rollout and update say of slots that other runs give back."""
    return [row.get("pool/wait_reason", ""), row.get("pool/learn_reason", "")]


def summary(run: Path) -> dict[str, Any]:
    rows = read_metrics(run)
    taken, given = (sum(row.get(f"shared/slots_{what}", 0) for row in rows) for what in ("taken", "given"))
    last = rows[-1]
    return {
        "steps": last["step"],
        "held_slot_s": last["cost/total_full_slot_s"],
        "taken": taken,
        "given": given,
        "waited": sum(reason.startswith("waits for") for row in rows for reason in _reasons(row)),
        "lent_slot_s": last.get("shared/lent_slot_s", 0.0),
        "borrowed_slot_s": last.get("shared/borrowed_slot_s", 0.0),
    }


def same_learned(folder: Path, runs: int) -> float:
    """Return the largest difference of learned weights, shared and alone, over the largest weight."""
    from safetensors.numpy import load_file

    worst = 0.0
    for number in range(runs):
        alone, shared = (
            load_file(next((folder / way / "runs" / f"run{number}" / "model").glob("*.safetensors"))) for way in ("queue", "shared")
        )
        scale = max(np.abs(value.astype(np.float32)).max() for value in alone.values())
        off = max(np.abs(alone[name].astype(np.float32) - shared[name].astype(np.float32)).max() for name in alone)
        worst = max(worst, float(off / scale))
    return worst


def shown_leases(folder: Path, runs: int, seconds: float = 12.0) -> list[dict[str, Any]]:
    """Return who had which slot while all runs worked, and after the first of them had ended, for the picture."""
    leased = [[(from_s, row) for from_s, row in leases_of(folder / "runs" / f"run{number}") if row.step > 0] for number in range(runs)]
    first = max(min(from_s for from_s, _ in rows) for rows in leased)
    last = min(max(from_s + row.seconds for from_s, row in rows) for rows in leased)
    begin = max(first, last - seconds / 2)
    return [
        {
            "run": number,
            "slot": row.device,
            "kind": row.kind,
            "busy": row.activity != "idle",
            "from_s": from_s - begin,
            "seconds": row.seconds,
        }
        for number, rows in enumerate(leased)
        for from_s, row in rows
        if from_s + row.seconds > begin and from_s < begin + seconds
    ]


def draw(leases: list[dict[str, Any]], path: Path, seconds: float = 12.0) -> None:
    pyplot = svg_pyplot()
    from matplotlib.patches import Patch

    figure, axis = pyplot.subplots(figsize=(9.2, 1.9), layout="constrained")
    slots = sorted({lease["slot"] for lease in leases})
    for lease in leases:
        colour = COLOURS[lease["run"]][lease["kind"] != "rollout"]
        how = (
            {"color": colour, "linewidth": 0} if lease["busy"] else {"color": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0}
        )
        axis.barh(slots.index(lease["slot"]), lease["seconds"], left=lease["from_s"], height=0.7, **how)
    axis.set_yticks(range(len(slots)), [f"core {number}" for number in range(len(slots))])
    axis.set_ylim(len(slots) - 0.4, -0.6)
    axis.set_xlim(0, seconds)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    axis.set_xlabel("seconds; run 2, the shorter one, ends in the middle")
    handles = [
        Patch(color=COLOURS[run][part], label=f"run {run + 1} {('generates', 'learns')[part]}") for run in range(2) for part in range(2)
    ]
    handles.append(Patch(facecolor="white", edgecolor="#b4bac2", hatch="////", label="held, no work"))
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    save_svg(figure, path)


if __name__ == "__main__":
    main()
