"""Pages: the KV of one block over all layers as opaque bytes, and where an engine keeps those it may load.

Nobody but the engine that wrote a page and the one that reads it knows what its bytes mean; that they mean the same to both is
part of the page's address. So a page is judged by two things only: whether its address is one that was asked for, and whether
its checksum, which covers the address too, is that of its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rlhfless_ray.prefix.address import distinct_prefixes, root


def checksum(address: bytes, page: np.ndarray) -> int:
    """xxh3 over address and bytes: another address's page, although whole, does not fit."""
    digest = xxhash.xxh3_64(address)
    digest.update(np.ascontiguousarray(page).data)
    return digest.intdigest()


@dataclass(frozen=True)
class Bundle:
    """Pages that travel together, so that there are few objects. `start`: the root of their addresses."""

    start: bytes
    addresses: tuple[bytes, ...]
    pages: np.ndarray  # (pages, page_bytes) uint8
    checksums: tuple[int, ...]

    @classmethod
    def seal(cls, start: bytes, addresses: Sequence[bytes], pages: np.ndarray) -> Bundle:
        sums = tuple(checksum(address, page) for address, page in zip(addresses, pages, strict=True))
        return cls(start, tuple(addresses), pages, sums)


@dataclass(frozen=True)
class Kind:
    """What the pages of an engine are."""

    fingerprint: bytes
    block_size: int
    page_bytes: int

    def start(self, version: str) -> bytes:
        """The root of their addresses under a policy version (the requests' cache salt)."""
        return root(self.fingerprint + f" {self.block_size} {self.page_bytes}".encode(), version)


class PageStore:
    """The pages an engine can load in its next steps, and those it was asked to save. It lies in the engine's process and is
    filled before generation; the connector reads it.

    `counts`: pages put, loaded, saved and refused by reason; tokens loaded, and computed (of prompts and responses).
    """

    def __init__(self) -> None:
        self.kind: Kind | None = None  # known once the engine has its KV cache
        self.refused = ""  # why this engine cannot take part; empty when it can
        self.rows: dict[bytes, np.ndarray] = {}  # address → (page_bytes,) uint8
        self.asked: set[str] = set()  # names of requests whose pages are saved when they end
        self.known: set[bytes] = set()  # pages that are not worth saving: whoever asked has them
        self.saved: dict[str, tuple[list[bytes], np.ndarray]] = {}
        self.copy_out: Callable[[Sequence[int]], np.ndarray] | None = None  # block numbers → (blocks, page_bytes)
        self.computed: dict[str, int] = {}  # by name: tokens of a continued request's context that were computed here
        self.counts: Counter[str] = Counter()
        self.seconds = {"load": 0.0, "save": 0.0}  # spent copying

    def __deepcopy__(self, memo: object) -> PageStore:
        return self  # it is handed through a configuration, which may be copied; the store is one

    # ---- in --------------------------------------------------------------------------------------------------

    @property
    def made(self) -> Kind:
        """The kind, once there is an engine. Raises RuntimeError before, and where it cannot take part."""
        if self.kind is None:
            raise RuntimeError(f"this engine has no pages: {self.refused or 'it is not built yet'}")
        return self.kind

    def wanted(self, version: str, prompts: Iterable[Sequence[int]]) -> set[bytes]:
        """Addresses of every page that the prompts could use."""
        return {node.address for node in distinct_prefixes(prompts, self.made.block_size, self.made.start(version)).nodes}

    def put(self, bundle: Bundle, version: str, wanted: set[bytes]) -> int:
        """Take the pages that are wanted and sound; returns how many. Damaged ones are counted as `damaged`, and those of
        another model, dtype, block size or version, whose addresses begin elsewhere, as `foreign`. A bundle also has pages of
        other prompts, which nobody here wants: they are left where they are."""
        taken, mine = 0, bundle.start == self.made.start(version)
        for address, page, told in zip(bundle.addresses, bundle.pages, bundle.checksums, strict=True):
            if not mine:
                self.counts["foreign"] += 1
            elif address not in wanted:
                continue
            elif page.nbytes != self.made.page_bytes or checksum(address, page) != told:
                self.counts["damaged"] += 1
            else:
                self.rows[address] = page
                taken += 1
        self.counts["put"] += taken
        return taken

    def clear(self) -> None:
        """Forget every page; what the engine's own cache has of them stays there."""
        self.rows.clear()

    def match(self, addresses: Sequence[bytes], first: int) -> list[np.ndarray]:
        """The pages from block `first` on, up to the first that is not here."""
        found = []
        for address in addresses[first:]:
            page = self.rows.get(address)
            if page is None:
                break
            found.append(page)
        return found

    # ---- out -------------------------------------------------------------------------------------------------

    def ask(self, names: Iterable[str], known: Iterable[bytes] = ()) -> None:
        """Save the pages of these requests when they end, finished or cut, but for those with `known` addresses."""
        self.asked |= set(names)
        self.known |= set(known)

    def save(self, name: str, addresses: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy a request's pages out of the engine's cache; each address once. The connector calls this when it ends."""
        assert self.copy_out is not None
        new = [i for i, address in enumerate(addresses) if address not in self.known]
        if not new:
            return
        self.known.update(addresses[i] for i in new)
        self.saved[name] = [addresses[i] for i in new], self.copy_out([blocks[i] for i in new])
        self.counts["saved"] += len(new)

    def take(self, names: Iterable[str]) -> dict[bytes, np.ndarray]:
        """{address: page} of what was saved for these requests; they are no longer asked for."""
        found: dict[bytes, np.ndarray] = {}
        for name in names:
            self.asked.discard(name)
            addresses, pages = self.saved.pop(name, ([], np.empty((0, 0), np.uint8)))
            found.update(zip(addresses, pages, strict=True))
        if not self.asked:
            self.known.clear()
        return found
