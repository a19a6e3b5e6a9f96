"""The anatomy of an engine's start: `python -m benchmarks.coldstart [--quick] [--rounds N]`.

Three starts of the quickstart's engine, each to its first token under the current weights: *cold* (the node runs Ray and the fork
server, but no engine), *prewarmed* (a process that has imported everything waits) and *parked* (an engine that has worked and given
memory back gets the next version of the weights). Wall seconds are the driver's; processor seconds those of the instance and its
children, which on a machine that is not quiet say more. Memory is proportional set size: a page that n processes share counts as 1/n
in each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from rlhfless_ray import Recipe
from rlhfless_ray.engine.engine_settings import EngineSettings, engine_settings
from rlhfless_ray.engine.exact_actor import ExactEngineActor
from rlhfless_ray.types import Request

COLD_S = 7.5  # half of what a cold start took when it was measured first
PARKED_S = 1.0
REQUESTS, TOKENS = 64, 100
WAIT_S = 900.0
PREPARE = "from rlhfless_ray.engine.prepare_vllm import prepare; prepare(True, ['Qwen2ForCausalLM'])"


@dataclass(frozen=True)
class Mark:
    """The end of a part of a start. at_s: on the node's clock; cpu_s: what the process has used up; memory_mb: what it holds."""

    what: str
    at_s: float
    cpu_s: float
    memory_mb: float = 0.0


@dataclass(frozen=True)
class StartPart:
    what: str
    wall_s: float
    cpu_s: float
    memory_mb: float


def parts(marks: Sequence[Mark]) -> list[StartPart]:
    """What lies between a mark and the one before it; the first says where the start began."""
    return [StartPart(b.what, b.at_s - a.at_s, b.cpu_s - a.cpu_s, b.memory_mb) for a, b in pairwise(marks)]


def spreads(rounds: Sequence[Sequence[StartPart]]) -> dict[str, dict[str, Spread]]:
    """{part: {"wall_s", "cpu_s", "memory_mb": Spread}} over rounds of the same parts, and their "total" (memory: at the end)."""
    totals = [StartPart("total", sum(p.wall_s for p in r), sum(p.cpu_s for p in r), r[-1].memory_mb) for r in rounds]
    columns = [*zip(*rounds, strict=True), tuple(totals)]
    return {
        column[0].what: {name: Spread.of(getattr(part, name) for part in column) for name in ("wall_s", "cpu_s", "memory_mb")}
        for column in columns
    }


def import_shares(lines: Iterable[str], least: float = 0.01) -> dict[str, float]:
    """By package, the share of all time of import that `python -X importtime` tells for its modules themselves; small ones left
    out."""
    own: Counter[str] = Counter()
    for line in lines:
        head, _, name = line.rpartition("|")
        if head.startswith("import time:") and head.split(":")[1].split("|")[0].strip().isdigit():
            own[name.strip().partition(".")[0]] += int(head.split(":")[1].split("|")[0])
    whole = sum(own.values())
    return {name: spent / whole for name, spent in own.most_common() if spent >= least * whole}


class Timed(ExactEngineActor):
    """Tells what its process has used, from before its first import on."""

    def __init__(self, files: dict[str, bytes], settings: EngineSettings) -> None:
        self.begun = Mark("process", time.time(), used_s())
        super().__init__(files, settings)

    def mark(self, what: str) -> Mark:
        from rlhfless_ray.local.process_memory import own_memory_mb

        at_s, cpu_s = time.time(), used_s()
        return Mark(what, at_s, cpu_s, own_memory_mb())

    def first(self) -> Mark:
        return self.begun

    def answer(self, requests: list[Request]) -> int:
        """Answers them; returns the version of the weights. The first token's mark is kept."""
        version = -1
        self.token = None
        for progress, _, _ in self.rollout(1, requests, 0.0, 1):
            self.token = self.token or self.mark("first token")
            version = progress.version
        return version

    def first_token(self) -> Mark:
        assert self.token is not None
        return self.token


def used_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Starts:
    """What is measured, on a Ray that runs already."""

    def __init__(self, recipe: Recipe) -> None:
        import ray

        from rlhfless_ray.functions.cluster_nodes import node_slots
        from rlhfless_ray.functions.lease import places
        from rlhfless_ray.weights.load_policy import initial_policy
        from rlhfless_ray.weights.model_folder import without_weights

        files, _ = initial_policy(recipe)
        self.arguments = (ray.put(without_weights(files)), engine_settings(recipe, 40, prefix_kv=True))
        slots = node_slots("cpu")
        self.slot = places(slots, next(iter(slots)), 1)[0]
        self.versions = [self._published(files, version) for version in range(2)]
        self.requests = [Request(key, tuple(range(5, 5 + key % 20)) or (5,), key, TOKENS, 1.0) for key in range(REQUESTS)]

    def _published(self, files: dict[str, bytes], version: int) -> tuple[Any, dict[str, int]]:
        import ray
        import safetensors.numpy

        from rlhfless_ray.weights.checksum import digests
        from rlhfless_ray.weights.tensor_slice import whole_slices

        weights = safetensors.numpy.load(bytes(files["model.safetensors"]))
        weights = {name: np.asarray(array * (1 + 1e-3 * version), array.dtype) for name, array in weights.items()}
        slices = whole_slices(weights)
        return ray.put(slices), digests(slices)

    def start(self) -> Any:
        from rlhfless_ray.functions.instance import start_actor

        return start_actor(Timed, self.slot, "cpu", {}, *self.arguments)

    def open(self, actor: Any) -> list[Mark]:
        told(actor.open.remote(1))
        return [told(actor.mark.remote("build engine"))]

    def answer(self, actor: Any, version: int) -> list[Mark]:
        """Load the weights and work under them."""
        weights, digest_of = self.versions[version]
        told(actor.load.remote(version, weights, digest_of))
        loaded = told(actor.mark.remote("load weights"))
        if (got := told(actor.answer.remote(self.requests))) != version:
            raise RuntimeError(f"the engine worked under version {got} of the weights, not under {version}")
        return [loaded, told(actor.first_token.remote())]

    def cold(self) -> list[StartPart]:
        import ray

        asked_s = time.time()
        actor = self.start()
        imported = told(actor.mark.remote("import"))
        marks = [Mark("asked", asked_s, 0.0), told(actor.first.remote()), imported, *self.open(actor), *self.answer(actor, 0)]
        ray.kill(actor)
        return parts(marks)

    def warm(self) -> tuple[list[StartPart], list[StartPart], dict[str, float]]:
        """A prewarmed start, then one from parked, and the memory (MB) before the first, at work and parked."""
        import ray

        actor = self.start()
        told(actor.park.remote())  # as every process that is started ahead
        waiting = told(actor.mark.remote("waits"))
        time.sleep(1.0)
        begin = told(actor.mark.remote("asked"))
        prewarmed = parts([begin, *self.open(actor), *self.answer(actor, 0)])
        working = told(actor.mark.remote("works"))
        told(actor.park.remote())
        parked = told(actor.mark.remote("parked"))
        time.sleep(1.0)
        begin = told(actor.mark.remote("asked"))
        again = parts([begin, *self.answer(actor, 1)])
        ray.kill(actor)
        return prewarmed, again, {"prewarmed": waiting.memory_mb, "working": working.memory_mb, "parked": parked.memory_mb}


def told(ref: Any) -> Any:
    import ray

    return ray.get(ref, timeout=WAIT_S)


def imported() -> dict[str, float]:
    """Where the imports go, of a process that only imports."""
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", PREPARE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return import_shares(found.stderr.splitlines())


def measure(rounds: int) -> dict[str, Any]:
    import ray

    from rlhfless_ray.local.cluster import RayCluster

    recipe = Recipe.load(str(ROOT / "recipes" / "quickstart.yaml"))
    cluster = RayCluster(recipe, architectures=["Qwen2ForCausalLM"])
    cluster.start()
    try:
        starts = Starts(recipe)
        cold = [starts.cold() for _ in range(rounds)]
        prewarmed, parked, memory = zip(*(starts.warm() for _ in range(rounds)), strict=True)
    finally:
        cluster.stop()
        assert not ray.is_initialized()
    kept = {name: Spread.of(one[name] for one in memory) for name in memory[0]}
    return {"starts": {"cold": spreads(cold), "prewarmed": spreads(prewarmed), "parked": spreads(parked)}, "memory_mb": kept}


def targets_of(found: dict[str, Any]) -> list[Target]:
    memory = {name: spread.median for name, spread in found["memory_mb"].items()}
    freed = memory["working"] - memory["parked"]
    starts = found["starts"]
    return [
        Target("cold start to the first token", starts["cold"]["total"]["wall_s"].median, most=COLD_S, unit=" s"),
        Target("parked to the first token", starts["parked"]["total"]["wall_s"].median, most=PARKED_S, unit=" s"),
        Target("given back while parked, of the process", freed / memory["working"], least=0.5),
        Target("given back while parked, of what the engine added", freed / (memory["working"] - memory["prewarmed"]), least=0.5),
    ]  # fmt: skip


def show(found: dict[str, Any], console: Console) -> None:
    for name, start in found["starts"].items():
        table = Table("part", "wall, s", "processor, s", "memory after, MB", title=f"{name} start", title_justify="left")
        for what, part in start.items():
            table.add_row(what, part["wall_s"].show(), part["cpu_s"].show(), f"{part['memory_mb'].median:.0f}")
        console.print(table)
    console.print("memory, MB: " + ", ".join(f"{name} {spread.median:.0f}" for name, spread in found["memory_mb"].items()))
    if found["imports"]:
        console.print("imports: " + ", ".join(f"{name} {share:.0%}" for name, share in found["imports"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each start")
    parser.add_argument("--quick", action="store_true", help="one round, imports not taken apart: shows that it runs")
    options = parser.parse_args()
    console = make_console()
    found = measure(1 if options.quick else options.rounds)
    found["imports"] = {} if options.quick else imported()
    show(found, console)
    targets = targets_of(found)
    show_targets(console, targets)
    save("coldstart", {"options": vars(options), **found}, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
