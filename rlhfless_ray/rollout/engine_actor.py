"""The rollout function's process: one engine, its weights by version. A plain class; the pool wraps it in an actor."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlhfless_ray.prefix.block_hash import salt
from rlhfless_ray.prefix.pages import Bundle
from rlhfless_ray.rollout.control_queue import ControlQueue, EngineCommand
from rlhfless_ray.rollout.engine_settings import EngineSettings
from rlhfless_ray.rollout.token_deltas import TokenDeltas
from rlhfless_ray.types import EngineStep, Request, Span
from rlhfless_ray.weights.checksum import combined, damaged, digests, listed
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tensor_file import Content, Files

PAGES_S = 5.0  # to fetch the KV pages of a moved request; to compute them does not take longer


class RolloutActor:
    # `tell` comes while `rollout` works; `hand_over` too, also while `tell` waits for pages of an engine that waits for ours
    concurrency_groups: ClassVar = {"control": 1, "pages": 1}

    def __init__(self, files: Files, settings: EngineSettings) -> None:
        """Imports only, but all of them, so that a process can be prewarmed without a lease. `files`: config and tokenizer."""
        start = time.time()
        self.files, self.settings = files, settings
        self.engine: Any = None
        self.control_queue = ControlQueue()
        self.carried: list[bytes] = []  # addresses of pages that came with requests
        self.old_tickets: set[int] = set()  # of pages that were cut out before the newest call
        import rlhfless_ray.rollout.vllm_engine as engine

        config = json.loads(bytes(files.get("config.json", b"{}")))
        engine.prepare(settings.device == "cpu", config.get("architectures") or ())
        self.imported = Span("start", "import vllm", start, time.time())

    def open(self, threads: int) -> dict[str, Any]:
        """Build the engine, without weights of its own."""
        from rlhfless_ray.local.process_memory import own_memory_mb
        from rlhfless_ray.rollout.vllm_engine import VllmEngine, model_folder

        start = time.time()
        set_threads(threads)
        with tempfile.TemporaryDirectory(prefix="rlhfless-engine-") as name:
            tempfile.tempdir = name  # vLLM leaves a rendezvous file in the temporary folder: let it go with this one
            self.engine = VllmEngine(model_folder(Path(name), self.files, self.settings), self.settings, self._tokenizer)
            tempfile.tempdir = None
        spans = [self.imported, Span("start", "build engine", start, time.time())]
        pages = self.engine.pages
        return {"memory_mb": own_memory_mb(), "spans": spans, "keeps_no_pages": pages.refused if pages is not None else ""}

    def _tokenizer(self) -> Any:
        from rlhfless_ray.weights.load_policy import load_tokenizer

        return load_tokenizer(self.files, self.settings.trust_remote_code)

    def load(self, version: int, weights: dict[str, np.ndarray], expected: int | Mapping[str, int]) -> list[Span]:
        """Take a weight version. `expected`: the digest of each tensor, or one checksum. Raises ValueError when the bytes are not
        those that were published, with the tensors' names where they are known."""
        start = time.time()
        found = digests(weights)
        wrong = damaged(found, expected) if isinstance(expected, Mapping) else []
        if wrong or (not isinstance(expected, Mapping) and combined(found) != expected):
            which = f": {listed(wrong)} differ from what was published" if wrong else ": its checksum is not the published one"
            raise ValueError(f"weight version {version} arrived damaged{which}")
        self.engine.unpark()
        self.engine.load(version, weights)
        return [Span("transfer", f"load version {version}", start, time.time())]

    def differing(self, model: Content, published: Mapping[str, int] | None) -> tuple[list[str], list[str] | None]:
        """Name the tensors by which this engine may differ from the learner, when their log-probabilities do.

        Args:
            model: the learner's weights as a safetensors file, see `Trainer.model_bytes`.
            published: the digest of each tensor of the version that the engine has loaded.

        Returns: names of the tensors that were published otherwise than they are in the file; and of those that the engine holds
        otherwise than a new engine that loads the file, None where the former explain it, or it holds no weights any more.
        """
        from rlhfless_ray.weights.tensor_file import as_numpy, load_tensors

        arrays = {name: as_numpy(tensor) for name, tensor in load_tensors(model).items()}
        wrong = damaged(digests(arrays), published) if published else []
        if wrong or self.engine is None or self.engine.version is None:
            return wrong, None
        with tempfile.TemporaryDirectory(prefix="rlhfless-compare-") as name:
            folder = write_folder(Path(name), {**self.files, "model.safetensors": model})
            return wrong, self.engine.differing(folder, self.settings, {name: array.shape for name, array in arrays.items()})

    def rollout(
        self, epoch: int, requests: list[Request], interval_s: float, threads: int, pages: Sequence[Any] = ()
    ) -> Iterator[tuple[TokenDeltas, list[EngineStep], list[Span]]]:
        """Answer requests; yields their progress about every `interval_s`, with the step records since. `epoch` numbers the
        calls: orders that `tell` brings for this one are carried out on the way. `pages`: as in an order."""
        set_threads(threads)
        for ticket in self.old_tickets:  # who did not ask for them in a whole call will not
            self.engine.kept.pop(ticket, None)
        self.old_tickets = set(self.engine.kept)
        self._fetch(pages)
        self.control_queue.open(epoch)
        start = time.time()
        try:
            for progress in self.engine.generate(requests, interval_s, self.control_queue):
                end = time.time()
                yield progress, self.engine.take_steps(), around(self.engine.take_spans(), "generate", start, end)
                start = end
        finally:
            self.control_queue.close()
            for address in self.carried:
                self.engine.pages.rows.pop(address, None)
            self.carried.clear()

    def tell(self, epoch: int, order: EngineCommand) -> bool:
        """Runs beside `rollout`, in the group "control". False: that call is over, nothing will be done."""
        self._fetch(order.pages)
        return self.control_queue.tell(epoch, order)

    def hand_over(self, ticket: int) -> Bundle | None:
        """The KV pages of what an order with this ticket cut, once; None where there are none. In the group "pages"."""
        pages = self.engine.kept.pop(ticket, None)
        if not pages:
            return None
        start = self.engine.pages.layout.start(salt(self.engine.version))
        return Bundle.seal(start, list(pages), np.stack(list(pages.values())))

    def take_in(self, bundle: Bundle) -> None:
        """Pages for requests that come, until the end of the call. Those of another version or model are refused, and their
        contexts computed."""
        self.engine.pages.put(bundle, salt(self.engine.version), set(bundle.addresses))
        self.carried += bundle.addresses

    def _fetch(self, pages: Sequence[Any]) -> None:
        """What cannot be had in time, as its engine has died, is computed instead, and counted."""
        import ray
        from ray.exceptions import RayError

        if not pages or self.engine is None or self.engine.pages is None or self.engine.pages.refused:  # None: it starts
            return
        for ref in pages:
            try:
                bundle = ray.get(ref, timeout=PAGES_S)
            except RayError:
                self.engine.pages.counts["lost"] += 1
                continue
            if bundle is not None:
                self.take_in(bundle)

    def park(self) -> dict[str, Any]:
        """Give back what the engine can: its device, weights and all, or on CPU its KV cache, and what a process that waits has no
        use for."""
        from rlhfless_ray.local.process_memory import release_unused_memory, report_parked_memory

        start = time.time()
        if self.engine is not None:
            self.engine.park()
        if self.settings.device == "cpu":
            release_unused_memory()
        on_device_mb = None if self.engine is None else self.engine.kept_on_device_mb()
        return report_parked_memory([Span("transfer", "give memory back", start, time.time())], on_device_mb)


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
