"""Addresses and the trie of distinct prefixes, against counting by brute force over tuples of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.prefix.block_hash import chain, distinct_prefixes, root

prompts_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple), max_size=12)


def prefixes_by_hand(prompts: list[tuple[int, ...]], block: int) -> set[tuple[int, ...]]:
    """Every prefix that ends a block, full or last, of each prompt without its last token."""
    found = set()
    for prompt in prompts:
        part = prompt[:-1]
        found |= {part[:end] for end in range(block, len(part) + 1, block)}
        if part:
            found.add(part)
    return found


@given(prompts=prompts_of_few_tokens, block=st.integers(1, 5))
def test_trie_holds_each_distinct_block_prefix_once(prompts: list[tuple[int, ...]], block: int) -> None:
    trie = distinct_prefixes(prompts, block)
    by_hand = prefixes_by_hand(prompts, block)
    found = {prompts[node.prompt][: node.path_end] for node in trie.nodes}
    assert found == by_hand and len(trie.nodes) == len(by_hand)
    assert trie.distinct_tokens == sum((len(p) - 1) % block + 1 for p in by_hand)
    assert [sum(trie.nodes[n].tokens for n in path) for path in trie.paths] == [len(p) - 1 for p in prompts]
    for number, node in enumerate(trie.nodes):
        prefix = prompts[node.prompt][: node.path_end]
        assert trie.uses[number] == sum(_begins(p[:-1], prefix, block) for p in prompts)
        assert node.parent == -1 if node.depth == 0 else trie.nodes[node.parent].path_end == node.depth * block
    for prompt, path in zip(prompts, trie.paths, strict=True):
        assert [trie.nodes[n].address for n in path] == chain(b"", prompt[:-1], block)


def _begins(part: tuple[int, ...], prefix: tuple[int, ...], block: int) -> bool:
    """In blocks: a partly filled block is another one than the same block filled up."""
    return part[: len(prefix)] == prefix and (len(prefix) % block == 0 or len(part) == len(prefix))


def test_a_shared_header_counts_once() -> None:
    header = list(range(64))
    trie = distinct_prefixes([header + [100 + i] * 33 for i in range(10)], 32)
    assert trie.distinct_tokens == 64 + 10 * 32
    assert trie.uses[:2] == [10, 10]


@settings(deadline=None, max_examples=50)
@given(tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=100), at=st.data())
def test_addresses_differ_by_tokens_version_engine_and_block_size(tokens: list[int], at: st.DataObject) -> None:
    """One token, the version, the engine's kind or the block size changed: every page from there on has another address."""
    block = 8
    mine = chain(root(b"engine", "version 3"), tokens, block)
    assert len(set(mine)) == len(mine) == -(-len(tokens) // block)
    where = at.draw(st.integers(0, len(tokens) - 1))
    other = chain(root(b"engine", "version 3"), [t + (i == where) for i, t in enumerate(tokens)], block)
    assert mine[: where // block] == other[: where // block]
    assert not set(mine[where // block :]) & set(other)
    for start in (root(b"engine", "version 4"), root(b"another", "version 3")):
        assert not set(mine) & set(chain(start, tokens, block))
    assert len(set(mine) & set(chain(root(b"engine", "version 3"), tokens, 9))) == (len(tokens) <= block)


def test_the_last_token_is_always_computed() -> None:
    assert distinct_prefixes([(7,)], 4).nodes == []


def test_a_block_needs_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        distinct_prefixes([(1, 2)], 0)
