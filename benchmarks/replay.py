"""Replayed functions: recorded lengths and modelled speed in place of vLLM and DeepSpeed, in real processes under real leases.

What is real: the driver, pools, placement groups, streams, reward processes, the ledger. What is not: tokens, weights and
learning. Good for one thing only, to measure what control costs at a size this machine has no devices for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placement.speed import Speed
from rlhfless_ray.crew import Actors
from rlhfless_ray.reward.score import RewardActor
from rlhfless_ray.runtime import Runtime
from rlhfless_ray.types import Completion, EngineStep, Request, Span, UpdateStats

SCRIPT = "replay.json"  # lies in the policy's folder, so it reaches every instance the way the policy's files do


@dataclass(frozen=True)
class Script:
    """What is replayed. lengths: {prompt's tokens joined by spaces: recorded response lengths, tokens}.

    clock: seconds of the script per second of the wall; 1 is real time.
    """

    lengths: dict[str, list[int]]
    base_s: float
    per_seq_s: float
    start_s: float
    learn_s: float
    clock: float = 1.0

    @classmethod
    def read(cls, files: dict[str, bytes]) -> Script:
        return cls(**json.loads(files[SCRIPT]))

    def write(self, folder: Path) -> None:
        (folder / SCRIPT).write_text(json.dumps(asdict(self)))

    def length(self, request: Request) -> int:
        """By the request's seed, so that a sample has the same length wherever it runs."""
        recorded = self.lengths[prompt_key(request.token_ids)]
        return min(request.max_tokens, recorded[request.seed % len(recorded)])


def prompt_key(token_ids: tuple[int, ...]) -> str:
    return " ".join(map(str, token_ids))


def finish_times(lengths: np.ndarray, speed: Speed) -> np.ndarray:
    """Seconds (n,) after which each of `lengths` (n,) ends when all are decoded together from the start."""
    order = np.argsort(lengths, kind="stable")
    ordered = np.asarray(lengths, float)[order]
    running = np.arange(len(ordered), 0, -1)
    steps = np.diff(ordered, prepend=0.0)
    times = np.empty(len(ordered))
    times[order] = np.cumsum(steps * (speed.base_s + speed.per_seq_s * running))
    return times


class ReplayedEngine:
    """Stands where RolloutActor does; it waits as long as the model says that decoding takes."""

    def __init__(self, files: dict[str, bytes], settings: dict[str, Any]) -> None:
        self.script = Script.read(files)
        self.speed = Speed(self.script.base_s, self.script.per_seq_s)
        self.version = 0

    def open(self, threads: int) -> dict[str, Any]:
        start = time.time()
        time.sleep(self.script.start_s / self.script.clock)
        return {"memory_mb": 1.0, "spans": [Span("start", "build engine (replayed)", start, time.time())]}

    def load(self, version: int, weights: Any, expected: int) -> list[Span]:
        self.version = version
        return [Span("transfer", f"load version {version} (replayed)", time.time(), time.time())]

    def rollout(
        self, requests: list[Request], interval_s: float, threads: int
    ) -> Iterator[tuple[list[Completion], list[EngineStep], list[Span]]]:
        lengths = np.array([self.script.length(request) for request in requests])
        ends = finish_times(lengths, self.speed) / self.script.clock
        order = np.argsort(ends, kind="stable")
        start = last = time.time()
        told, tokens_before, reported = 0, 0, start
        while told < len(order):
            until = max(start + ends[order[told]], min(last + interval_s, start + ends[order[-1]]))
            time.sleep(max(0.0, until - time.time()))
            now = time.time()
            upto = int(np.searchsorted(ends[order], now - start, side="right"))
            done = [self._completion(requests[i], int(lengths[i])) for i in order[told:upto]]
            tokens = int(lengths[order[upto - 1]]) if upto else tokens_before
            # The span ends where the model says: a process that woke up late is this machine's cost of control.
            modelled = start + float(ends[order[upto - 1]]) if upto == len(order) else now
            span = Span("work", "generate (replayed)", reported, modelled)
            yield done, self._steps(np.sort(lengths), tokens_before, tokens), [span]
            told, last, tokens_before, reported = upto, now, tokens, modelled

    def _steps(self, ordered: np.ndarray, after: int, upto: int) -> list[EngineStep]:
        """One record per decode step, as a real engine gives: their number is part of what the driver has to carry."""
        running = len(ordered) - np.searchsorted(ordered, np.arange(after, upto), side="right")
        return [
            EngineStep(int(n), int(n), int(n) * (after + i), self.speed.step_s(int(n))) for i, n in enumerate(running)
        ]

    def _completion(self, request: Request, length: int) -> Completion:
        reason = "length" if length == request.max_tokens else "stop"
        tokens = np.full(length, request.token_ids[0], np.int32)
        return Completion(request.key, tokens, np.full(length, -1.0, np.float32), reason, self.version)

    def park(self) -> dict[str, Any]:
        return {"memory_mb": 1.0, "spans": []}


class ReplayedLearner:
    """Stands where LearnerActor does: an update takes `learn_s`; its weights are one number."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.learn_s = 0.0

    def open(self, threads: int) -> dict[str, Any]:
        return {"memory_mb": 1.0, "spans": []}

    def rendezvous(self, loopback: bool) -> tuple[str, int]:
        return "", 0

    def build(self, files: dict[str, bytes], place: Any, threads: int, state: Any) -> list[Span]:
        script = Script.read(files)
        self.learn_s = script.learn_s / script.clock
        return []

    def update(self, batch: Any, threads: int) -> tuple[UpdateStats, list[Span]]:
        start = time.time()
        time.sleep(self.learn_s)
        nothing = UpdateStats(0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, int(batch.lengths.sum()), 0)
        return nothing, [Span("work", "update (replayed)", start, start + self.learn_s)]

    def weights(self) -> tuple[dict[str, np.ndarray], tuple[int, list[Span]]]:
        return {"weight": np.zeros(1, np.float32)}, (0, [])

    def snapshot(self) -> dict[str, bytes]:
        return {"model.safetensors": b""}

    def park(self) -> dict[str, Any]:
        return {"memory_mb": 1.0, "spans": []}

    def unpark(self) -> list[Span]:
        return []


class ReplayedRuntime(Runtime):
    """The runtime itself, with replayed engines and learner."""

    def actor_classes(self) -> Actors:
        return Actors(ReplayedEngine, RewardActor, ReplayedLearner)
