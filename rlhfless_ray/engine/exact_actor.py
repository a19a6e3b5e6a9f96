"""The process of an exact engine, which also computes KV pages for other engines.

Rollout engines and prefill instances share this class: a prefill instance computes prefixes and no responses.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.control_queue import DraftNews, EngineCommand
from rlhfless_ray.engine.engine_actor import EngineActor
from rlhfless_ray.engine.engine_members import start_members
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.prefix.block_hash import salt
from rlhfless_ray.prefix.pages import Bundle, PageLayout, PageStore
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Fetched, Prefilled, Request, Span
from rlhfless_ray.weights.checksum import damaged, digests_like
from rlhfless_ray.weights.model_folder import missing_index, stored_weights, write_folder
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from rlhfless_ray.engine.vllm_engine import VllmEngine

PAGES_S = 5.0  # timeout for the KV pages of a moved request; computing them again takes no longer
POLL_S = 0.002  # interval of looking for pages that the engine copies after its current step
ANY_VERSION = ""  # of pages that go from engine to engine: each address names the version of its page
DRAFTER_S = 5.0  # timeout for the drafter's weights; without them an engine drafts with its older ones


class ExactEngineActor(EngineActor):
    def __init__(self, files: Files, settings: EngineSettings, drafter: Files | None = None) -> None:
        self.carried: list[bytes] = []  # addresses of pages that arrived with requests
        self.old_tickets: set[int] = set()  # tickets of pages that earlier calls kept
        super().__init__(files, settings, drafter)

    def _import(self) -> None:
        import rlhfless_ray.engine.vllm_engine  # noqa: F401
        from rlhfless_ray.engine.prepare_vllm import prepare, set_environment

        config = json.loads(bytes(self.files.get("config.json", b"{}")))
        on_cpu, architectures = self.settings.device == "cpu", config.get("architectures") or ()
        set_environment(on_cpu)
        start_members(self.settings.tensor_parallel - 1, on_cpu, architectures)  # they import meanwhile
        prepare(on_cpu, architectures)

    def _build(self, scratch: Path, threads: int) -> VllmEngine:
        from rlhfless_ray.engine.engine_arguments import engine_folder
        from rlhfless_ray.engine.vllm_engine import VllmEngine

        drafter = write_folder(scratch / "drafter", self.drafter) if self.drafter else None
        return VllmEngine(engine_folder(scratch, self.files, self.settings), self.settings, self._tokenizer, drafter=drafter)

    def _notes(self) -> JsonObject:
        from rlhfless_ray.local.laptop.cpu_bfloat16 import note

        pages, drafts = self.engine.pages, self.engine.drafter
        return {
            "note": note(),
            "keeps_no_pages": pages.refused if pages is not None else "",
            "drafter_failure": drafts.failure if drafts is not None else "",
        }

    def _use_threads(self, threads: int) -> None:
        """A further member has one thread. Set before each call, because OpenMP keeps it per thread."""
        import torch

        torch.set_num_threads(threads - self.settings.tensor_parallel + 1)

    def rollout(
        self,
        epoch: int,
        requests: list[Request],
        interval_s: float,
        threads: int,
        pages: Sequence[object] = (),
        drafts: DraftNews | None = None,
    ) -> Iterator[tuple[TokenDeltas, EngineSteps, list[Span]]]:
        """Generate responses, see `EngineActor.rollout`. `pages`, `drafts`: as in `EngineCommand`."""
        for ticket in self.old_tickets:  # pages that were not fetched during a whole call
            self.engine.kept_pages.pop(ticket, None)
        self.old_tickets = set(self.engine.kept_pages)
        self.receive_pages(pages)
        of_earlier = len(self.carried)
        self.engine.update_drafts(fetch_drafter(drafts))
        try:
            yield from super().rollout(epoch, requests, interval_s, threads)
        finally:
            self._drop_carried(of_earlier)  # what arrived during the call may be for a request of the next one

    def enqueue(self, epoch: int, command: EngineCommand) -> bool:
        self.receive_pages(command.pages)
        return super().enqueue(epoch, replace(command, drafts=fetch_drafter(command.drafts)))

    def park(self) -> dict[str, Any]:
        if self.engine is not None:
            self._drop_carried(len(self.carried))  # views of objects, which the object store could not free
        return super().park()

    def _check(self, version: int) -> None:
        self.engine.check(self.channel, version)  # each member checks a part

    def published(self, version: int) -> Sequence[Any]:
        """Return the references to a version's parts, for a further member. Runs beside `load`."""
        return self.channel.refs[version]

    def differing(self, version: int, published: Mapping[str, int] | None, *parts: Files) -> tuple[list[str], list[str]]:
        """Find the tensors that may explain different log-probabilities of engine and learner.

        Args:
            version: The weight version. An engine that was parked loads it again.
            published: The digest of each tensor of the version.
            parts: Each learner rank's safetensors files of the weights, see `TrainerRank.model_files`.

        Returns:
            Names of the tensors whose published values differ from the files, and of the tensors in which this engine differs from a
            new one that loads the files. The second list is empty if the first is not.
        """
        from rlhfless_ray.weights.tensor_file import as_numpy

        model = {name: content for files in parts for name, content in files.items()}
        model |= missing_index(model)
        arrays = {name: as_numpy(tensor) for name, tensor in stored_weights(model)}
        wrong = damaged(digests_like(arrays, published), published) if published else []
        if wrong:
            return wrong, []
        if self.engine.version is None:
            self.engine.unpark()
            self.engine.load(version, arrays)
        with tempfile.TemporaryDirectory(prefix="rlhfless-compare-") as name:
            folder = write_folder(Path(name), {**self.files, **model})
            return wrong, self.engine.differing(folder, self.settings, arrays)

    def _drop_carried(self, count: int) -> None:
        """Drop the first pages that arrived with requests, unless they have arrived again since."""
        old = self.carried[:count]
        del self.carried[:count]
        for address in set(old) - set(self.carried):
            self.engine.pages.rows.pop(address, None)

    def hand_over(self, ticket: int, wait_s: float = 0.0) -> Bundle | None:
        """Return the KV pages kept under a ticket, once, or None if there are none within `wait_s`. Runs beside `rollout`."""
        end = time.monotonic() + wait_s
        while ticket not in self.engine.kept_pages and time.monotonic() < end:
            time.sleep(POLL_S)
        pages = self.engine.kept_pages.pop(ticket, None)
        if not pages:
            return None
        return Bundle.seal(self.engine.pages.layout.start(ANY_VERSION), list(pages), np.stack(list(pages.values())))

    def receive_pages(self, pages: Sequence[Any]) -> bool:
        """Fetch KV pages for requests of this call or the next. Runs beside `rollout`. Returns whether all have arrived intact.

        Contexts whose pages do not arrive in time are computed, and counted as lost. Pages of another model are refused.
        """
        import ray
        from ray.exceptions import RayError

        if not pages or self.engine is None or self.engine.pages is None or self.engine.pages.refused:  # the engine may still be starting
            return False
        missing = 0
        for ref in pages:
            try:
                bundle = ray.get(ref, timeout=PAGES_S)
            except RayError:
                self.engine.pages.counts["lost"] += 1
                bundle = None
            if bundle is None:
                missing += 1
                continue
            missing += len(bundle.addresses) - self.engine.pages.put(bundle, ANY_VERSION, set(bundle.addresses))
            self.carried += bundle.addresses
        return not missing

    # ---- pages of prompts -----------------------------------------------------------------------------------------

    def kind(self) -> PageLayout:
        """Return the layout of its pages. Raises RuntimeError if the engine cannot keep any."""
        store: PageStore = self.engine.pages
        return store.layout

    def fetch_pages(self, version: int, prompts: Sequence[Sequence[int]], refs: Sequence[Any], within_s: float) -> Fetched:
        """Replace the store's pages by those that `prompts` can use under `version`, from the bundles behind `refs`.

        Called before generation. Pages that are late, damaged or foreign are left out, and the engine computes them.
        """
        import ray
        from ray.exceptions import RayError

        start, store = time.time(), self.engine.pages
        self._take_loaded()  # discard counts of requests that were moved here before
        before = store.counts.copy()
        store.clear()
        wanted = store.wanted(salt(version), prompts) if refs else set()
        lost = size = 0
        end = time.monotonic() + within_s
        for ref in refs:
            try:
                bundle = ray.get(ref, timeout=max(0.0, end - time.monotonic()))
            except RayError:  # GetTimeoutError among them
                lost += 1
                continue
            size += bundle.pages.nbytes if store.put(bundle, salt(version), wanted) else 0
        new = store.counts - before
        now = time.time()
        spans = [Span("transfer", f"fetch {len(refs)} bundles of KV pages", start, now)] if refs else []
        return Fetched(new["put"], size, lost, new["foreign"], new["damaged"], now - start, spans)

    def drop_pages(self) -> tuple[int, int, float]:
        """Drop the pages after generation, because the object store keeps them while they are referenced.

        Returns pages and tokens copied into the engine's cache since they were fetched, and the seconds that took, which are
        part of the engine's steps.
        """
        self.engine.pages.clear()
        return self._take_loaded()

    def _take_loaded(self) -> tuple[int, int, float]:
        store, seconds = self.engine.pages, self.engine.pages.seconds["load"]
        store.seconds["load"] = 0.0
        return store.counts.pop("loaded", 0), store.counts.pop("loaded_tokens", 0), seconds

    def prefill(
        self,
        version: int,
        prefixes: Sequence[np.ndarray],
        bundles: Sequence[Sequence[bytes]],
        needs: Sequence[object],
        within_s: float,
        threads: int,
    ) -> tuple[Any, ...]:
        """Compute token prefixes, each (n,) int32, and return a `Prefilled`, then a `Bundle` for each list of addresses.

        `needs`: references to bundles with pages that other instances computed. Raises RunError if the engine has another version,
        because its pages would be another policy's.
        """
        if self.engine.version != version:
            raise RunError(f"pages of weight version {version} were requested, but this engine has {self.engine.version}")
        self._use_threads(threads)
        start = time.time()
        tokens = [tuple(prefix.tolist()) for prefix in prefixes]
        # `wanted` leaves out a prompt's last token, so each prefix is extended by one
        fetched = self.fetch_pages(version, [(*one, 0) for one in tokens] if needs else [], needs, within_s)
        store: PageStore = self.engine.pages
        seconds, computed = dict(store.seconds), store.counts["computed_tokens"]
        names = [str(-1 - i) for i in range(len(tokens))]
        store.request_save(names, known=store.rows)
        requests = [Request(-1 - i, one, 0, 1, 0.0) for i, one in enumerate(tokens)]
        for _ in self.engine.generate(requests):
            pass
        self.engine.take_stats()
        pages = store.take_saved(names)
        store.clear()
        load_s, save_s = (store.seconds[name] - seconds[name] for name in ("load", "save"))
        sealing = time.time()
        sealed = [self._seal(version, addresses, pages) for addresses in bundles]
        end = time.time()
        spans = [*fetched.spans, Span("work", "prefill", fetched.spans[-1].to_s if fetched.spans else start, end)]
        done = Prefilled(
            store.counts["computed_tokens"] - computed, sum(len(b.addresses) for b in sealed), self.kind().page_bytes,
            end - start - load_s - save_s - (end - sealing) - fetched.seconds, load_s, save_s + end - sealing, fetched, spans,
        )  # fmt: skip
        return (done, *sealed)

    def _seal(self, version: int, addresses: Sequence[bytes], pages: dict[bytes, np.ndarray]) -> Bundle:
        there = [address for address in addresses if address in pages]
        rows = [pages[address] for address in there]
        whole = np.stack(rows) if rows else np.empty((0, self.kind().page_bytes), np.uint8)
        return Bundle.seal(self.kind().start(salt(version)), there, whole)


def fetch_drafter(drafts: DraftNews | None) -> DraftNews | None:
    """Fetch the drafter's weights. The result has none if they do not arrive in time."""
    import ray
    from ray.exceptions import RayError

    if drafts is None or drafts.weights is None:
        return drafts
    try:
        return replace(drafts, weights=ray.get(drafts.weights, timeout=DRAFTER_S))
    except RayError:
        return replace(drafts, weights=None)
