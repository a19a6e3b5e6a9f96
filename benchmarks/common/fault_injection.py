"""Faults done to a replayed run on a local cluster of several nodes: each kind is a function of the run, at a moment of a step."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.common.call_hooks import call_after, call_before
from benchmarks.common.replayed_runtime import ReplayedRuntime
from benchmarks.common.run_process import read_metrics
from rlhfless_ray.local.laptop.local_ray import local_ray
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.runtime import Runtime

NODE_CORES = 2
NOTICE_S = 4.0  # between a drain notice and the end of the node
PATIENCE_S = 60.0  # for the last process of a run to be gone, on a machine that does something else too
START_S = 120.0  # for a local cluster
TRIES = 8  # to start a node
MISSES = 2  # steps in which a kind of fault may find nothing before others get their turn


def again(start: Callable[[], Any]) -> Any:
    """Ray gives a node of its own 30 s to start, which is no setting and little on a machine that does something else too."""
    for left in reversed(range(TRIES)):
        try:
            return start()
        except Exception:
            if not left:
                raise
    raise AssertionError


class Nodes:
    """A head, where the driver and nothing that is struck lies, and nodes that may be lost. Lost ones have successors."""

    def __init__(
        self, count: int, store_bytes: int = 128 * 2**20, head_cores: int = NODE_CORES, labels: dict[str, str] | None = None
    ) -> None:
        """`labels`: of the nodes that may be lost."""
        from ray.cluster_utils import Cluster

        self.store_bytes, self.labels = store_bytes, labels or {}
        head = {"num_cpus": head_cores, "object_store_memory": store_bytes}
        with local_ray():
            self.cluster = again(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.count, self.removed = count, 0
        self.changing = threading.Lock()
        self.timers: list[threading.Timer] = []
        self.settle()

    @property
    def address(self) -> str:
        return self.cluster.address

    def fill(self) -> None:
        """Start successors of lost nodes. In the main thread only: Ray sets signal handlers as it starts a node."""
        about = {"num_cpus": NODE_CORES, "object_store_memory": self.store_bytes, "labels": self.labels}
        with self.changing:
            while len(self.cluster.worker_nodes) < self.count:
                again(lambda: self.cluster.add_node(wait=False, **about))

    def settle(self) -> None:
        """Wait until all of them are there."""
        self.fill()
        self.cluster.wait_for_nodes(timeout=START_S)

    def passing(self) -> list[str]:
        """Ids of the nodes that may be lost."""
        with self.changing:
            return [node.node_id for node in self.cluster.worker_nodes]

    def lose(self, node_id: str) -> None:
        """Kill a node at once, from any thread. The next `fill` replaces it."""
        with self.changing:
            node = next((n for n in self.cluster.worker_nodes if n.node_id == node_id), None)
            if node is not None:
                self.removed += 1
                self.cluster.remove_node(node, allow_graceful=False)

    def lose_later(self, node_id: str, seconds: float) -> None:
        timer = threading.Timer(seconds, self.lose, (node_id,))
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def close(self) -> None:
        for timer in self.timers:
            timer.cancel()
            timer.join()
        self.cluster.shutdown()


def drain(node_id: str, seconds: float) -> None:
    """A notice that the node will be gone in so many seconds, as a cloud gives it to Ray."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = ray._private.worker.global_worker.gcs_client
    accepted, why = client.drain_node(node_id, reason, "chaos", int(1000 * (time.time() + seconds)))
    if not accepted:
        raise RuntimeError(f"Ray does not drain {node_id}: {why}")


class FaultInjector(Runtime):
    """At the moments of a step, asks `strike(run, moment)`. Writes down the checksum of every version that is published."""

    def __init__(self, recipe: Recipe, strike: Callable[[FaultInjector, str], None], resume: bool = False) -> None:
        super().__init__(recipe, resume=resume)
        self.strike = strike
        self.published: dict[int, int] = {}

    def __enter__(self) -> Self:
        run = super().__enter__()
        parts, stages = self.parts, self.parts.stages
        call_after(stages.rollout, "_on_progress", lambda: self.strike(self, "rollout"))
        call_before(parts.session, "generate", lambda: self.strike(self, "begin"))
        call_before(stages.score, "score", lambda: self.strike(self, "score"))
        call_after(parts.records, "observe", lambda: self.strike(self, "update"))
        call_before(stages.learn, "publish", lambda: self.strike(self, "publish"))
        call_after(parts.updates, "publish", self._published)
        return run

    def _published(self) -> None:
        weights = self.parts.session.weights
        assert weights is not None
        self.published[weights.version] = weights.checksum
        self.strike(self, "published")


class InjectedFault(FaultInjector, ReplayedRuntime):
    """On replayed engines and a replayed learner."""


def pid_of(instance: Any) -> int | None:
    """As Ray knows it; None while its process starts."""
    import ray._private.state as state

    told = state.actors(actor_id=instance.actor._actor_id.hex())
    return (told.get("Pid") or None) if told.get("State") == "ALIVE" else None


def kill(instances: list[Any], rng: Any, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to one of them. Returns whether there was one: Ray may not know yet that a process is gone."""
    if number == signal.SIGSTOP:  # one that hangs while it starts is given the deadlines of a start
        instances = [instance for instance in instances if instance.started]
    pids = [pid for pid in map(pid_of, instances) if pid]
    if not pids:
        return False
    try:
        os.kill(int(rng.choice(pids)), number)
    except ProcessLookupError:
        return False
    return True


def kill_index(run: FaultInjector, rng: Any, nodes: Any) -> bool:
    """The replica of the run's prefix service, which owns the pages."""
    import ray._private.state as state

    if run.parts.stages.prefix is None or run.parts.stages.prefix.service.handle is None:
        return False
    name = f"ServeReplica:{run.parts.stages.prefix.service.name}:PrefixApp"
    pids = [one["Pid"] for one in state.actors().values() if one["State"] == "ALIVE" and one["ActorClassName"] == name]
    if pids:
        os.kill(pids[0], signal.SIGKILL)
    return bool(pids)


def prefill_instances(run: FaultInjector) -> list[Any]:
    return [] if run.parts.stages.prefix is None else [*run.parts.stages.prefix.pool.working, *run.parts.stages.prefix.pool.parked]


Strike = Callable[[FaultInjector, Any, Nodes], bool]


def _node(run: FaultInjector, rng: Any, nodes: Nodes) -> str | None:
    """A node that has an engine of the run on it."""
    used = {i.slot.node for i in (*run.parts.stages.rollout.pool.working, *run.parts.stages.rollout.pool.parked)} & set(nodes.passing())
    return str(rng.choice(sorted(used))) if used else None


def lose_node(run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
    node = _node(run, rng, nodes)
    if node is not None:
        nodes.lose(node)
    return node is not None


def drain_node(run: FaultInjector, rng: Any, nodes: Nodes) -> bool:
    node = _node(run, rng, nodes)
    if node is None:
        return False
    drain(node, NOTICE_S)
    nodes.lose_later(node, NOTICE_S)
    return True


KINDS: dict[str, tuple[tuple[str, ...], Strike]] = {
    "engine killed at work": (("rollout",), lambda run, rng, nodes: kill(run.parts.stages.rollout.pool.working, rng)),
    "parked engine killed": (("update", "published"), lambda run, rng, nodes: kill(run.parts.stages.rollout.pool.parked, rng)),
    "engine hung": (("rollout",), lambda run, rng, nodes: kill(run.parts.stages.rollout.pool.working, rng, signal.SIGSTOP)),
    "reward process killed": (("score",), lambda run, rng, nodes: kill(run.parts.stages.score.pool.working, rng)),
    "reward process hung": (("score",), lambda run, rng, nodes: kill(run.parts.stages.score.pool.working, rng, signal.SIGSTOP)),
    "learner killed": (
        ("begin", "update", "publish", "published"),
        lambda run, rng, nodes: kill(run.parts.stages.learn.worker_group.by_rank, rng),
    ),
    "node lost": (("rollout", "score", "update", "published"), lose_node),
    "node drained": (("rollout", "update", "published"), drain_node),
}

# Replayed engines keep no pages: these need real ones.
PAGE_KINDS: dict[str, tuple[tuple[str, ...], Strike]] = {
    "prefill instance killed": (("update", "published"), lambda run, rng, nodes: kill(prefill_instances(run), rng)),
    "index replica killed": (("begin", "update", "published"), kill_index),
}


class Chaos:
    """One fault of `kinds` in each step from the second to the last but one; one that finds nothing to strike is tried again, and
    after `MISSES` steps later than the others."""

    def __init__(
        self,
        kinds: list[str],
        nodes: Nodes | None,
        seed: int,
        say: Callable[[str], None] = lambda said: None,
        table: Mapping[str, tuple[tuple[str, ...], Strike]] | None = None,
    ) -> None:
        """`table`: the moments of each kind, and what it does. Default: those of faults."""
        self.kinds, self.nodes, self.rng, self.say, self.table = (
            list(kinds),
            nodes,
            np.random.default_rng(seed),
            say,
            table or KINDS | PAGE_KINDS,
        )
        self.step, self.calls, self.struck = 1, 0, True
        self.moment, self.after, self.misses = "", 0, 0
        self.done: list[tuple[int, str, str]] = []  # step, kind, moment

    def __call__(self, run: FaultInjector, moment: str) -> None:
        if self.nodes is not None:
            self.nodes.fill()
        number = run.parts.session.step.number
        if number != self.step:
            self.misses = 0 if self.struck else self.misses + 1
            if self.misses == MISSES:
                self.kinds, self.misses = [self.kinds[-1], *self.kinds[:-1]], 0
            self.step, self.calls = number, 0
            self.struck = number == 1 or not self.kinds
            if not self.struck:
                self.moment = str(self.rng.choice(self.table[self.kinds[-1]][0]))
                self.after = int(self.rng.integers(1, 6)) if self.moment == "rollout" else 0
        if self.step == 1 or self.struck or moment != self.moment:
            return
        self.calls += 1
        if self.calls > self.after and self.table[self.kinds[-1]][1](run, self.rng, self.nodes):
            self.struck = True
            self.done.append((number, self.kinds.pop(), moment))
            self.say(f"step {number}, {moment}: {self.done[-1][1]} ({len(self.kinds)} to come)")


@contextmanager
def quick_to_see_hangs() -> Iterator[None]:
    """The runtime gives a reward process half a minute before it is taken to hang: too long for a fault in every step."""
    import rlhfless_ray.reward.scoring as score

    before, score.SLACK_S = score.SLACK_S, 4.0
    try:
        yield
    finally:
        score.SLACK_S = before


def outcome(path: Path) -> dict[int, list[tuple[Any, ...]]]:
    """Return the samples of each step, in order."""
    found = {}
    for file in (path / "samples").glob("step_*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[int(file.stem[5:])] = [(r["prompt_index"], r["sample"], r["response"], r["tokens"], r["reward"]) for r in rows]
    return found


def step_rows(path: Path) -> list[dict[str, Any]]:
    rows = read_metrics(path)
    return [row for row in rows if row["step"] > 0]


def left_of(folder: Path) -> dict[str, int]:
    """Count what a Ray that ended with its run has left: its folder, and processes that work in it."""
    import psutil

    end = time.monotonic() + PATIENCE_S
    while True:
        found = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found += str(folder) in " ".join(process.cmdline()) or process.environ().get("TMPDIR") == str(folder)
        if not found + folder.exists() or time.monotonic() > end:
            return {"processes": found, "session folders": int(folder.exists())}
        time.sleep(0.5)


def left_behind(address: str) -> dict[str, int]:
    """Count what an ended run has left on a cluster that goes on. Serve's own controller may be somebody else's."""
    import ray
    from ray.util.placement_group import placement_group_table

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            groups = sum(info["state"] != "REMOVED" for info in placement_group_table().values())
            living = [info for info in ray._private.state.actors().values() if info["State"] != "DEAD"]
            actors = sum(info["ActorClassName"] != "ServeController" for info in living)
            if not groups + actors or time.monotonic() > end:
                return {"placement groups": groups, "actors": actors}
            time.sleep(0.2)
    finally:
        ray.shutdown()


def compare(struck: dict[str, Any], clean: dict[str, Any]) -> dict[str, int]:
    """Count what is wrong with the struck run."""
    ids = [(step, *one[:2]) for step, rows in struck["samples"].items() for one in rows]
    expected = [(step, *one[:2]) for step, rows in clean["samples"].items() for one in rows]
    counts = Counter(ids)
    return {
        "samples twice": sum(n - 1 for n in counts.values()),
        "samples lost": len(set(expected) - set(ids)),
        "samples too many": len(set(ids) - set(expected)),
        "steps with other samples": sum(struck["samples"].get(step) != rows for step, rows in clean["samples"].items()),
        "versions with other weights": sum(struck["published"].get(v) != c for v, c in clean["published"].items()),
    }


def quiet_ray() -> None:
    """Ray prints the last words of every node that is lost: that is what happens here all the time."""
    import ray._private.worker as worker

    worker.listen_error_messages = lambda *_: None  # type: ignore[assignment]
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # of calls whose answer nobody waits for any more
