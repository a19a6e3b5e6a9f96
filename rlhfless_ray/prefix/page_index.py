"""Index of prefix pages: where they are, which are missing, and which to evict when memory is short.

Knows nothing of Ray. A bundle's reference is opaque here; the service uses object references.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless_ray.prefix.block_hash import Prefixes

PAGES_PER_BUNDLE = 64


@dataclass(eq=False)
class HeldBundle:
    """A bundle of pages in the object store, computed or being computed."""

    number: int
    ref: Any
    version: str
    addresses: tuple[bytes, ...]
    bytes: int
    used: int  # number of the last lookup that needed it


@dataclass(frozen=True)
class PrefillJob:
    """Work of one prefill instance: prompts (token prefixes) to compute, and the nodes of each bundle to return.

    `needs`: bundles that contain beginnings of these prefixes. `after`: numbers of the jobs whose bundles do.
    """

    producer: int
    prefixes: list[tuple[int, int]]  # (prompt, tokens of it)
    bundles: list[list[int]]
    needs: list[HeldBundle] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


class PageIndex:
    """Map addresses to bundles within a memory cap.

    Bundles that the current lookup does not need are evicted, least recently used first. Among bundles used together the newest
    go first, because they continue the others: a prefix is never evicted before its continuations.
    """

    def __init__(self, cap_bytes: int, pages_per_bundle: int = PAGES_PER_BUNDLE) -> None:
        self.cap_bytes, self.pages_per_bundle = cap_bytes, pages_per_bundle
        self.by_address: dict[bytes, HeldBundle] = {}
        self.held: dict[int, HeldBundle] = {}
        self.bytes = 0
        self.numbers, self.lookups = itertools.count(), itertools.count(1)
        self.current_lookup = 0
        self.no_room = 0  # pages that the current lookup misses and that do not fit

    def missing(self, trie: Prefixes, page_bytes: int) -> list[int]:
        """Look up all pages of a trie, and return the missing nodes that fit under the cap, in the trie's order.

        Pages that exist count as used now. If not all missing pages fit, those that most prompts begin with are chosen, each
        with all pages before it. `no_room` is the number of the others, which their users compute.
        """
        self.current_lookup = next(self.lookups)
        new = []
        for number, node in enumerate(trie.nodes):
            held = self.by_address.get(node.address)
            if held is None:
                new.append(number)
            else:
                held.used = self.current_lookup
        self._make_room(len(new) * page_bytes)
        room = max(0, self.cap_bytes - self.bytes) // page_bytes
        self.no_room = max(0, len(new) - room)
        if self.no_room:
            # a node has at most the uses of its parent and a higher number, so no chosen node loses its beginning
            new = sorted(sorted(new, key=lambda n: (-trie.uses[n], n))[:room])
        return new

    def _make_room(self, wanted: int) -> None:
        idle = sorted((h for h in self.held.values() if h.used < self.current_lookup), key=lambda h: (h.used, -h.number))
        for held in idle:
            if self.bytes + wanted <= self.cap_bytes:
                return
            self.drop(held)

    def add(self, ref: object, version: str, addresses: Sequence[bytes], page_bytes: int) -> HeldBundle:
        """Register a bundle that is being computed. Later lookups return it."""
        held = HeldBundle(next(self.numbers), ref, version, tuple(addresses), len(addresses) * page_bytes, self.current_lookup)
        self.held[held.number] = held
        self.bytes += held.bytes
        for address in addresses:
            self.by_address[address] = held
        return held

    def drop(self, held: HeldBundle) -> None:
        """Forget a bundle that is evicted, lost, or of an old version."""
        if self.held.pop(held.number, None) is None:
            return
        self.bytes -= held.bytes
        for address in held.addresses:
            if self.by_address.get(address) is held:
                del self.by_address[address]
        held.ref = None

    def keep_only(self, version: str) -> int:
        """Drop the bundles of all other policy versions, and return the number of their pages."""
        old = [held for held in self.held.values() if held.version != version]
        for held in old:
            self.drop(held)
        return sum(len(held.addresses) for held in old)

    def bundles_of(self, trie: Prefixes) -> tuple[list[HeldBundle], list[list[int]]]:
        """Return the bundles with pages of the trie, and for each prompt the positions of its bundles in that list."""
        bundles: dict[int, HeldBundle] = {}
        paths = []
        for path in trie.paths:
            mine: dict[int, None] = {}
            for node in path:
                held = self.by_address.get(trie.nodes[node].address)
                if held is None:
                    break  # pages after a missing one are useless
                bundles.setdefault(held.number, held)
                mine[held.number] = None
            paths.append(list(mine))
        position = {number: i for i, number in enumerate(bundles)}
        return list(bundles.values()), [[position[number] for number in mine] for mine in paths]

    def jobs(self, trie: Prefixes, new: Sequence[int], producers: int) -> list[PrefillJob]:
        """Assign the `new` nodes to producers, each exactly once.

        One producer gets one job. With several, nodes that more than one share begins with are computed first, by one of them,
        and reused by the others.
        """
        order = _depth_first(trie, new)
        inner = {trie.nodes[n].parent for n in order}
        leaves = [n for n in order if n not in inner]
        share = _assign_leaves(trie, order, leaves, producers)
        owners: dict[int, set[int]] = {}
        for leaf, who in zip(leaves, share, strict=True):
            node = leaf
            while node >= 0:
                owners.setdefault(node, set()).add(who)
                node = trie.nodes[node].parent
        trunk = [n for n in order if len(owners[n]) > 1]
        jobs = [self._job(trie, trunk, 0, [])] if trunk else []
        for who in sorted(set(share)):
            mine = [n for n in order if owners[n] == {who}]
            if mine:
                jobs.append(self._job(trie, mine, who, [0] if trunk else []))
        return jobs

    def _job(self, trie: Prefixes, nodes: list[int], producer: int, after: list[int]) -> PrefillJob:
        inner = {trie.nodes[n].parent for n in nodes}
        ends = [trie.nodes[n] for n in nodes if n not in inner]
        before: dict[int, HeldBundle] = {}
        seen = {-1}
        for node in nodes:
            while (node := trie.nodes[node].parent) not in seen:
                seen.add(node)
                if (held := self.by_address.get(trie.nodes[node].address)) is not None:
                    before[held.number] = held
        size = self.pages_per_bundle
        bundles = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        return PrefillJob(producer, [(end.prompt, end.path_end) for end in ends], bundles, list(before.values()), after)


def _depth_first(trie: Prefixes, nodes: Sequence[int]) -> list[int]:
    """Order the nodes depth-first, so that each follows its parent and neighbours share long prefixes."""
    children: dict[int, list[int]] = {}
    chosen = set(nodes)
    for n in nodes:
        parent = trie.nodes[n].parent
        children.setdefault(parent if parent in chosen else -1, []).append(n)
    order, stack = [], children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])[::-1]
    return order


def _assign_leaves(trie: Prefixes, order: list[int], leaves: list[int], producers: int) -> list[int]:
    """Return a producer for each leaf in order: contiguous ranges with about the same number of new tokens.

    The tokens of nodes below which there are several leaves are divided among them.
    """
    below = dict.fromkeys(order, 0)
    for leaf in leaves:
        for node in _path(trie, leaf, below):
            below[node] += 1
    weights = [sum(trie.nodes[n].tokens / below[n] for n in _path(trie, leaf, below)) for leaf in leaves]
    total, before, share = sum(weights), 0.0, []
    for tokens in weights:
        share.append(min(producers - 1, int(producers * (before + tokens / 2) / total)))
        before += tokens
    return share


def _path(trie: Prefixes, leaf: int, within: Container[int]) -> Iterator[int]:
    """Yield the nodes from a leaf towards the root, as long as they are in `within`."""
    node = leaf
    while node in within:
        yield node
        node = trie.nodes[node].parent
