"""Where the pages of each prefix lie, which are missing, and what goes when memory is short. Knows nothing of Ray: what stands
for a bundle is whatever it was told (the service's are object references).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless_ray.prefix.address import Prefixes

PAGES_PER_BUNDLE = 64


@dataclass(eq=False)
class Held:
    """A bundle of pages in the object store, computed or being computed."""

    number: int
    ref: Any
    version: str
    addresses: tuple[bytes, ...]
    bytes: int
    used: int  # number of the question that needed it last


@dataclass(frozen=True)
class Job:
    """What one prefill instance is to compute: prompts (token prefixes), and the bundles to return, each with the numbers of its
    nodes. `needs`: bundles that hold what these prefixes begin with; `after`: numbers of jobs whose bundles do."""

    producer: int
    prefixes: list[tuple[int, int]]  # (prompt, tokens of it)
    bundles: list[list[int]]
    needs: list[Held] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


class PageIndex:
    """Maps addresses to bundles under a cap of memory.

    Of the bundles that a question does not need, those longest unused go first; among those used together, the ones made last,
    which hold what continues the others: a prefix never goes before its continuations.
    """

    def __init__(self, cap_bytes: int, pages_per_bundle: int = PAGES_PER_BUNDLE) -> None:
        self.cap_bytes, self.pages_per_bundle = cap_bytes, pages_per_bundle
        self.by_address: dict[bytes, Held] = {}
        self.held: dict[int, Held] = {}
        self.bytes = 0
        self.numbers, self.questions = itertools.count(), itertools.count(1)
        self.now = 0
        self.counts: Counter[str] = Counter()

    def missing(self, trie: Prefixes, page_bytes: int) -> list[int]:
        """A question for all pages of a trie: the nodes that nobody has computed and that fit under the cap, in the trie's order.

        What is there counts as used now. Where not all fits, the pages that most prompts begin with are taken, each with all
        before it; the others are counted as `no_room`, and whoever needs them computes them."""
        self.now = next(self.questions)
        new = []
        for number, node in enumerate(trie.nodes):
            held = self.by_address.get(node.address)
            if held is None:
                new.append(number)
            else:
                held.used = self.now
        self.counts["hits"] += len(trie.nodes) - len(new)
        self._make_room(len(new) * page_bytes)
        room = max(0, self.cap_bytes - self.bytes) // page_bytes
        if len(new) > room:
            self.counts["no_room"] += len(new) - room
            # a node has no more uses than the one before it, and a higher number: what is cut off has no continuation left
            new = sorted(sorted(new, key=lambda n: (-trie.uses[n], n))[:room])
        self.counts["missing"] += len(new)
        return new

    def _make_room(self, wanted: int) -> None:
        idle = sorted((h for h in self.held.values() if h.used < self.now), key=lambda h: (h.used, -h.number))
        for held in idle:
            if self.bytes + wanted <= self.cap_bytes:
                return
            self.counts["evicted"] += len(held.addresses)
            self.drop(held)

    def add(self, ref: Any, version: str, addresses: Sequence[bytes], page_bytes: int) -> Held:
        """A bundle that is computed now: whoever asks from here on is given the same one."""
        held = Held(next(self.numbers), ref, version, tuple(addresses), len(addresses) * page_bytes, self.now)
        self.held[held.number] = held
        self.bytes += held.bytes
        for address in addresses:
            self.by_address[address] = held
        return held

    def drop(self, held: Held) -> None:
        """Forget a bundle: evicted, of an old version, or lost."""
        if self.held.pop(held.number, None) is None:
            return
        self.bytes -= held.bytes
        for address in held.addresses:
            if self.by_address.get(address) is held:
                del self.by_address[address]
        held.ref = None

    def keep_only(self, version: str) -> int:
        """Free the bundles of every other policy version; returns how many pages went."""
        old = [held for held in self.held.values() if held.version != version]
        for held in old:
            self.drop(held)
        return sum(len(held.addresses) for held in old)

    def bundles_of(self, trie: Prefixes) -> tuple[list[Held], list[list[int]]]:
        """The bundles that hold pages of the trie, and for each prompt which of them (positions in the first list)."""
        found: dict[int, Held] = {}
        paths = []
        for path in trie.paths:
            mine: dict[int, None] = {}
            for node in path:
                held = self.by_address.get(trie.nodes[node].address)
                if held is None:
                    break  # pages behind a gap are of no use
                found.setdefault(held.number, held)
                mine[held.number] = None
            paths.append(list(mine))
        place = {number: i for i, number in enumerate(found)}
        return list(found.values()), [[place[number] for number in mine] for mine in paths]

    def jobs(self, trie: Prefixes, new: Sequence[int], producers: int) -> list[Job]:
        """Who computes the `new` nodes, each exactly once. One producer: all in one job. Several: what the shares of more than
        one begin with is computed first, by one of them, and taken from there by the others."""
        order = _depth_first(trie, new)
        inner = {trie.nodes[n].parent for n in order}
        leaves = [n for n in order if n not in inner]
        share = _deal(trie, order, leaves, producers)
        owners: dict[int, set[int]] = {}
        for leaf, who in zip(leaves, share, strict=True):
            node = leaf
            while node >= 0:
                owners.setdefault(node, set()).add(who)
                node = trie.nodes[node].parent
        fresh = set(order)
        trunk = [n for n in order if len(owners[n]) > 1]
        jobs = [self._job(trie, trunk, fresh, 0, [])] if trunk else []
        for who in sorted(set(share)):
            mine = [n for n in order if owners[n] == {who}]
            if mine:
                jobs.append(self._job(trie, mine, fresh, who, [0] if trunk else []))
        return jobs

    def _job(self, trie: Prefixes, nodes: list[int], fresh: set[int], producer: int, after: list[int]) -> Job:
        inner = {trie.nodes[n].parent for n in nodes}
        ends = [trie.nodes[n] for n in nodes if n not in inner]
        before: dict[int, Held] = {}
        for node in nodes:
            parent = trie.nodes[node].parent
            while parent >= 0:
                held = self.by_address.get(trie.nodes[parent].address)
                if held is not None:
                    before[held.number] = held
                parent = trie.nodes[parent].parent
        size = self.pages_per_bundle
        bundles = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        return Job(producer, [(end.prompt, end.path_end) for end in ends], bundles, list(before.values()), after)


def _depth_first(trie: Prefixes, nodes: Sequence[int]) -> list[int]:
    """The nodes such that each follows those before it and neighbours share as much as they can."""
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


def _deal(trie: Prefixes, order: list[int], leaves: list[int], producers: int) -> list[int]:
    """For each leaf, in order, its producer: neighbours together, new tokens about the same for each. What several leaves
    begin with is split among them."""
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
    """The nodes from a leaf towards the root, as far as they are `within`."""
    node = leaf
    while node in within:
        yield node
        node = trie.nodes[node].parent
