"""What spot slots save: `python -m benchmarks.spot_pool [--trace FILE] [--steps N] [--quick] [--draw]`.

The same training run twice, with replayed engines and learner in real processes on logical GPUs: once on on-demand slots only, and once
with as many of them replaced by spot slots that come and go as a recording says, speeded up. A trace with the statistics of recordings
is used unless `--trace` names a recording (lines `seconds,nodes`). Both runs generate and train the same tokens, so tokens per unit of
money follow from what they cost. `--draw` draws docs/images/spot_pool.svg again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from rich.table import Table

from benchmarks.common.availability import SHIPPED, Availability
from benchmarks.common.charts import save_svg, svg_pyplot
from benchmarks.common.fault_injection import InjectedFault, left_behind, quiet_ray
from benchmarks.common.following_nodes import FollowingNodes, NodePlan
from benchmarks.common.replay_setup import ReplaySetup, build, forking_workers, recipe_for, synthetic_lengths
from benchmarks.common.results import FOLDER, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import read_metrics
from placement.pools import PREEMPTED
from rlhfless_ray.functions.ledger import Row, read_ledger
from rlhfless_ray.local.laptop.local_ray import local_ray
from rlhfless_ray.recipe import Recipe

SPEED = 60.0  # seconds of the recording, and of the replayed model, per second
ON_DEMAND, NODES, SLOTS = 8, 4, 4  # on-demand slots; spot nodes at most, and slots of each
SPOT_PRICE = 1 / 3  # of an on-demand slot's, which is 1
NOTICE_S = 120.0 / SPEED
SPOT = {"market": "spot"}
PROMPTS, SAMPLES, TOKENS, STEPS = 16, 8, 512, 22
# Seconds of a model whose longest responses take some minutes: an engine's step with n sequences takes BASE_S + n PER_SEQ_S.
BASE_S, PER_SEQ_S, START_S, LEARN_S = 0.5, 0.02, 40.0, 60.0
MORE = 1.3  # tokens per unit of money, wanted
PICTURE = ROOT / "docs" / "images" / "spot_pool.svg"
TICKS = 400  # moments of a run that the picture shows
COLOURS = {"own": "#2f6fd0", "spot": "#dc7f14"}


def recipe_of(world: ReplaySetup, folder: Path, way: str, trace: Availability, steps: int) -> Recipe:
    facts, rollout = trace.statistics(), dict[str, Any]()
    if way == "spot":
        lost = facts["lost_per_hour"] / (facts["mean_share"] * trace.most) * SPEED  # of a node, per hour of wall time
        rollout["pools"] = [{"name": "spot", "labels": SPOT, "price_per_hour": SPOT_PRICE, "preempt_per_hour": lost, "notice_s": NOTICE_S}]
    return recipe_for(
        world,
        folder / way,
        steps=steps,
        prompts=PROMPTS,
        samples=SAMPLES,
        actors=ON_DEMAND + NODES * SLOTS,
        max_tokens=TOKENS,
        rollout={"stream_interval_s": 0.1, **rollout},
        functions={"slot": "gpu", "lease_deadline_s": 300, "max_replacements": 100},
        price={"gpu_slot_per_hour": 1.0, "cpu_slot_per_hour": 0.0, "parked_share": 0.0},
        watch={"samples_per_step": 0},
    )


def measure(folder: Path, way: str, trace_file: Path, steps: int) -> dict[str, Any]:
    """Train once. Money is in hours of an on-demand slot, times are wall time."""
    from ray.cluster_utils import Cluster

    trace = Availability.read(trace_file).scaled(NODES)
    lengths = synthetic_lengths(4 * PROMPTS, SAMPLES, TOKENS, seed=0)
    world = build(folder, lengths, base_s=BASE_S, per_seq_s=PER_SEQ_S, start_s=START_S, learn_s=LEARN_S, clock=SPEED)
    run = InjectedFault(recipe_of(world, folder, way, trace, steps), lambda run, moment: None)
    slots = ON_DEMAND if way == "spot" else ON_DEMAND + NODES * SLOTS
    with local_ray():
        head = {"num_cpus": 4, "num_gpus": slots, "object_store_memory": 256 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = FollowingNodes(NodePlan(cluster.address, str(trace_file), NODES, SLOTS, SPOT, SPEED, NOTICE_S))
        if way == "spot":
            with nodes:
                began_s, ended_s = trained(run, cluster.address)
        else:
            began_s, ended_s = trained(run, cluster.address)
        left = left_behind(cluster.address)
    finally:
        cluster.shutdown()
    rows, metrics = read_ledger(run.folder.path / "ledger.csv"), [row for row in read_metrics(run.folder.path) if row["step"]]
    there_s = sum(max(0.0, min(end, ended_s) - max(begin, began_s)) for begin, end in nodes.spans)
    return {
        "seconds": ended_s - began_s,
        "tokens": sum(row["tokens/generated"] for row in metrics),
        "money": sum(row.money for row in rows),
        "money_of_nodes": (slots * (ended_s - began_s) + SPOT_PRICE * SLOTS * there_s) / 3600,
        "spot_slot_s": sum(row.slots * row.seconds for row in rows if row.pool == "spot"),
        "slot_s": sum(row.slots * row.seconds for row in rows),
        "published": run.published,
        "preempted_s": [row.to_s for row in rows if row.activity == PREEMPTED],
        "lost_s": sum(row.seconds for row in rows if row.activity == PREEMPTED),
        "left": left,
        "leased": {name: leased_slots([row for row in rows if row.pool == name], ended_s - began_s) for name in COLOURS},
        "nodes": [[begin - began_s, end - began_s] for begin, end in nodes.spans],
    }


def trained(run: InjectedFault, address: str) -> tuple[float, float]:
    """Make all steps of a run on a cluster. Returns when the first one began and the last one ended."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        with run:
            began_s = run.leases.ledger.started_s
            for _ in run:
                pass
            return began_s, time.time()
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=SHIPPED, help="lines `seconds,nodes`")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--draw", action="store_true", help="run nothing; draw the picture again")
    parser.add_argument("--quick", action="store_true", help="three steps: shows that it works, measures nothing")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads((FOLDER / "spot_pool.json").read_text())["ways"]["spot"], PICTURE)
        return
    steps = 3 if options.quick else options.steps
    quiet_ray()
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="rlhfless-spot-") as name, forking_workers():
        found = {way: measure(Path(name), way, options.trace.absolute(), steps) for way in ("spot", "on-demand")}
    table = Table("", *found, title=f"{steps} steps, replayed engines and learner", title_justify="left")
    table.add_row("seconds", *(f"{one['seconds']:.0f}" for one in found.values()))
    table.add_row("tokens generated", *(f"{one['tokens']:,}" for one in found.values()))
    table.add_row("money of leases", *(f"{one['money']:.3g}" for one in found.values()))
    table.add_row("money if nodes are paid while they are there", *(f"{one['money_of_nodes']:.3g}" for one in found.values()))
    table.add_row("slot-seconds on spot", *(f"{one['spot_slot_s'] / one['slot_s']:.0%}" for one in found.values()))
    table.add_row("instances preempted", *(str(len(one["preempted_s"])) for one in found.values()))
    table.add_row("seconds generated again", *(f"{one['lost_s']:.1f}" for one in found.values()))
    console.print(table)
    targets = targets_of(found)
    show_targets(console, targets)
    facts = Availability.read(options.trace).statistics()
    about = {"replayed": True, "options": {**vars(options), "trace": options.trace.name}, "trace": facts, "speed": SPEED}
    save("spot_pool", {**about, "ways": found}, targets, console=console, quick=options.quick)
    if not options.quick:
        draw(found["spot"], PICTURE)


def targets_of(found: dict[str, Any]) -> list[Target]:
    """Return the targets. `ways` made the same samples, so one that changed a sample published other versions."""
    spot, base = found["spot"], found["on-demand"]
    more = {key: (spot["tokens"] / spot[key]) / (base["tokens"] / base[key]) for key in ("money", "money_of_nodes")}
    return [
        Target("tokens per unit of money, leases, over on-demand slots only", more["money"], least=MORE, unit="×"),
        Target("the same if nodes are paid while they are there", more["money_of_nodes"], least=MORE, unit="×"),
        Target("versions that differ", sum(spot["published"][v] != sum_ for v, sum_ in base["published"].items()), most=0),
        Target("left behind", sum(spot["left"].values()) + sum(base["left"].values()), most=0),
    ]


def leased_slots(rows: list[Row], seconds: float) -> list[int]:
    """Return how many slots `rows` lease at each of `TICKS` moments of a run."""
    ticks = [tick * seconds / TICKS for tick in range(TICKS)]
    return [sum(row.slots for row in rows if row.from_s <= tick < row.to_s) for tick in ticks]


def draw(one: dict[str, Any], path: Path) -> None:
    """Draw leased slots by pool over time, the slots that were there, and a mark at each preemption."""
    import numpy as np

    pyplot = svg_pyplot()
    figure, axis = pyplot.subplots(figsize=(9.2, 2.6), layout="constrained")
    leased = one["leased"]
    ticks = np.linspace(0, one["seconds"], TICKS, endpoint=False)
    there = sum(SLOTS * ((ticks >= begin) & (ticks < end)) for begin, end in one["nodes"])
    names = {"own": "on-demand", "spot": "spot"}
    axis.stackplot(ticks, *leased.values(), colors=list(COLOURS.values()), labels=[f"leased, {names[n]}" for n in leased], step="post")
    axis.step(ticks, ON_DEMAND + there, color="#5b6470", linewidth=1, where="post", label="slots that are there")
    marks = one["preempted_s"]
    axis.plot(marks, [ON_DEMAND + NODES * SLOTS + 1] * len(marks), "x", color="#c02f2f", markersize=6, label="preemption")
    axis.set_xlim(0, one["seconds"])
    axis.set_ylim(0, ON_DEMAND + NODES * SLOTS + 2)
    axis.set_ylabel("slots")
    axis.set_xlabel(f"seconds; each stands for {SPEED:g} s of the trace")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save_svg(figure, path)


if __name__ == "__main__":
    main()
