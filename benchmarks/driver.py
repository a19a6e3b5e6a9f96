"""What a token costs the driver, by the number of engines: `python -m benchmarks.driver [--quick]`.

The driver and its calls through Ray are real. The engines are replayed, many in one process: a process for each of 512 engines would
measure this machine's cores. Each decodes 32 sequences at once. Its reports contain what a real engine would decode meanwhile, but follow
each other without a pause, so the driver is what the rollout waits for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import ray
from rich.table import Table

from benchmarks.common.replay import Decoding, Script, prompt_key
from benchmarks.common.replay_setup import logical_gpus, synthetic_lengths
from benchmarks.common.results import make_console, save
from placement.scaling.resize_policy import Hold
from placement.speed.decode_speed import Speed
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.live_rollout import DriverSettings
from rlhfless_ray.rollout.request_source import PlainRequests, WantedResponses
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Prompt, Request, SampleId, Span, WeightVersion

SEQUENCES, PROCESSES, MAX_TOKENS = 32, 4, 512
BASE_S, PER_SEQ_S = 8.5e-3, 3e-5  # a 3 B model's decode step on one L40S, as in `benchmarks.control`
PROMPT, INTERVAL_S = (7,), 0.25  # the default of rollout.stream_interval_s


class EngineHost:
    """Several engines in one process. Each reports what it would decode in an interval, as soon as it is read."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.script = Script(**script)

    def rollout(self, engine: int, epoch: int, requests: list[Request], interval_s: float, threads: int) -> Iterator[Any]:
        decoding, now_s = Decoding(Speed(BASE_S, PER_SEQ_S), 1.0), 0.0
        decoding.add(requests, self.script)
        while len(decoding.keys):
            span = Span("work", "generate", now_s, now_s := now_s + interval_s)
            decoding.advance(now_s)
            yield decoding.progress(1), EngineSteps(decoding.steps), [span]
            decoding.steps = []

    def ready(self) -> bool:
        return True


class HostedRollout:
    """`rollout` of one engine of a host, called as if the engine were an actor of its own."""

    def __init__(self, host: Any, engine: int) -> None:
        self.host, self.engine = host, engine

    def options(self, **how: Any) -> Any:
        return SimpleNamespace(remote=partial(self.host.rollout.options(**how).remote, self.engine))


def instances_of(engines: int, script: Script) -> list[Instance]:
    """Return started engines that hold leases."""
    node, host_of = ray.get_runtime_context().get_node_id(), ray.remote(EngineHost)
    share = -(-engines // min(engines, PROCESSES))
    hosts: list[Any] = [host_of.options(num_cpus=0, max_concurrency=share).remote(vars(script)) for _ in range(0, engines, share)]
    ray.get([host.ready.remote() for host in hosts])
    instances = []
    for number in range(engines):
        host, engine = hosts[number // share], number % share
        actor = SimpleNamespace(rollout=HostedRollout(host, engine))
        slot = Slot(node, number)
        lease = Lease(slot=slot, id=f"lease-{number}")
        instances.append(Instance("rollout", slot, actor, leases=[lease], opened=ray.put(True), version=1))
    return instances


def driver_of(instances: list[Instance], requests: list[Request], expected: np.ndarray) -> RolloutDriver:
    ledger = Ledger("gpu")
    for instance in instances:
        ledger.hold(instance.leases[0].id, instance.slot.node, str(instance.slot.device), "rollout", instance.id)
    nodes = SimpleNamespace(draining=set, confirm_lost=lambda node: False)
    pool: Any = SimpleNamespace(working=instances, width=1, leases=SimpleNamespace(nodes=nodes, deadline_s=60.0), ledger=ledger)
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
    source = PlainRequests(tokenizer, WantedResponses(requests, [Prompt(0, "", PROMPT)], expected, 1))
    settings = DriverSettings(INTERVAL_S, 60.0, 1, lambda tail_s, needed: Hold(1, ""), lambda *_: None)
    return RolloutDriver(pool, source, WeightVersion(1, ()), settings)


def measure(engines: int, max_tokens: int = MAX_TOKENS) -> dict[str, float]:
    """Generate `SEQUENCES` responses on each engine, and return what the driver took for it."""
    count = engines * SEQUENCES
    lengths = synthetic_lengths(1, count, max_tokens, seed=0)[0]
    script = Script({prompt_key(PROMPT): lengths.tolist()}, BASE_S, PER_SEQ_S, 0.0, 0.0)
    requests = [Request(key, PROMPT, key, max_tokens, 1.0, id=SampleId(0, 1, key)) for key in range(count)]
    driver, process = driver_of(instances_of(engines, script), requests, lengths.astype(float)), psutil.Process()
    reports, receive = [0], driver.receive

    def counted(generators: Any) -> None:
        reports[0] += len(generators)
        receive(generators)

    driver.receive = counted  # type: ignore[method-assign]
    rss, before, start = process.memory_info().rss, process.cpu_times(), time.perf_counter()
    result = driver.run(np.array_split(np.arange(count), engines), 600.0)
    wall_s, now = time.perf_counter() - start, process.cpu_times()
    tokens = sum(len(completion.token_ids) for completion in result.completions.values())
    assert tokens == lengths.sum()
    cpu_s = now.user + now.system - before.user - before.system
    return {
        "engines": engines,
        "tokens": tokens,
        "reports": reports[0],
        "wall_s": wall_s,
        "driver_cpu_s": cpu_s,
        "ns_per_token": 1e9 * cpu_s / tokens,
        "us_per_report": 1e6 * cpu_s / reports[0],
        "core_share": cpu_s / wall_s,
        "bytes_per_token": (process.memory_info().rss - rss) / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[16, 64, 512])
    parser.add_argument("--quick", action="store_true", help="4 engines: shows that it runs, measures nothing")
    options = parser.parse_args()
    found: list[dict[str, float]] = []
    with logical_gpus(1, store_mb=1024):
        for engines in [4] if options.quick else options.engines:
            found.append(measure(engines, 128 if options.quick else MAX_TOKENS))
    table = Table("engines", "tokens", "reports", "rollout, s", "ns per token", "µs per report", "share of a core", "bytes per token")
    for one in found:
        numbers = (one["engines"], one["tokens"], one["reports"])
        costs = (one["ns_per_token"], one["us_per_report"])
        table.add_row(
            *(f"{number:,}" for number in numbers),
            f"{one['wall_s']:.1f}",
            *(f"{cost:.0f}" for cost in costs),
            f"{one['core_share']:.0%}",
            f"{one['bytes_per_token']:.0f}",
        )
    console = make_console()
    console.print(table)
    save("driver", {"replayed": True, "sequences": SEQUENCES, "found": found}, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
