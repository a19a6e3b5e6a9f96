"""The process of an engine of any backend: it generates responses. A plain class, which pools wrap in actors."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.control_queue import ControlQueue, EngineCommand
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.protocol import Engine
from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import BASE, Request, Span
from rlhfless_ray.weights.channel import ObjectStoreChannel, PublishedVersion, base_slices
from rlhfless_ray.weights.tensor_file import Files
from rlhfless_ray.weights.tensor_slice import Slices


class EngineActor:
    """Serve one `Engine`. A backend's class adds what to import, how to build the engine, and calls that only this backend has."""

    # `enqueue` runs beside `rollout`. Calls in "pages" also run while `enqueue` waits for pages of an engine that waits for ours.
    concurrency_groups: ClassVar = {"control": 1, "pages": 1}

    def __init__(self, files: Files, settings: EngineSettings, drafter: Files | None = None) -> None:
        """Only import, so that a process can be prewarmed without a lease.

        `files`: the policy's config and tokenizer. `drafter`: files of a model that drafts.
        """
        start = time.time()
        self.files, self.settings, self.drafter = files, settings, drafter
        self.engine: Any = None  # an `Engine` from `open` on
        self.control_queue = ControlQueue()
        self.channel = ObjectStoreChannel()
        self._import()
        self.imported = Span("start", "import vllm", start, time.time())

    def _import(self) -> None:
        """Import what `_build` needs, which would otherwise be paid under a lease."""

    def _build(self, scratch: Path, threads: int) -> Engine:
        """Build the engine. `scratch`: a folder that is removed afterwards. `threads`: leased cores."""
        raise NotImplementedError

    def _notes(self) -> JsonObject:
        """Return what the pool records about the built engine, by name."""
        return {}

    def _use_threads(self, threads: int) -> None:
        """Use as many threads as leased cores, if the engine computes in this process."""

    def open(self, threads: int) -> dict[str, Any]:
        """Build the engine without weights."""
        start = time.time()
        self._use_threads(threads)
        with tempfile.TemporaryDirectory(prefix="rlhfless-engine-") as name:
            tempfile.tempdir = name  # vLLM leaves a rendezvous file in the temporary folder
            try:
                self.engine = self._build(Path(name), threads)
            finally:
                tempfile.tempdir = None
        spans = [self.imported, Span("start", "build engine", start, time.time())]
        return {"memory_mb": self.engine.memory_mb(), "spans": spans, **self._notes()}

    def _tokenizer(self) -> Any:
        from rlhfless_ray.weights.load_policy import load_tokenizer

        return load_tokenizer(self.files, self.settings.trust_remote_code)

    def wake(self) -> None:
        """Prepare a parked engine for `load`, which it does itself otherwise."""
        self.engine.unpark()

    def load(
        self,
        version: int,
        part: Slices,
        expected: Mapping[str, int],
        base: Files | tuple[str, Mapping[str, int], str] | None = None,
        *more: Slices,
        refs: Mapping[int, Sequence[Any]] = MappingProxyType({}),
    ) -> list[Span]:
        """Load a weight version from its parts: `part` and `more`.

        `expected`: the digest of each slice. `base`: see `base_slices`. `refs`: references to the parts, and to the base as version
        BASE, if there are further members.

        Raises ValueError with the slices' names if the bytes differ from the published ones.
        """
        start = time.time()
        self.channel.offer(version, (part, *more), expected, refs.get(version, ()))
        if base is not None:
            self.channel.offer(BASE, [base_slices(base)], {}, refs.get(BASE, ()))
        try:
            self._check(version)
            self.engine.unpark()
            weights, below = (PublishedVersion(self.channel, number) for number in (version, BASE))
            self.engine.load(version, weights, None if base is None else below)
        finally:
            self.channel.close()
        return [Span("transfer", f"load version {version}", start, time.time())]

    def _check(self, version: int) -> None:
        """Check all that was published. Raises WeightsDamaged before the engine's weights change."""
        self.channel.check(version)

    def rollout(
        self, epoch: int, requests: list[Request], interval_s: float, threads: int
    ) -> Iterator[tuple[TokenDeltas, EngineSteps, list[Span]]]:
        """Generate responses, and yield new tokens and step records about every `interval_s` seconds.

        `epoch`: number of this call, by which `enqueue` adds commands to it.
        """
        self._use_threads(threads)
        self.control_queue.open(epoch)
        start = time.time()
        try:
            for deltas in self.engine.generate(requests, interval_s, self.control_queue):
                stats = self.engine.take_stats()
                yield deltas, EngineSteps(stats.steps), fill_between(stats.spans, "generate", start, stats.until_s)
                start = stats.until_s
        finally:
            self.control_queue.close()

    def enqueue(self, epoch: int, command: EngineCommand) -> bool:
        """Add a command for the call with this epoch. Runs beside `rollout`. Returns False if that call is over."""
        return self.control_queue.put(epoch, command)

    def park(self) -> dict[str, Any]:
        """Release the memory of weights and KV cache, and on CPU unused pages of the process."""
        from rlhfless_ray.local.process_memory import own_memory_mb, release_unused_memory

        start = time.time()
        on_device_mb = 0.0 if self.engine is None else self.engine.park()
        if self.settings.device == "cpu":
            release_unused_memory()
        memory_mb = (own_memory_mb() if self.engine is None else self.engine.memory_mb()) + on_device_mb
        what = "give memory back" if on_device_mb < 1 else f"give memory back, {on_device_mb:.0f} MB stay"
        return {"memory_mb": memory_mb, "spans": [Span("transfer", what, start, time.time())]}


def fill_between(spans: list[Span], what: str, start: float, end: float) -> list[Span]:
    """Return `spans` with work named `what` in the gaps of the interval from `start` to `end`."""
    filled = []
    for span in spans:
        filled += [Span("work", what, start, span.from_s), span]
        start = span.to_s
    return [*filled, Span("work", what, start, end)]
