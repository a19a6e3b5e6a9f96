"""The rollout function's process: one engine, its weights by version. A plain class; the pool wraps it in an actor."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlhfless_ray.rollout.inbox import Inbox, Order
from rlhfless_ray.rollout.progress import Progress
from rlhfless_ray.types import EngineStep, Request, Span
from rlhfless_ray.weights.folder import write_folder
from rlhfless_ray.weights.version import checksum


class RolloutActor:
    concurrency_groups: ClassVar = {"control": 1}  # `tell` comes while `rollout` works

    def __init__(self, files: dict[str, bytes], settings: dict[str, Any]) -> None:
        """Imports only, so that a process can be prewarmed without a lease. `files`: config and tokenizer."""
        start = time.time()
        self.files, self.settings = files, settings
        self.engine: Any = None
        self.inbox = Inbox()
        import rlhfless_ray.rollout.engine as engine

        engine.prepare()
        self.imported = Span("start", "import vllm", start, time.time())

    def open(self, threads: int) -> dict[str, Any]:
        """Build the engine, without weights of its own."""
        import psutil

        from rlhfless_ray.rollout.engine import Engine

        start = time.time()
        set_threads(threads)
        with tempfile.TemporaryDirectory(prefix="rlhfless-engine-") as name:
            tempfile.tempdir = name  # vLLM leaves a rendezvous file in the temporary folder: let it go with this one
            self.engine = Engine(write_folder(Path(name), self.files), self.settings)
            tempfile.tempdir = None
        memory_mb = psutil.Process().memory_info().rss / 2**20
        spans = [self.imported, Span("start", "build engine", start, time.time())]
        return {"memory_mb": memory_mb, "spans": spans}

    def load(self, version: int, weights: dict[str, np.ndarray], expected: int) -> list[Span]:
        """Take a weight version. Raises ValueError when the bytes are not those that were published."""
        start = time.time()
        if checksum(weights) != expected:
            raise ValueError(f"weight version {version} arrived damaged: its checksum is not the published one")
        self.engine.unpark()
        self.engine.load(version, weights)
        return [Span("transfer", f"load version {version}", start, time.time())]

    def rollout(
        self, epoch: int, requests: list[Request], interval_s: float, threads: int
    ) -> Iterator[tuple[Progress, list[EngineStep], list[Span]]]:
        """Answer requests; yields their progress about every `interval_s`, with the step records since. `epoch` numbers the
        calls: orders that `tell` brings for this one are carried out on the way."""
        set_threads(threads)
        self.inbox.open(epoch)
        start = time.time()
        try:
            for progress in self.engine.generate(requests, interval_s, self.inbox):
                end = time.time()
                yield progress, self.engine.take_steps(), around(self.engine.take_spans(), "generate", start, end)
                start = end
        finally:
            self.inbox.close()

    def tell(self, epoch: int, order: Order) -> bool:
        """Runs beside `rollout`, in the group "control". False: that call is over, nothing will be done."""
        return self.inbox.tell(epoch, order)

    def park(self) -> dict[str, Any]:
        """Leave the device, weights and all."""
        from rlhfless_ray.functions.memory import kept_memory

        start = time.time()
        self.engine.park()
        return kept_memory([Span("transfer", "leave device", start, time.time())])


def set_threads(threads: int) -> None:
    """As many threads as leased cores; set before each call, in the thread that will work: OpenMP keeps it there."""
    import torch

    torch.set_num_threads(threads)


def around(spans: list[Span], what: str, start: float, end: float) -> list[Span]:
    """`spans`, in their order, and work named `what` in all the rest of start … end."""
    found = []
    for span in spans:
        found += [Span("work", what, start, span.from_s), span]
        start = span.to_s
    return [*found, Span("work", what, start, end)]
