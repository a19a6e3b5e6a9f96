"""Replayed functions: recorded lengths and modelled speed in place of vLLM and DeepSpeed, in real processes under real leases.

What is real: the driver, pools, placement groups, streams, reward processes, the ledger. What is not: tokens, weights and
learning. Good for one thing only, to measure what control costs at a size this machine has no devices for.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placement.speed.decode_speed import Speed
from rlhfless_ray.engine.control_queue import ControlQueue
from rlhfless_ray.engine.engine_actor import EngineActor
from rlhfless_ray.engine.protocol import EngineStats
from rlhfless_ray.engine.token_deltas import CUT, GOES_ON, LENGTH, STOP, TokenDeltas
from rlhfless_ray.learn.rank_actors import Source, read_source
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.shares import Cutter, Share
from rlhfless_ray.types import EngineStep, Request, Span, UpdateStats
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.remote_folder import Delivery, deliver, sees
from rlhfless_ray.weights.tensor_slice import Slices, whole_slices

WEIGHT = "weight"  # the replayed policy's only tensor
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


class Decoding:
    """Sequences decoded together in modelled time: each knows how long it becomes, how far it is and how far it was told."""

    def __init__(self, speed: Speed, clock: float) -> None:
        self.speed, self.clock = speed, clock
        self.keys, self.tokens, self.ends = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64)
        self.lengths, self.done, self.told = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.awaited = np.zeros(0, bool)
        self.steps: list[EngineStep] = []
        self.at_s = 0.0  # wall clock at which the last step ended, had it been on time

    def add(self, requests: Sequence[Request], script: Script) -> None:
        lengths = np.array([script.length(request) for request in requests], np.int64)
        before = np.array([len(request.generated) for request in requests], np.int64)
        longest = np.array([request.max_tokens for request in requests], np.int64)
        self.keys = np.r_[self.keys, [request.key for request in requests]].astype(np.int64)
        self.tokens = np.r_[self.tokens, [request.token_ids[0] for request in requests]].astype(np.int32)
        self.lengths, self.done, self.told = np.r_[self.lengths, lengths], np.r_[self.done, before], np.r_[self.told, before]
        self.ends = np.r_[self.ends, np.where(lengths == longest, LENGTH, STOP)]
        self.awaited = np.r_[self.awaited, [request.awaited for request in requests]].astype(bool)

    def step_s(self) -> float:
        return self.speed.step_s(self.running) / self.clock

    @property
    def running(self) -> int:
        return int((self.done < self.lengths).sum())

    @property
    def has_awaited_end(self) -> bool:
        return bool((self.awaited & (self.done == self.lengths)).any())

    def next_end_s(self) -> float:
        """When the first awaited sequence ends, or else the last one of all, if nothing comes in between."""
        live = self.done < self.lengths
        times, awaited = finish_times((self.lengths - self.done)[live], self.speed), self.awaited[live]
        return self.at_s + float(times[awaited].min() if awaited.any() else times.max(initial=0.0)) / self.clock

    def advance(self, now_s: float) -> None:
        """Every step that ends before `now_s`, with a record of each, as a real engine gives."""
        while running := self.running:
            live = self.done < self.lengths
            step_s = self.step_s()  # before any of them ends
            steps = min(int((now_s - self.at_s) / step_s + 1e-9), int((self.lengths - self.done)[live].min()))
            if steps <= 0:
                return
            context, record_s = int(self.done[live].sum()), self.speed.step_s(running)
            self.steps += [EngineStep(running, running, context + i * running, record_s, work_s=record_s) for i in range(steps)]
            self.done[live] += steps
            self.at_s += steps * step_s

    def progress(self, version: int, cut: Sequence[int] = ()) -> TokenDeltas:
        """What is new. Sequences that have ended, and those with a key in `cut`, leave."""
        ends = np.where(self.done == self.lengths, self.ends, np.where(np.isin(self.keys, cut), CUT, GOES_ON))
        counts = self.done - self.told
        some = np.flatnonzero((counts > 0) | (ends != GOES_ON))
        news = np.stack([self.keys[some], self.told[some], counts[some], ends[some]], 1)
        tokens = np.repeat(self.tokens[some], counts[some])
        self.told = self.done.copy()
        stay = ends == GOES_ON
        for name in ("keys", "tokens", "ends", "lengths", "done", "told", "awaited"):
            setattr(self, name, getattr(self, name)[stay])
        return TokenDeltas.of(version, news, tokens, np.full(len(tokens), -1.0, np.float32))


class ReplayedEngine:
    """Implements `Engine`: it waits as long as the model says that decoding takes. A moved sequence starts at once: what its prefill
    would take is not in the script."""

    def __init__(self, script: Script) -> None:
        self.script, self.speed = script, Speed(script.base_s, script.per_seq_s)
        self.version: int | None = None
        self.decoding = Decoding(self.speed, script.clock)
        self.spans: list[Span] = []
        self.until_s = 0.0

    def load(self, version: int, weights: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None = None) -> None:
        self.version = None
        if WEIGHT not in weights:
            raise ValueError(f"weight version {version} lacks 1 of the engine's weights, {WEIGHT} first")
        self.version = version

    def generate(
        self, requests: Iterable[Request], interval_s: float = float("inf"), control_queue: ControlQueue | None = None
    ) -> Iterator[TokenDeltas]:
        if self.version is None:
            raise RuntimeError("this engine has no weights yet")
        commands, decoding, last, fresh = control_queue or ControlQueue(), self.decoding, time.time(), False
        try:
            decoding.at_s = last
            self._add(list(requests))
            while True:
                step_end_s = decoding.at_s + decoding.step_s()  # nothing is new before
                commands.wait(max(step_end_s, 0.0 if fresh else min(last + interval_s, decoding.next_end_s())) - time.time())
                now, cut, told, has_first = time.time(), [], False, fresh
                decoding.advance(now)
                for command in commands.take():
                    self._add(command.add)
                    cut += command.cut
                    fresh = bool(command.add)
                    told = told or bool(command.cut or command.what)
                    if command.what:
                        self.spans.append(Span("transfer", command.what, now, now))
                over, awaited = not decoding.running, decoding.has_awaited_end
                if told or over or awaited or has_first or now >= last + interval_s:
                    fresh = fresh and not has_first
                    # Work ends where the model says: a process that woke up late is this machine's cost of control.
                    self.until_s, last = decoding.at_s if over else now, now
                    yield decoding.progress(self.version, cut)
                if not len(decoding.keys):
                    if commands.close_if_empty():
                        return
                    decoding.at_s = time.time()
        finally:  # also if the caller stops iterating
            self.decoding = Decoding(self.speed, self.script.clock)
            self.decoding.steps = decoding.steps

    def _add(self, requests: Sequence[Request]) -> None:
        running = set(self.decoding.keys.tolist())
        for request in requests:
            if request.key in running:
                raise RuntimeError(f"request {request.key} is running in this engine already")
            running.add(request.key)
        self.decoding.add(requests, self.script)

    def take_stats(self) -> EngineStats:
        stats = EngineStats(self.decoding.steps, self.spans, self.until_s)
        self.decoding.steps, self.spans = [], []
        return stats

    def park(self) -> float:
        if len(self.decoding.keys):
            raise RuntimeError("this engine has running requests, so it cannot release their KV cache")
        self.version = None
        return 0.0

    def unpark(self) -> None:
        pass

    def memory_mb(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


class ReplayedEngineActor(EngineActor):
    """The process of a replayed engine."""

    def _build(self, scratch: Path, threads: int) -> ReplayedEngine:
        script = Script.read(self.files)
        time.sleep(script.start_s / script.clock)
        return ReplayedEngine(script)

    def pid(self) -> int:
        return os.getpid()


class ReplayedLearner:
    """Stands where LearnerActor does: an update takes `learn_s` on one slot, and half of that on two. What it has learned is a digest of
    every batch in order, so a batch that is lost, learned twice or in another order shows in its weights."""

    def __init__(self) -> None:
        self.learn_s, self.rank = 0.0, 0
        self.digest, self.updates = bytes(8), 0

    def open(self, threads: int) -> dict[str, Any]:
        return {"memory_mb": 1.0, "spans": []}

    def pid(self) -> int:
        return os.getpid()

    def rendezvous(self, loopback: bool) -> tuple[str, int]:
        return "", 0

    def build(self, files: Source, place: Any, threads: int, state: Source | None, settings: RankSettings) -> dict[str, Any]:
        self.rank = settings.rank
        script = Script.read(read_source(files))
        self.learn_s = script.learn_s / script.clock
        if state is not None:
            saved = read_source(state)
            self.digest, self.updates = bytes(saved["model.safetensors"]), int(bytes(saved["learner.json"]))
        return {"memory_mb": 1.0, "spans": [], "cutter": Cutter(algorithm=settings.algorithm), "fetched": (0, 0)}

    def update(self, share: Share, threads: int) -> tuple[UpdateStats, list[Span]]:
        start, seconds = time.time(), self.learn_s / threads
        time.sleep(seconds)
        self.digest = hashlib.blake2b(self.digest + share.batch.tokens.tobytes(), digest_size=8).digest()
        self.updates += 1
        nothing = UpdateStats(importance_mean=1, trained_tokens=int(share.batch.lengths.sum()), applied=1, effective_share=1)
        return nothing, [Span("work", "update (replayed)", start, start + seconds)]

    def weights(self) -> tuple[Slices, tuple[dict[str, int], list[Span]]]:
        weights = whole_slices({} if self.rank else {WEIGHT: np.frombuffer(self.digest, np.uint8)})
        return weights, (digests(weights), [])

    def _state(self) -> dict[str, bytes]:
        return {"model.safetensors": self.digest, "learner.json": str(self.updates).encode()}

    def sees(self, folder: str, sizes: dict[str, int]) -> bool:
        return sees(folder, sizes)

    def save(self, folder: str, prefix: str) -> Delivery:
        return deliver({prefix + name: content for name, content in self._state().items()}, folder)

    def save_model(self, folder: str, trained: bool) -> tuple[Delivery, list[Span]]:
        return deliver({"model.safetensors": self.digest}, folder), []

    def keep(self) -> tuple[dict[str, bytes], dict[str, bytes], tuple[float, int, dict[str, bytes]]]:
        return self._state(), {}, (0.0, len(self.digest), {})

    def park(self) -> dict[str, Any]:
        return {"memory_mb": 1.0, "spans": []}

    def unpark(self) -> list[Span]:
        return []
