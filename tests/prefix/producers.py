"""Stand-ins for engines: they make pages whose content follows from the address, and count what they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhfless_ray.prefix.pages import PageLayout, PageStore

KIND = PageLayout(b"engine", 4, 256)


def page_of(address: bytes, size: int = KIND.page_bytes) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(address).digest(size), np.uint8)


def producer_class() -> type:
    """Local, so that Ray ships it by value."""

    class FakeProducer:
        def __init__(self, delay_s: float = 0.0, kind: PageLayout = KIND) -> None:
            self.delay_s, self.its_kind = delay_s, kind
            self.computed: list[bytes] = []
            self.jobs = 0  # begun

        def open(self, threads: int) -> dict[str, Any]:
            import time

            from rlhfless_ray.types import Span

            if self.delay_s is None:
                raise RuntimeError("too little memory for a KV cache")
            return {"memory_mb": 1.0, "spans": [Span("start", "build engine", time.time() - 0.01, time.time())]}

        def load(self, version: int, weights: Any, expected: int) -> list[Any]:
            return []

        def fetch_pages(self, version: int, prompts: Any, refs: Sequence[Any], within_s: float) -> Any:
            self.reader = taker(self.its_kind)
            return self.reader.fetch_pages(version, prompts, refs, within_s)

        def drop_pages(self) -> tuple[int, int, float]:
            return self.reader.drop_pages()

        def kind(self) -> PageLayout:
            return self.its_kind

        def prefill(
            self,
            version: int,
            prefixes: Sequence[np.ndarray],
            bundles: Sequence[Sequence[bytes]],
            needs: Sequence[Any],
            within_s: float,
            threads: int,
        ) -> tuple[Any, ...]:
            import time

            import ray

            from rlhfless_ray.prefix.block_hash import chain, salt
            from rlhfless_ray.prefix.pages import Bundle
            from rlhfless_ray.types import Fetched, Prefilled, Span

            self.jobs += 1
            here = {address for ref in needs for address in ray.get(ref).addresses}
            begin = time.time()
            time.sleep(self.delay_s)
            start, tokens, before = self.its_kind.start(salt(version)), 0, len(self.computed)
            for prefix in prefixes:
                for depth, address in enumerate(chain(start, prefix, self.its_kind.block_size)):
                    if address not in here:
                        here.add(address)
                        self.computed.append(address)
                        tokens += min(self.its_kind.block_size, len(prefix) - depth * self.its_kind.block_size)
            spans = [Span("work", "prefill", begin, time.time())]
            done = Prefilled(tokens, len(self.computed) - before, self.its_kind.page_bytes, 0.01, 0.0, 0.01, Fetched(), spans)
            return done, *(Bundle.seal(start, b, np.stack([page_of(a, self.its_kind.page_bytes) for a in b])) for b in bundles)

        def log(self) -> list[bytes]:
            return self.computed

        def begun(self) -> int:
            return self.jobs

    return FakeProducer


def taker(kind: PageLayout = KIND) -> Any:
    """A rollout instance's end without an engine, in this process."""
    from rlhfless_ray.engine.exact_actor import ExactEngineActor

    made = ExactEngineActor.__new__(ExactEngineActor)
    store = PageStore()
    store.kind = kind
    made.engine = SimpleNamespace(pages=store)
    return made
