"""An engine's process that loads KV pages and computes them for others. A plain class, which pools wrap in actors.

Prefill instances and rollout engines share this class: a prefill instance computes prefixes and no responses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.prefix.block_hash import salt
from rlhfless_ray.prefix.pages import Bundle, PageLayout, PageStore
from rlhfless_ray.rollout.engine_actor import RolloutActor
from rlhfless_ray.types import Request, Span


@dataclass(frozen=True)
class Fetched:
    """The result of fetching bundles: loaded pages, failures by reason, and the time it took."""

    pages: int = 0
    bytes: int = 0
    lost: int = 0  # bundles whose owner or node is gone, whose computation failed, or that arrived too late
    foreign: int = 0  # pages of another model, dtype, block size or version
    damaged: int = 0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Prefilled:
    """The result of a prefill job: tokens computed, pages returned, and seconds spent copying pages in (`load_s`) and out (`save_s`)."""

    tokens: int
    pages: int
    page_bytes: int
    prefill_s: float
    load_s: float
    save_s: float
    fetched: Fetched
    spans: list[Span]


class PageActor(RolloutActor):
    def kind(self) -> PageLayout:
        """Return the layout of its pages. Raises RuntimeError if the engine cannot keep any."""
        store: PageStore = self.engine.pages
        return store.layout

    def fetch_pages(self, version: int, prompts: Sequence[Sequence[int]], refs: Sequence[Any], within_s: float) -> Fetched:
        """Replace the store's pages by those that `prompts` can use under `version`, from the bundles behind `refs`.

        Called before generation. Pages that are late, damaged or foreign are left out, and the engine computes them.
        """
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
        needs: Sequence[Any],
        within_s: float,
        threads: int,
    ) -> tuple[Any, ...]:
        """Compute token prefixes, each (n,) int32, and return a `Prefilled`, then a `Bundle` for each list of addresses.

        `needs`: references to bundles with pages that other instances computed. Raises RunError if the engine has another version,
        because its pages would be another policy's.
        """
        if self.engine.version != version:
            raise RunError(f"pages of weight version {version} were requested, but this engine has {self.engine.version}")
        self._set_threads(threads)
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
        self.engine.take_steps()
        self.engine.take_spans()
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
