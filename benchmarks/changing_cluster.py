"""A cluster that changes at random under a run: `python -m benchmarks.changing_cluster [--events N] [--real N] [--seed N] [--quick]`.

Spot nodes join, are drained with a long or a short notice or with none, all go at once and come back, and their price changes: one
event in every step, next to a run whose cluster stays as it is. Both must make the same samples, each once, and the same weights to the
bit, and leave no lease behind. Replayed engines and learner for the volume; vLLM and DeepSpeed for `--real` events.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.chaos import BUDGET, DEADLINE_S, drive, on_cluster, recipe, small_world, told, told_now, tried
from benchmarks.common.fault_injection import Chaos, FaultInjector, InjectedFault, Nodes, Strike, drain, left_behind, quiet_ray
from benchmarks.common.results import Target, make_console, save, show_targets
from rlhfless_ray.recipe import Recipe

MOST = 3  # spot nodes at once, of two cores each
SPOT = {"market": "spot"}
PRICES = (0.1, 0.3, 1.0, 2.0)  # of a slot-hour of a spot node; one of another node costs 1
NOTICES_S = (0.0, 1.0, 6.0)  # 0: without notice
ANY = ("begin", *("rollout",) * 4, "score", "update", "publish", "published")  # a rollout is most of a step


def leave(nodes: Nodes, node: str, notice_s: float) -> None:
    nodes.count -= 1
    if notice_s:
        drain(node, notice_s)
    nodes.lose_later(node, notice_s)


def join(run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
    if not 0 < nodes.count < MOST:
        return False
    nodes.count += 1
    return True


def come_back(run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
    if nodes.count:
        return False
    nodes.count = MOST
    return True


def lose_one(run: FaultInjector, rng: Any, nodes: Nodes, notices_s: tuple[float, ...] = NOTICES_S[:1]) -> bool:
    if nodes.count < 2 or len(nodes.passing()) > nodes.count:  # one that has had its notice is still there
        return False
    leave(nodes, str(rng.choice(nodes.passing())), float(rng.choice(notices_s)))
    return True


def lose_all(run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
    going, notice_s = nodes.passing(), float(rng.choice(NOTICES_S))
    if not nodes.count or len(going) > nodes.count:
        return False
    for node in going:
        leave(nodes, node, notice_s)
    return True


def change_price(run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
    """Plan and bill with another price from now on."""
    pools, price = run.leases.pools, float(rng.choice(PRICES))
    kinds = [replace(kind, price_per_hour=price) if kind.name == "spot" else kind for kind in pools.kinds]
    pools.__init__(pools.nodes, kinds)  # type: ignore[misc]  # the ledger refers to it
    run.autoscaler.frontiers.use_pools(kinds)
    return True


CHANGES: dict[str, Strike] = {
    "node joins": join,
    "node drained": partial(lose_one, notices_s=NOTICES_S[1:]),
    "node killed": lose_one,
    "all spot gone": lose_all,
    "spot back": come_back,
    "price changes": change_price,
}


class ClusterChanges(Chaos):
    """One change in each step from the second on, of a kind that is possible then."""

    def __init__(self, events: int, nodes: Nodes, seed: int, say: Callable[[str], None] = lambda said: None) -> None:
        super().__init__(["change"] * events, nodes, seed, say, {"change": (ANY, self.change)})
        self.kinds_done: list[str] = []

    def change(self, run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
        order = rng.permutation(list(CHANGES))
        self.kinds_done.append(next(str(kind) for kind in order if CHANGES[str(kind)](run, rng, nodes)))
        self.say(f"step {run.parts.session.step.number}: {self.kinds_done[-1]}, {nodes.count} spot nodes")
        return True


def compared(clean: dict[str, Any], run: FaultInjector, changes: ClusterChanges, nodes: Nodes) -> dict[str, Any]:
    """Make all steps of a run on the changing cluster. Returns what differs from the run without changes."""
    struck = on_cluster(nodes, run)
    changes.done = [(step, kind, moment) for (step, _, moment), kind in zip(changes.done, changes.kinds_done, strict=True)]
    leases = {"leases": len(run.leases.held) + len(run.leases.pending)}
    return told(struck, clean, changes, left_behind(nodes.address) | leases) | {"nodes_lost": nodes.removed}


def steps_for(events: int) -> int:
    return events + events // 8 + 4  # a step's rollout may end before the moment of its change


POOLS = [{"name": "spot", "labels": SPOT, "price_per_hour": PRICES[1], "preempt_per_hour": 30, "notice_s": max(NOTICES_S)}]
PRICE = {"cpu_slot_per_hour": 1.0, "parked_share": 0.0}


def replayed(folder: Path, events: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Change a cluster with replayed engines and learner, where events come in numbers."""
    nodes, world = Nodes(MOST, labels=SPOT), small_world(folder)

    def run_of(name: str, strike: Callable[[FaultInjector, str], None]) -> FaultInjector:
        rollout = {"pools": POOLS, "max_actors": 2 * MOST + 2}
        return InjectedFault(recipe(world, folder / name, steps_for(events), rollout=rollout, price=PRICE), strike)

    try:
        clean = on_cluster(nodes, run_of("clean", lambda run, moment: None))
        say(f"the run without changes: {clean['steps']} steps in {clean['seconds']:.0f} s")
        changes = ClusterChanges(events, nodes, seed, say)
        return compared(clean, run_of("changing", changes), changes, nodes)
    finally:
        nodes.close()


def real(folder: Path, events: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Change a cluster under vLLM and DeepSpeed with `run.exact`. The run without changes has a Ray of its own."""
    from tests.conftest import small_recipe

    def recipe_of(name: str, pools: list[dict[str, Any]]) -> Recipe:
        tree = small_recipe(
            folder,
            run__name=name,
            run__steps=steps_for(events),
            run__exact=True,
            watch__samples_per_step=0,
            functions__max_replacements=BUDGET,
            functions__lease_deadline_s=DEADLINE_S,
            evaluate__prompts=0,
            rollout__pools=pools,
            rollout__max_actors=3,
            rollout__stream_interval_s=0.05,
            **{f"price__{key}": value for key, value in PRICE.items()},
        )
        return Recipe.parse(tree)

    clean = drive(FaultInjector(recipe_of("clean", []), lambda run, moment: None))
    say(f"the run without changes: {clean['steps']} steps in {clean['seconds']:.0f} s")
    nodes = Nodes(MOST, store_bytes=256 * 2**20, head_cores=1, labels=SPOT)
    try:
        changes = ClusterChanges(events, nodes, seed, say)
        return compared(clean, FaultInjector(recipe_of("changing", POOLS), changes), changes, nodes)
    finally:
        nodes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=180, help="under replayed engines")
    parser.add_argument("--real", type=int, default=20, help="under vLLM and DeepSpeed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="six events under replayed engines: shows that it runs")
    options = parser.parse_args()
    if options.quick:
        options.events, options.real = 6, 0
    quiet_ray()
    console, found = make_console(), {}
    parts: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {"replayed": (replayed, options.events), "real": (real, options.real)}
    for name, (part, events) in parts.items():
        if events:
            with tempfile.TemporaryDirectory(prefix="rlhfless-changes-") as folder:
                found[name] = tried(partial(part, Path(folder), events, options.seed), partial(told_now, console, name))
            save("changing_cluster", {"options": vars(options), **found}, reached(found), console=console, quick=options.quick)
    table = Table("part", "change", "times", title="changes of the cluster", title_justify="left")
    for name, one in found.items():
        for kind, times in one.get("faults", {}).items():
            table.add_row(name, kind, str(times))
    console.print(table)
    show_targets(console, reached(found))
    if any("failed" in one for one in found.values()):
        sys.exit(1)


def reached(found: dict[str, Any]) -> list[Target]:
    """Return the targets that the parts so far decide."""
    wrong, left = (sum(sum(one.get(what, {}).values()) for one in found.values()) for what in ("wrong", "left"))
    missing = sum(sum(one.get("not_done", {}).values()) for one in found.values())
    return [
        Target("parts that failed", sum("failed" in one for one in found.values()), most=0),
        Target("samples lost, twice or other, and versions with other weights", wrong, most=0),
        Target("leases, placement groups and actors left behind", left, most=0),
        Target("changes that found no moment", missing, most=0),
    ]


if __name__ == "__main__":
    main()
