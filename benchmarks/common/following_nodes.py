"""Ray nodes that come and go as recorded, started by a process of their own: a start would hold the driver up."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.common.availability import Availability
from rlhfless_ray.local.laptop.local_ray import local_ray
from rlhfless_ray.local.private_ray import add_node

START_S = 300.0  # for the first nodes, on a machine that does something else too
LOOK_S = 0.1


@dataclass(frozen=True)
class NodePlan:
    """address: of the cluster's GCS. most: nodes, to which the trace is scaled. slots: logical GPUs of each. speed: seconds of the
    trace per second. notice_s: between the notice that a node ends and its end, wall time."""

    address: str
    trace: str
    most: int
    slots: int
    labels: dict[str, str]
    speed: float
    notice_s: float


class FollowingNodes:
    """Runs the process while the block does. After it, `spans` has [from, to] of each node, in seconds since the epoch."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.spans: list[list[float]] = []

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.common.following_nodes", json.dumps(asdict(self.plan))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not select.select([self.process.stdout], [], [], START_S)[0] or self._stdout.readline() != "ready\n":
            self.process.kill()
            raise RuntimeError(f"the nodes that follow {self.plan.trace} did not start within {START_S:.0f} s")
        return self

    @property
    def _stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def __exit__(self, *_: object) -> None:
        said, _none = self.process.communicate(timeout=60)
        self.spans = json.loads(said.splitlines()[-1])


def follow(plan: NodePlan) -> list[list[float]]:
    """Start, drain and kill nodes until stdin is closed. Returns when each was there."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    trace, client = Availability.read(Path(plan.trace)).scaled(plan.most), GcsClient(address=plan.address)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    present, leaving = list[tuple[Any, float]](), list[tuple[Any, float, float]]()  # (node, from), (node, from, end)
    spans, began_s = list[list[float]](), None
    try:
        while True:
            now_s = time.time()
            trace_s = 0.0 if began_s is None else (now_s - began_s) * plan.speed
            for node, from_s, end_s in [one for one in leaving if one[2] <= now_s]:
                leaving.remove((node, from_s, end_s))
                node.kill_all_processes(check_alive=False)
                spans.append([from_s, now_s])
            there, soon = trace.at(trace_s), trace.at(trace_s + plan.notice_s * plan.speed)
            while len(present) > soon:
                node, from_s = present.pop()
                deadline_ms = int(1000 * (now_s + plan.notice_s))
                client.drain_node(node.node_id, reason, "as recorded", deadline_ms)
                leaving.append((node, from_s, now_s + plan.notice_s))
            if len(present) < min(there, soon):
                with local_ray():
                    started = add_node(plan.address, 128, 1, plan.labels, num_gpus=plan.slots)
                present.append((started, time.time()))
            elif began_s is None:
                print("ready", flush=True)
                began_s = time.time()
            if select.select([sys.stdin], [], [], LOOK_S)[0]:
                return spans + [[one[1], time.time()] for one in (*present, *leaving)]
    finally:
        for one in (*present, *leaving):
            one[0].kill_all_processes(check_alive=False)


if __name__ == "__main__":
    print(json.dumps(follow(NodePlan(**json.loads(sys.argv[1])))), flush=True)
