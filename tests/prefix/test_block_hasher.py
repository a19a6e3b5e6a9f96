"""Names of KV blocks inside vLLM against the addresses of the pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.prefix import block_hasher
from rlhfless_ray.prefix.block_hash import chain, root
from rlhfless_ray.prefix.block_hasher import MAX_PROMPTS, BlockHasher

SALT = "version 3"


def start(salt: str) -> bytes:
    return root(b"engine", salt)


def request(tokens: list[int], **changes: Any) -> Any:
    made = {"all_token_ids": tokens, "block_hashes": [], "cache_salt": SALT, "mm_features": [], "lora_request": None}
    return SimpleNamespace(**{**made, "num_tokens": len(tokens), "prompt_embeds": None, **changes})


def hasher(block_size: int = 4) -> BlockHasher:
    return BlockHasher(start, block_size, lambda request: [b"vLLM's own"])


@given(prompt=st.lists(st.integers(0, 9), max_size=30), grown=st.lists(st.integers(1, 9), max_size=6), block=st.integers(1, 6))
def test_full_blocks_have_the_addresses_of_their_pages(prompt: list[int], grown: list[int], block: int) -> None:
    """However many tokens come at a time, and for the second request with a prompt as for the first."""
    names = hasher(block)
    for _ in range(2):
        tokens = list(prompt)
        mine = request(tokens)
        mine.block_hashes += names(mine)
        for more in grown:
            tokens += [7] * more
            mine.num_tokens = len(tokens)
            mine.block_hashes += names(mine)
        assert mine.block_hashes == chain(start(SALT), tokens[: len(tokens) // block * block], block)


def test_another_version_has_other_names() -> None:
    names = hasher()
    assert not set(names(request([1] * 8))) & set(names(request([1] * 8, cache_salt="version 4")))


def test_requests_that_tokens_do_not_identify_use_the_hasher_of_vllm() -> None:
    names = hasher()
    for changes in ({"cache_salt": None}, {"mm_features": ["an image"]}, {"lora_request": "an adapter"}, {"prompt_embeds": [0.5]}):
        assert names(request([1] * 8, **changes)) == [b"vLLM's own"]
    assert names(request([1] * 3, cache_salt=None)) == [], "no block is full"


def test_the_number_of_cached_prompts_is_bounded() -> None:
    names = hasher(1)
    for token in range(MAX_PROMPTS + 3):
        names(request([token]))
    assert len(names.known) == 3


def test_the_number_of_cached_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts of many steps would take hundreds of megabytes in each engine."""
    monkeypatch.setattr(block_hasher, "MAX_TOKENS", 100)
    names = hasher(1)
    for token in range(20):
        assert len(names(request([token] * 30))) == 30
        assert sum(map(len, names.known.values())) == names.tokens <= 100
    assert len(names(request([7] * 300))) == 300 and len(names.known) == 1
