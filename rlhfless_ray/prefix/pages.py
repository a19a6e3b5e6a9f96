"""Pages: the KV of one block over all layers as opaque bytes, and an engine's store of pages.

Only the engines that write and read a page know the meaning of its bytes. The address guarantees that they agree. A page is
therefore accepted if its address was requested, and if its checksum, which covers the address too, matches its bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rlhfless_ray.prefix.block_hash import distinct_prefixes, root


def checksum(address: bytes, page: np.ndarray) -> int:
    """Return the xxh3 hash over address and bytes, so that an intact page of another address does not match."""
    digest = xxhash.xxh3_64(address)
    digest.update(np.ascontiguousarray(page).data)
    return digest.intdigest()


@dataclass(frozen=True)
class Bundle:
    """Pages that are sent together, to keep the number of objects small. `start`: the root of their addresses."""

    start: bytes
    addresses: tuple[bytes, ...]
    pages: np.ndarray  # (pages, page_bytes) uint8
    checksums: tuple[int, ...]

    @classmethod
    def seal(cls, start: bytes, addresses: Sequence[bytes], pages: np.ndarray) -> Bundle:
        sums = tuple(checksum(address, page) for address, page in zip(addresses, pages, strict=True))
        return cls(start, tuple(addresses), pages, sums)


@dataclass(frozen=True)
class PageLayout:
    """Layout of an engine's pages."""

    fingerprint: bytes
    block_size: int
    page_bytes: int

    def start(self, version: str) -> bytes:
        """Return the root of addresses under a policy version (the requests' cache salt)."""
        return root(self.fingerprint + f" {self.block_size} {self.page_bytes}".encode(), version)


class PageStore:
    """Pages that an engine can load in its next steps, and those that it should save.

    The store is in the engine's process. It is filled before generation and read by the connector. `counts`: pages put, loaded,
    saved, and refused by reason; tokens loaded and computed (of prompts and responses).
    """

    def __init__(self) -> None:
        self.kind: PageLayout | None = None  # known once the engine has its KV cache
        self.refused = ""  # why this engine cannot use pages; "" if it can
        self.rows: dict[bytes, np.ndarray] = {}  # address → (page_bytes,) uint8
        self.to_save: set[str] = set()  # names of requests whose pages are saved when they end
        self.known: set[bytes] = set()  # pages that the requester has already
        self.saved: dict[str, tuple[list[bytes], np.ndarray]] = {}
        self.copied: dict[str, set[bytes]] = {}  # request name → pages that were copied while it was running
        self.copy_out: Callable[[Sequence[int]], np.ndarray] | None = None  # block numbers → (blocks, page_bytes)
        self.computed: dict[str, int] = {}  # request name → context tokens of a continued request that were computed here
        self.counts: Counter[str] = Counter()
        self.seconds = {"load": 0.0, "save": 0.0}  # spent copying

    def __deepcopy__(self, memo: object) -> PageStore:
        return self  # vLLM copies its configuration, but there is one store

    # ---- in --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> PageLayout:
        """The pages' layout. Raises RuntimeError before the engine is built and if it cannot use pages."""
        if self.kind is None:
            raise RuntimeError(f"this engine has no pages: {self.refused or 'it is not built yet'}")
        return self.kind

    def wanted(self, version: str, prompts: Iterable[Sequence[int]]) -> set[bytes]:
        """Return the addresses of all pages that the prompts can use."""
        return {node.address for node in distinct_prefixes(prompts, self.layout.block_size, self.layout.start(version)).nodes}

    def put(self, bundle: Bundle, version: str, wanted: set[bytes]) -> int:
        """Add the wanted, intact pages, and return their number.

        Damaged pages are counted as `damaged`. Pages of another model, dtype, block size or version have another root, and are
        counted as `foreign`. Pages of other prompts in the bundle are ignored.
        """
        taken, mine = 0, bundle.start == self.layout.start(version)
        for address, page, expected in zip(bundle.addresses, bundle.pages, bundle.checksums, strict=True):
            if not mine:
                self.counts["foreign"] += 1
            elif address not in wanted:
                continue
            elif page.nbytes != self.layout.page_bytes or checksum(address, page) != expected:
                self.counts["damaged"] += 1
            else:
                self.rows[address] = page
                taken += 1
        self.counts["put"] += taken
        return taken

    def clear(self) -> None:
        """Drop every page from the store. The engine's own cache is not affected."""
        self.rows.clear()

    def match(self, addresses: Sequence[bytes], first: int) -> list[np.ndarray]:
        """Return the pages from block `first` on, up to the first missing one."""
        pages = []
        for address in addresses[first:]:
            page = self.rows.get(address)
            if page is None:
                break
            pages.append(page)
        return pages

    # ---- out -------------------------------------------------------------------------------------------------

    def request_save(self, names: Iterable[str], known: Iterable[bytes] = (), after_copy: bool = False) -> None:
        """Save the pages of these requests when they finish or are cut.

        Those with `known` addresses are left out, and with `after_copy` those that were copied before.
        """
        names = set(names)
        self.to_save |= names
        copied = set().union(*(self.copied.pop(name, set()) for name in names))
        self.known |= set(known) | (copied if after_copy else set())

    def copy(self, name: str, addresses: Sequence[bytes], blocks: Sequence[int]) -> dict[bytes, np.ndarray]:
        """Copy pages of a running request, and return {address: page}. A repeated call copies all of them again."""
        assert self.copy_out is not None
        start = time.perf_counter()
        pages = self.copy_out(blocks)
        self.copied[name] = set(addresses)
        self.counts["copied"] += len(addresses)
        self.seconds["save"] += time.perf_counter() - start
        return dict(zip(addresses, pages, strict=True))

    def save(self, name: str, addresses: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy a request's pages out of the engine's cache, each address once. The connector calls this when the request ends."""
        assert self.copy_out is not None
        new = [i for i, address in enumerate(addresses) if address not in self.known]
        if not new:
            return
        self.known.update(addresses[i] for i in new)
        self.saved[name] = [addresses[i] for i in new], self.copy_out([blocks[i] for i in new])
        self.counts["saved"] += len(new)

    def take_saved(self, names: Iterable[str]) -> dict[bytes, np.ndarray]:
        """Return {address: page} saved for these requests, and stop saving for them."""
        saved: dict[bytes, np.ndarray] = {}
        for name in names:
            self.to_save.discard(name)
            addresses, pages = self.saved.pop(name, ([], np.empty((0, 0), np.uint8)))
            saved.update(zip(addresses, pages, strict=True))
        if not self.to_save:
            self.known.clear()
        return saved
