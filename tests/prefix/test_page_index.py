"""The index against what must hold whatever is asked: each page once, nothing over the cap, no prefix gone before what follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.prefix.block_hash import Prefixes, distinct_prefixes, root
from rlhfless_ray.prefix.page_index import PageIndex, PrefillJob

BLOCK, PAGE = 2, 10
questions = st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=6), max_size=8)


def ask(index: PageIndex, prompts: list[tuple[int, ...]], version: str = "v", producers: int = 1) -> tuple[Prefixes, list[PrefillJob]]:
    trie = distinct_prefixes(prompts, BLOCK, root(b"", version))
    jobs = index.jobs(trie, index.missing(trie, PAGE), producers)
    for job in jobs:
        for bundle in job.bundles:
            index.add(object(), version, [trie.nodes[n].address for n in bundle], PAGE)
    return trie, jobs


@given(asked=questions, cap=st.integers(0, 12), size=st.integers(1, 4), producers=st.integers(1, 3))
def test_invariants_hold_after_any_lookups(asked: list[list[tuple[int, ...]]], cap: int, size: int, producers: int) -> None:
    index = PageIndex(cap * PAGE, size)
    for prompts in asked:
        had = set(index.by_address)
        trie, jobs = ask(index, prompts, producers=producers)
        assert index.bytes == sum(held.bytes for held in index.held.values()) <= index.cap_bytes
        assert index.bytes == PAGE * len(index.by_address)
        computed = [trie.nodes[n].address for job in jobs for bundle in job.bundles for n in bundle]
        assert len(computed) == len(set(computed)) and not had & set(computed), "each page is computed once"
        for node in trie.nodes:
            if node.address in index.by_address and node.parent >= 0:
                assert trie.nodes[node.parent].address in index.by_address, "a prefix went before what follows it"
        needed = {node.address for node in trie.nodes}
        stuck = {a for held in index.held.values() if held.used == index.current_lookup for a in held.addresses} - needed
        assert len(needed & set(index.by_address)) == min(cap - len(stuck), len(needed)), "all the room there is is used"
        bundles, paths = index.bundles_of(trie)
        for path, mine in zip(trie.paths, paths, strict=True):
            there = {a for i in mine for a in bundles[i].addresses}
            assert all(trie.nodes[n].address in there for n in path if trie.nodes[n].address in index.by_address)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=8),
    before=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=4), producers=st.integers(1, 4),
)  # fmt: skip
def test_jobs_compute_exactly_what_is_missing(prompts: list, before: list, producers: int) -> None:
    """By running them: an instance computes what its prefixes have and it did not fetch."""
    index = PageIndex(10**6, 3)
    ask(index, before)
    had = set(index.by_address)
    trie = distinct_prefixes(prompts, BLOCK, root(b"", "v"))
    jobs = index.jobs(trie, index.missing(trie, PAGE), producers)
    assert len({job.producer for job in jobs if not job.after}) <= producers
    computed: list[bytes] = []
    returned: list[set[bytes]] = []
    for job in jobs:
        here = {a for held in job.needs for a in held.addresses} | {a for other in job.after for a in returned[other]}
        fresh = []
        for prompt, tokens in job.prefixes:
            path = [trie.nodes[n] for n in trie.paths[prompt] if trie.nodes[n].path_end <= tokens]
            assert path[-1].path_end == tokens
            fresh += [node.address for node in path if node.address not in here]
            here |= set(fresh)
        addresses = {trie.nodes[n].address for bundle in job.bundles for n in bundle}
        assert set(fresh) == addresses
        computed += fresh
        returned.append(addresses)
    assert sorted(computed) == sorted({node.address for node in trie.nodes} - had)


class Counted(list):  # type: ignore[type-arg]
    """A list that counts its reads."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def test_the_work_is_linear_in_the_tokens() -> None:
    header = tuple(range(800))
    for producers in (1, 2):
        index = PageIndex(10**6)
        ask(index, [header])
        trie = distinct_prefixes([(*header, 900 + i, *range(2000)) for i in range(2)], BLOCK, root(b"", "v"))
        new = index.missing(trie, PAGE)
        nodes = trie.nodes = Counted(trie.nodes)
        jobs = index.jobs(trie, new, producers)
        reads, size = nodes.reads, len(nodes)
        assert reads < 12 * size
        held = {held.number for held in index.held.values()}
        assert all({one.number for one in job.needs} == held for job in jobs)


def test_shares_are_balanced_and_the_header_is_computed_once() -> None:
    header = (7,) * 40
    prompts = [(*header, *(100 + i,) * 21) for i in range(40)]
    index = PageIndex(10**6)
    trie = distinct_prefixes(prompts, BLOCK)
    trunk, *rest = index.jobs(trie, index.missing(trie, PAGE), 4)
    assert trunk.prefixes == [(0, 40)] and trunk.after == []
    assert [len(job.prefixes) for job in rest] == [10] * 4 and {job.producer for job in rest} == {0, 1, 2, 3}
    assert all(job.after == [0] for job in rest)


def test_eviction_takes_the_oldest_and_of_those_the_deepest() -> None:
    index = PageIndex(6 * PAGE, 1)
    first, _ = ask(index, [(1, 1, 1, 1, 1, 1, 0)])  # three pages
    second, _ = ask(index, [(2, 2, 2, 2, 0)])  # two
    ask(index, [(1, 1, 0)])  # the first one's first page is used again
    ask(index, [(3, 3, 3, 3, 0)])  # needs two, one is free
    left = set(index.by_address)
    assert first.nodes[2].address not in left and len(left) == 6
    assert {first.nodes[0].address, first.nodes[1].address, *(node.address for node in second.nodes)} <= left


def test_a_weight_update_frees_the_old_pages() -> None:
    index = PageIndex(100 * PAGE)
    old, _ = ask(index, [(1, 2, 3, 4, 5)], "version 1")
    refs = [held for held in index.held.values()]
    assert index.keep_only("version 2") == 2
    assert index.bytes == 0 and not index.by_address and all(held.ref is None for held in refs)
    assert index.bundles_of(old) == ([], [[]])


def test_a_lost_bundle_is_computed_again() -> None:
    index = PageIndex(100 * PAGE, 1)
    trie, _ = ask(index, [(1, 2, 3, 4, 5)])
    index.drop(index.by_address[trie.nodes[0].address])
    assert index.bundles_of(trie)[1] == [[]], "what follows a gap cannot be loaded"
    again, jobs = ask(index, [(1, 2, 3, 4, 5)])
    assert [job.bundles for job in jobs] == [[[0]]] and len(index.bundles_of(again)[1][0]) == 2


@pytest.mark.parametrize("cap, taken", [(3, 3), (5, 5)])
def test_the_most_shared_pages_are_kept_if_not_all_fit(cap: int, taken: int) -> None:
    header = (9,) * 6  # three pages, of ten prompts
    index = PageIndex(cap * PAGE, 1)
    trie, _ = ask(index, [(*header, i, i, 0) for i in range(10)])
    assert len(index.by_address) == taken and index.no_room == 13 - taken
    assert {trie.nodes[n].address for n in range(3)} <= set(index.by_address)
